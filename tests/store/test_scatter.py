"""Bytes of a record, read straight into arrays that lie among others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.errors import DamagedRecord, RecordError
from rewarm.format.pieces import runs
from rewarm.format.record import Encoded, Header, Part, encode
from rewarm.state.chain import Key, as_tokens, block_key
from rewarm.state.layout import Kind, Layout, TensorSpec
from rewarm.state.sequence import Array
from rewarm.store import scatter
from rewarm.store.disk import Disk
from rewarm.store.files import Files, RecordName
from rewarm.testing.faults import Fault, FaultyDisk

N = 16


def record(arrays: Mapping[str, Array], axes: Mapping[str, int]) -> tuple[RecordName, Encoded]:
    """A block of `N` tokens that holds `arrays`."""
    parts = []
    for name, array in sorted(arrays.items()):
        axis = axes[name]
        others = array.shape[:axis] + array.shape[axis + 1 :]
        storage = array.dtype.str
        parts.append(Part(TensorSpec(name, Kind.ROWS, array.dtype.name, storage, axis, others), array))
    tokens, parent = as_tokens(range(N)), Key(bytes(32))
    key = block_key(parent, tokens)
    layout = Layout(tuple(part.spec for part in parts), 0)
    header = Header(
        kind="block",
        key=key,
        parent=parent,
        fingerprint=bytes(32),
        layout=layout.digest,
        block_tokens=N,
        first=0,
        tokens=tokens.tobytes(),
    )
    return RecordName(bytes(32), key, is_point=False), encode(header, parts)


def files_in(folder: Path, disk: Disk) -> Files:
    (folder / "tmp").mkdir(exist_ok=True)
    return Files(folder, "p", disk)


def surrounded(array: Array, axis: int, before: int, after: int) -> tuple[Array, Array]:
    """A larger array of nines, and the view into it that has the shape of `array`."""
    shape = list(array.shape)
    shape[axis] += before + after
    whole = np.full(shape, 9, array.dtype)
    return whole, whole[(*(slice(None),) * axis, slice(before, before + array.shape[axis]))]


SHAPES = [
    ((1, 3, N, 64), 2, "<u2"),  # runs of 2 KiB
    ((1, 3, N, 64), 2, "<f4"),
    ((1, 3, N, 2), 2, "<u2"),  # runs of 64 bytes: read elsewhere, then copied
    ((N, 5), 0, "<f4"),  # one run
    ((N,), 0, "|u1"),
    ((4, 1, N), 2, "<i8"),
    ((0, N), 1, "<f4"),
    ((700, N, 64), 1, "<u2"),  # several system calls
]


@pytest.mark.parametrize(("shape", "axis", "storage"), SHAPES)
@pytest.mark.parametrize(("before", "after"), [(0, 0), (N, 0), (3, 5)])
@pytest.mark.parametrize("short", [False, True])
def test_rows_come_to_their_place_and_nowhere_else(
    tmp_path: Path, shape: tuple[int, ...], axis: int, storage: str, before: int, after: int, short: bool
) -> None:
    array = np.random.default_rng(1).integers(0, 100, shape).astype(storage)
    disk = FaultyDisk()
    files = files_in(tmp_path, disk)
    name, encoded = record({"a": array, "b": array + 1}, {"a": axis, "b": axis})
    files.publish(name, encoded)
    first, second = surrounded(array, axis, before, after), surrounded(array, axis, before, after)
    if short:
        disk.plant(Fault("read_into", "short", times=40))
    files.read(name, lambda header: {"a": first[1], "b": second[1]})
    for (whole, view), expected in ((first, array), (second, array + 1)):
        assert np.array_equal(view, expected)
        assert (whole == 9).sum() - (expected == 9).sum() == whole.size - view.size


@given(st.data())
def test_pieces_are_the_bytes_in_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    widened = tuple(n + data.draw(st.integers(0, 2)) for n in shape)
    whole = np.arange(np.prod(widened, dtype=int), dtype="<u4").reshape(widened)
    view = whole[tuple(slice(0, n) for n in shape)] if shape else whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rewarm.format.pieces.SHORT_RUN", 0)
        pieces = runs(view)
    assert pieces is not None
    assert b"".join(pieces) == view.tobytes()
    for piece in pieces:
        piece[:] = bytes(len(piece))
    assert not view.any()


def test_damage_is_found_wherever_the_bytes_went(tmp_path: Path) -> None:
    array = np.random.default_rng(2).integers(0, 100, (1, 2, N, 128)).astype("<u2")
    files = files_in(tmp_path, Disk())
    name, encoded = record({"a": array, "b": array}, {"a": 2, "b": 2})
    files.publish(name, encoded)
    path = files.path(name)
    whole = path.read_bytes()
    for at in range(len(encoded.head), len(whole), 997):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        targets = {each: surrounded(array, 2, 4, 4)[1] for each in "ab"}
        with pytest.raises(DamagedRecord, match="checksum of tensor"):
            files.read(name, lambda header, targets=targets: targets)


@pytest.mark.parametrize("wrong", [np.zeros((1, 2, N, 4), "<u2"), np.zeros((1, 2, N, 8), "<i2")])
def test_a_place_that_does_not_fit_says_nothing_about_the_record(tmp_path: Path, wrong: Array) -> None:
    array = np.zeros((1, 2, N, 8), "<u2")
    files = files_in(tmp_path, Disk())
    name, encoded = record({"a": array}, {"a": 2})
    files.publish(name, encoded)
    with pytest.raises(RecordError) as caught:
        files.read(name, lambda header: {"a": wrong})
    assert not isinstance(caught.value, DamagedRecord)


def test_one_call_asks_for_no_more_than_the_system_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter, "MAX_PIECE", 10)
    taken = scatter.one_call([memoryview(bytes(n)) for n in (4, 4, 4, 4)])
    assert [len(piece) for piece in taken] == [4, 4, 2]
    many = scatter.one_call([memoryview(b"x")] * 5)
    assert len(many) == 5
    monkeypatch.setattr(scatter, "MAX_BUFFERS", 3)
    assert len(scatter.one_call([memoryview(b"x")] * 5)) == 3
