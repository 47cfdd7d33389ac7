"""The fake engine must see what it is there to see: each fault below is planted and must be found."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from rewarm.state.layout import Kind
from rewarm.state.sequence import Opaque, Rows, SequenceState, Window
from rewarm.testing.fake_engine import (
    FakeEngine,
    Layer,
    StateMismatch,
    latent,
    pair,
    recurrent,
    triple,
    window,
)

KINDS: dict[str, tuple[Layer, ...]] = {
    "pair": (pair(), pair()),
    "pair-axis-2-float16": (pair(axis=2, dtype="float16"),),
    "latent": (latent(), latent(axis=1)),
    "triple": (triple(),),
    "window": (pair(), window(6, 0)),
    "sinks": (window(6, 2), window(3, 1, dtype="bfloat16")),
    "hybrid": (pair(), recurrent(), window(5)),
    "recurrent": (recurrent(),),
    "none": (),
}


@pytest.mark.parametrize("layers", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("n", [0, 1, 2, 5, 6, 7, 30])
def test_a_state_has_the_shapes_that_its_layout_says(layers: tuple[Layer, ...], n: int) -> None:
    engine = FakeEngine(3, layers)
    state = engine.state(list(range(n)))
    layout = state.layout()
    assert len(layout.tensors) == sum(map(len, layers))
    if n:
        engine.check(state, [*range(n), 9], exact=True)
    for name, tensor in state.tensors.items():
        assert tensor.array.dtype.str == layout.by_name[name].storage
        if tensor.array.dtype.kind == "f":
            assert np.isfinite(tensor.array).all()
        if (tensor.dtype or "") == "bfloat16":
            assert not ((tensor.array & 0x7F80) == 0x7F80).any()


@pytest.mark.parametrize("layers", KINDS.values(), ids=KINDS)
def test_rows_do_not_depend_on_later_tokens(layers: tuple[Layer, ...]) -> None:
    engine = FakeEngine(3, layers)
    short, long = engine.state([5, 6, 7]), engine.state([5, 6, 7, 8, 9])
    for name, tensor in short.tensors.items():
        if isinstance(tensor, Rows):
            cut = np.take(long.tensors[name].array, range(3), axis=tensor.axis)
            np.testing.assert_array_equal(cut, tensor.array)


@pytest.mark.parametrize("layers", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("start", [0, 1, 4, 6, 11, 12])
def test_extending_gives_the_state_of_the_whole(layers: tuple[Layer, ...], start: int) -> None:
    engine, tokens = FakeEngine(3, layers), list(range(100, 112))
    extended = engine.extend(engine.state(tokens[:start]), tokens)
    engine.check(extended, tokens, exact=True)


@pytest.mark.parametrize("layers", [v for k, v in KINDS.items() if k != "none"], ids=[k for k in KINDS if k != "none"])
def test_extending_carries_faults_on(layers: tuple[Layer, ...]) -> None:
    """An engine that goes on from a wrong state stays wrong: all but the last row of each tensor is foreign."""
    engine, tokens = FakeEngine(3, layers), list(range(100, 104))
    foreign = engine.state([1, *tokens[1:4]])
    with pytest.raises(StateMismatch):
        engine.check(engine.extend(foreign, [*tokens, 7]), [*tokens, 7])


def _planted(state: SequenceState, fault: str) -> SequenceState:
    """`state` with one fault in its first tensor, made as a faulty cache would."""
    name = sorted(state.tensors)[0]
    tensor = state.tensors[name]
    array = np.array(tensor.array, order="C")
    axis = 0 if isinstance(tensor, Opaque) else tensor.axis
    rows = np.moveaxis(array, axis, 0)
    if fault == "one bit":
        array.reshape(-1).view(np.uint8)[-1] ^= 1
    elif fault == "rows swapped":
        rows[[1, 2]] = rows[[2, 1]]
    elif fault == "row doubled":
        rows[2] = rows[1]
    elif fault == "row of zeros":
        rows[-1] = 0
    elif fault == "shifted by one":
        rows[...] = np.roll(rows, 1, axis=0)
    if isinstance(tensor, Rows):
        planted: Rows | Window | Opaque = Rows(array, tensor.axis, tensor.dtype)
    elif isinstance(tensor, Window):
        planted = Window(array, tensor.axis, tensor.size, tensor.keep, tensor.dtype)
    else:
        planted = Opaque(array, tensor.dtype)
    return SequenceState(state.n_tokens, {**state.tensors, name: planted}, state.meta, state.valid_from)


FAULTS = {
    "one bit": "differ",
    "rows swapped": "it holds the row of token",
    "row doubled": "it holds the row of token",
    "row of zeros": "it is zero",
    "shifted by one": "it holds the row of token",
}


@pytest.mark.parametrize("layers", [KINDS["pair"], KINDS["latent"], KINDS["sinks"], KINDS["triple"]], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(layers: tuple[Layer, ...], fault: str) -> None:
    engine, tokens = FakeEngine(3, layers), list(range(40, 60))
    with pytest.raises(StateMismatch, match=FAULTS[fault]):
        engine.check(_planted(engine.state(tokens), fault), tokens)


@pytest.mark.parametrize("layers", [v for k, v in KINDS.items() if k != "none"], ids=[k for k in KINDS if k != "none"])
def test_another_seed_or_another_first_token_shows(layers: tuple[Layer, ...]) -> None:
    engine, tokens = FakeEngine(3, layers), list(range(40, 60))
    with pytest.raises(StateMismatch):
        engine.check(FakeEngine(4, layers).state(tokens), tokens)
    with pytest.raises(StateMismatch):
        engine.check(engine.state([0, *tokens[1:]]), tokens)
    with pytest.raises(StateMismatch):
        engine.check(engine.state([*tokens[1::-1], *tokens[2:]]), tokens)


def test_layers_and_tensors_differ_from_each_other() -> None:
    state = FakeEngine(0, (pair(), pair())).state([1, 2, 3])
    seen = {tensor.array.tobytes() for tensor in state.tensors.values()}
    assert len(seen) == 4


def test_missing_or_renamed_tensors_meta_and_lengths_are_refused() -> None:
    engine = FakeEngine(0, (pair(), recurrent()))
    tokens = [1, 2, 3]
    state = engine.state(tokens)
    fewer = {name: tensor for name, tensor in state.tensors.items() if name != "00.keys"}
    for wrong in (
        SequenceState(3, fewer, state.meta),
        SequenceState(3, state.tensors, {**state.meta, "offset": 4}),
        SequenceState(3, state.tensors, state.meta, valid_from=1),
    ):
        with pytest.raises(StateMismatch):
            engine.check(wrong, tokens)
    with pytest.raises(StateMismatch):
        engine.check(state, tokens[:2])
    with pytest.raises(StateMismatch):
        engine.check(SequenceState(0, state.tensors), tokens)
    engine.check(SequenceState(3, state.tensors), tokens)
    with pytest.raises(StateMismatch):
        engine.check(SequenceState(3, state.tensors), tokens, exact=True)


def test_quantisation_from_a_length_changes_the_layout_and_its_valid_from() -> None:
    engine = FakeEngine(0, (pair(),), quantise_from=5, quantised=(triple(),))
    before, after = engine.state(range(4)), engine.state(range(5))
    assert (before.valid_from, after.valid_from) == (0, 5)
    assert before.layout() != after.layout()
    assert all(spec.kind is Kind.ROWS for spec in after.layout().tensors)
    with pytest.raises(ValueError, match="quantises"):
        engine.extend(before, range(6))


def test_states_are_the_same_in_every_process() -> None:
    code = (
        "from rewarm.testing.fake_engine import *; import hashlib\n"
        "s = FakeEngine(7, (pair(), latent(), triple(), window(6, 2), recurrent())).state([3, -1, 2**62] * 9)\n"
        "print(hashlib.sha256(b''.join(t.array.tobytes() for t in s.tensors.values())).hexdigest())"
    )
    seen = set()
    for seed in ("0", "4711"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        seen.add(run.stdout.strip())
    assert len(seen) == 1
    assert seen == {"a14054ebbae34f352aed3800b010d6c6501fa327518049b97314af2c2ae850a3"}
