"""The conformance suite, run on the fake engine; and that it refuses codecs with faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewarm.state.sequence import Rows, SequenceState, Window
from rewarm.testing.conformance import CodecConformance, CodecEngine, copy
from rewarm.testing.fake_engine import FakeEngine, Layer, latent, pair, recurrent, triple, window


class Unknown(Exception):
    """The cache is of a kind that the codec does not know."""


@dataclasses.dataclass
class Live:
    """A live cache: the tokens that were evaluated, and the arrays as the engine holds them."""

    tokens: tuple[int, ...]
    state: SequenceState


class FakeCodec(CodecEngine):
    """The fake engine behind a codec that is right."""

    refusal = Unknown

    def __init__(self, *layers: Layer) -> None:
        self.fake = FakeEngine(layers=layers)

    def run(self, tokens: Sequence[int], live: Live | None = None) -> Live:
        if live is None:
            return Live(tuple(tokens), self.fake.state(tokens))
        live.tokens = (*live.tokens, *tokens)
        # The live tokens of a restored cache are not known to the engine; its arrays are all that it has.
        live.state = self.fake.extend(live.state, live.tokens)
        return live

    def encode(self, live: Live) -> SequenceState:
        if not isinstance(live, Live):
            raise Unknown
        return live.state

    def decode(self, state: SequenceState) -> Live:
        # The suite asks about prefixes of one sequence, but for a few tokens at the end.
        return Live(tokens_of(state), copy(state))

    def unknown(self) -> Any:
        return object()


def tokens_of(state: SequenceState) -> tuple[int, ...]:
    """The suite's tokens that a state of this length covers when nothing diverged."""
    return tuple(range(11, 11 + state.n_tokens))


class TestPair(CodecConformance):
    def engine(self) -> CodecEngine:
        return FakeCodec(pair(), pair(axis=2, dtype="float16"))


class TestLatent(CodecConformance):
    def engine(self) -> CodecEngine:
        return FakeCodec(latent(), latent(axis=1))


class TestTriple(CodecConformance):
    def engine(self) -> CodecEngine:
        return FakeCodec(triple())


class TestWindow(CodecConformance):
    def engine(self) -> CodecEngine:
        return FakeCodec(pair(), window(6), window(5, 2))


class TestHybrid(CodecConformance):
    def engine(self) -> CodecEngine:
        return FakeCodec(pair(), recurrent(), window(4))


class TestRecurrent(CodecConformance):
    def engine(self) -> CodecEngine:
        return FakeCodec(recurrent())


class Guesses(FakeCodec):
    """Encodes anything."""

    def encode(self, live: Any) -> SequenceState:
        return live.state if isinstance(live, Live) else self.fake.state([1])


class Pads(FakeCodec):
    """Writes zeros into the last row that it restores (B012)."""

    def decode(self, state: SequenceState) -> Live:
        live = super().decode(state)
        for tensor in live.state.tensors.values():
            if isinstance(tensor, Rows | Window) and tensor.array.shape[tensor.axis]:
                tensor.array[(slice(None),) * tensor.axis + (-1,)] = 0
        return live


class Rolls(FakeCodec):
    """Restores a window in ring order instead of token order (B031)."""

    def decode(self, state: SequenceState) -> Live:
        tensors = {
            name: dataclasses.replace(tensor, array=np.roll(tensor.array, 1, tensor.axis))
            if isinstance(tensor, Window)
            else tensor
            for name, tensor in state.tensors.items()
        }
        return super().decode(dataclasses.replace(state, tensors=tensors))


class Lends(FakeCodec):
    """The restored cache is the state itself, and the engine writes into it (B003)."""

    def decode(self, state: SequenceState) -> Live:
        return Live(tokens_of(state), state)

    def run(self, tokens: Sequence[int], live: Live | None = None) -> Live:
        if live is not None:
            for tensor in live.state.tensors.values():
                tensor.array.flat[0] += 1
        return super().run(tokens, live)


class Forgets(FakeCodec):
    """Keeps two of three arrays (B089)."""

    def encode(self, live: Live) -> SequenceState:
        state = super().encode(live)
        return dataclasses.replace(state, tensors=dict(list(state.tensors.items())[:-1]))


class Drifts(FakeCodec):
    """A restored cache goes on from one row that is not the saved one."""

    def decode(self, state: SequenceState) -> Live:
        live = super().decode(state)
        live.tokens = (0, *live.tokens[1:])
        return live


@pytest.mark.parametrize(
    ("faulty", "layers"),
    [
        (Guesses, (pair(),)),
        (Pads, (pair(),)),
        (Rolls, (window(6),)),
        (Lends, (pair(),)),
        (Forgets, (triple(),)),
        (Drifts, (pair(),)),
    ],
    ids=lambda value: getattr(value, "__name__", "layers"),
)
def test_the_suite_refuses_a_faulty_codec(faulty: type[FakeCodec], layers: tuple[Layer, ...], tmp_path: Path) -> None:
    class Suite(CodecConformance):
        def engine(self) -> CodecEngine:
            return faulty(*layers)

    suite, refused = Suite(), []
    for name in sorted(dir(suite)):
        if name.startswith("test_"):
            test = getattr(suite, name)
            folder = tmp_path / name
            try:
                test(folder) if "tmp_path" in test.__code__.co_varnames[: test.__code__.co_argcount] else test()
            except (AssertionError, Unknown, ValueError, KeyError):
                refused.append(name)
    assert refused
