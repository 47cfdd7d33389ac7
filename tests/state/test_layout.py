"""Layouts: what is part of the digest, and what a state must be to have one."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from rewarm.state.layout import Kind, Layout, TensorSpec
from rewarm.state.sequence import Opaque, Rows, SequenceState, Window

ROWS = TensorSpec("k", Kind.ROWS, "float32", "<f4", 1, (2, 4))
WINDOW = TensorSpec("w", Kind.WINDOW, "float32", "<f4", 0, (4,), 8, 2)
OPAQUE = TensorSpec("o", Kind.OPAQUE, "float32", "<f4")


def test_the_digest_is_stable() -> None:
    """A golden value: caches on disk are found again by it."""
    assert (
        Layout((ROWS, WINDOW, OPAQUE), 5).digest.hex()
        == "2ccb004d0570df4e3e036ee27bf46e5eb3421068f781aa2d604a619e6063cfa2"
    )


def test_the_order_of_tensors_does_not_matter() -> None:
    assert Layout((ROWS, WINDOW)).digest == Layout((WINDOW, ROWS)).digest
    assert Layout((ROWS, WINDOW)) == Layout((WINDOW, ROWS))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "v"},
        {"dtype": "bfloat16"},
        {"storage": "<f2"},
        {"axis": 0},
        {"shape": (4, 2)},
        {"shape": (8,)},
        {"shape": (24,)},
        {"kind": Kind.WINDOW, "size": 4},
    ],
    ids=str,
)
def test_every_field_of_a_tensor_is_part_of_the_digest(change: dict[str, object]) -> None:
    assert Layout((dataclasses.replace(ROWS, **change),)).digest != Layout((ROWS,)).digest  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"size": 9}, {"keep": 1}], ids=str)
def test_a_windows_size_and_keep_are_part_of_the_digest(change: dict[str, object]) -> None:
    assert Layout((dataclasses.replace(WINDOW, **change),)).digest != Layout((WINDOW,)).digest  # type: ignore[arg-type]


def test_b018_valid_from_and_a_tensor_more_are_part_of_the_digest() -> None:
    digests = {
        Layout((ROWS,)).digest,
        Layout((ROWS,), 1).digest,
        Layout((ROWS, WINDOW)).digest,
        Layout((ROWS, OPAQUE)).digest,
        Layout(()).digest,
    }
    assert len(digests) == 5


def test_fields_do_not_run_into_each_other() -> None:
    def spec(name: str, dtype: str) -> Layout:
        return Layout((TensorSpec(name, Kind.OPAQUE, dtype, "<f4"),))

    assert spec("a", "bc").digest != spec("ab", "c").digest
    two = Layout((TensorSpec("a", Kind.OPAQUE, "x", "<f4"), TensorSpec("b", Kind.OPAQUE, "x", "<f4")))
    one = Layout((TensorSpec("a" + "opaque" + "x" + "<f4" + "b", Kind.OPAQUE, "x", "<f4"),))
    assert two.digest != one.digest


def test_a_layout_of_rows_alone_can_be_cut_and_others_cannot() -> None:
    assert Layout((ROWS,)).rows_only
    assert not Layout((ROWS, WINDOW)).rows_only
    assert not Layout((OPAQUE,)).rows_only
    assert not Layout(()).rows_only


@pytest.mark.parametrize(
    ("n", "span"),
    [(0, (0, 0)), (1, (1, 1)), (2, (2, 2)), (3, (2, 2)), (8, (2, 2)), (9, (2, 3)), (30, (2, 24))],
)
def test_a_window_holds_its_first_and_its_last_rows(n: int, span: tuple[int, int]) -> None:
    assert WINDOW.window_span(n) == span
    kept, start = span
    assert kept + n - start == WINDOW.window_rows(n)


def test_wrong_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="one name"):
        Layout((ROWS, dataclasses.replace(WINDOW, name="k")))
    with pytest.raises(ValueError, match="negative"):
        Layout((ROWS,), -1)


def _floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (Rows(_floats(3, 4), 0), "3 rows for 5 tokens"),
        (Rows(_floats(5, 4), 2), "axis 2"),
        (Rows(_floats(5, 4), -2), "axis -2"),
        (Rows(np.zeros(5, dtype=object), 0), "cannot be stored"),
        (Rows(np.zeros(5, dtype=[("a", "f4")]), 0), "cannot be stored"),
        (Rows(np.zeros(5, dtype="S3"), 0), "cannot be stored"),
        (Rows(np.zeros(5, dtype="M8[s]"), 0), "cannot be stored"),
        (Window(_floats(5, 4), 0, 3), "5 rows for a window of 3"),
        (Window(_floats(4, 4), 0, 8), "4 rows for a window of 8"),
        (Window(_floats(5, 4), 0, 5, 5), "keep 5"),
        (Window(_floats(5, 4), 0, 0), "size 0"),
        (Window(_floats(5, 4), 0, 5, -1), "keep -1"),
        (Opaque(np.zeros(5, dtype=object)), "cannot be stored"),
    ],
    ids=str,
)
def test_b012_a_state_whose_arrays_do_not_fit_its_length_has_no_layout(
    tensor: Rows | Window | Opaque, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SequenceState(5, {"t": tensor}).layout()


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        SequenceState(-1, {}).layout()


def test_byte_order_is_not_part_of_a_layout() -> None:
    big = SequenceState(2, {"t": Rows(np.zeros((2, 3), dtype=">f4"), 0)})
    little = SequenceState(2, {"t": Rows(np.zeros((2, 3), dtype="<f4"), 0)})
    assert big.layout() == little.layout()


def test_bytes_of_a_state() -> None:
    layout = Layout((ROWS, WINDOW, OPAQUE))
    assert layout.state_nbytes(20) == 20 * 32 + 8 * 16
    assert layout.state_nbytes(3) == 3 * 32 + 3 * 16
