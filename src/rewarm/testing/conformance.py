"""What every codec must pass: an adapter's tests subclass `CodecConformance` and hand it an engine.

    class TestMyCodec(CodecConformance):
        def engine(self): return MyEngine()

Each test saves states through a real cache in a folder of its own (`tmp_path`, pytest's), restores them and
compares bit for bit. The suite does not know engines, and judges no text and no logits.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rewarm.cache.identity import Identity
from rewarm.cache.policy import Policy
from rewarm.cache.prefix_cache import open_cache
from rewarm.state.sequence import Array, Opaque, SequenceState, Tensor
from rewarm.store.settings import Limits
from rewarm.testing.perfect import shared

BLOCK_TOKENS = 4
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 19)
TOKENS = tuple(range(11, 11 + 24))
_ROOMY = Limits(max_bytes=2**40, max_files=10**6, min_free_bytes=0)


class CodecEngine(ABC):
    """An engine as its adapter sees it: live caches, and the codec between them and `SequenceState`.

    Attributes:
        refusal: the error that the codec raises for a cache that it does not know.
    """

    refusal: type[Exception] = Exception

    @abstractmethod
    def run(self, tokens: Sequence[int], live: Any = None) -> Any:
        """Evaluate `tokens` in one chunk, on top of `live` (None: a fresh cache); the live cache after them."""

    @abstractmethod
    def encode(self, live: Any) -> SequenceState:
        """The codec: a live cache's state."""

    @abstractmethod
    def decode(self, state: SequenceState) -> Any:
        """The codec: a live cache that holds `state`."""

    @abstractmethod
    def unknown(self) -> Any:
        """A live cache of a kind that the codec does not know, or None when there can be none."""


def difference(got: SequenceState, want: SequenceState) -> str:
    """What tells two states apart, bit for bit; empty when nothing does."""
    if got.n_tokens != want.n_tokens:
        return f"{got.n_tokens} tokens instead of {want.n_tokens}"
    if set(got.tensors) != set(want.tensors):
        return f"tensors {sorted(got.tensors)} instead of {sorted(want.tensors)}"
    if got.layout() != want.layout():
        return f"layout {got.layout()} instead of {want.layout()}"
    for name, tensor in want.tensors.items():
        if not np.array_equal(_bits(got.tensors[name]), _bits(tensor)):
            return f"tensor {name} has other bits"
    return ""


def cut(state: SequenceState, n: int) -> SequenceState:
    """The first `n` tokens of a state of rows alone."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.tensors.items():
        assert not isinstance(tensor, Opaque), "only rows can be cut"
        index = (slice(None),) * tensor.axis + (slice(0, n),)
        tensors[name] = dataclasses.replace(tensor, array=tensor.array[index])
    return SequenceState(n, tensors, {}, state.valid_from)


def copy(state: SequenceState) -> SequenceState:
    """`state` with arrays of its own, so that later changes of the live cache do not show."""
    tensors = {
        name: dataclasses.replace(tensor, array=np.array(tensor.array)) for name, tensor in state.tensors.items()
    }
    return SequenceState(state.n_tokens, tensors, dict(state.meta), state.valid_from)


def _bits(tensor: Tensor) -> Array:
    array = np.ascontiguousarray(tensor.array)
    return array.view(np.uint8)


class CodecConformance(ABC):
    """The suite. Subclass it in a test module and return an engine."""

    @abstractmethod
    def engine(self) -> CodecEngine:
        """The engine whose codec is tested; called once per test."""

    def test_round_trip(self) -> None:
        """A state that is decoded and encoded again is the same, bit for bit, at every length."""
        engine = self.engine()
        for n in LENGTHS:
            state = copy(engine.encode(engine.run(TOKENS[:n])))
            assert state.n_tokens == n
            _same(engine.encode(engine.decode(state)), state)

    def test_encoding_leaves_the_live_cache_alone(self) -> None:
        """After `encode` the engine goes on as if nothing had happened."""
        engine = self.engine()
        seen, unseen = engine.run(TOKENS[:9]), engine.run(TOKENS[:9])
        copy(engine.encode(seen))
        _same(engine.encode(engine.run(TOKENS[9:14], seen)), copy(engine.encode(engine.run(TOKENS[9:14], unseen))))

    def test_decoding_shares_nothing_with_the_state(self) -> None:
        """An engine that goes on from a restored cache never writes into what was restored."""
        engine = self.engine()
        state = copy(engine.encode(engine.run(TOKENS[:9])))
        before = copy(state)
        engine.run(TOKENS[9:14], engine.decode(state))
        _same(state, before)

    def test_every_cut(self, tmp_path: Path) -> None:
        """Rows alone come back at every length; any other layout at the longest saved one that fits."""
        engine = self.engine()
        with _Kept(engine, tmp_path) as kept:
            for n in LENGTHS:
                kept.save(TOKENS[:n])
            for n in range(len(TOKENS) + 1):
                kept.restore([*TOKENS[:n], 1])

    def test_divergence(self, tmp_path: Path) -> None:
        """A prompt that differs from some token on gets what is before it, and nothing of what follows."""
        engine = self.engine()
        with _Kept(engine, tmp_path) as kept:
            for n in LENGTHS:
                kept.save(TOKENS[:n])
            for n in range(LENGTHS[-1]):
                kept.restore([*TOKENS[:n], 1, *TOKENS[n + 1 :]])

    def test_divergence_inside_a_window(self, tmp_path: Path) -> None:
        """Two saves closer than any window, and a prompt that leaves the first one's path between them."""
        engine = self.engine()
        with _Kept(engine, tmp_path) as kept:
            kept.save(TOKENS[:9])
            kept.save(TOKENS[:11])
            kept.restore([*TOKENS[:10], 1, 2])
            kept.save([*TOKENS[:10], 1, 2])
            kept.restore([*TOKENS[:10], 1, 2, 3])
            kept.restore([*TOKENS[:11], 1])

    def test_restore_then_extend(self, tmp_path: Path) -> None:
        """The engine goes on from a restored cache as from the live one that was saved: bit for bit."""
        engine = self.engine()
        for i, n in enumerate(LENGTHS):
            with _Kept(engine, tmp_path / str(i)) as kept:
                live = engine.run(TOKENS[:n])
                kept.save(TOKENS[:n], live)
                restored = engine.decode(kept.restore([*TOKENS[:n], 1]))
                for start, end in ((n, n + 3), (n + 3, n + 4)):
                    live = engine.run(TOKENS[start:end], live)
                    restored = engine.run(TOKENS[start:end], restored)
                    _same(engine.encode(restored), copy(engine.encode(live)))

    def test_unknown_caches_are_refused(self) -> None:
        """A cache that the codec does not know is refused with an error, never guessed."""
        engine = self.engine()
        unknown = engine.unknown()
        if unknown is None:
            return
        try:
            engine.encode(unknown)
        except engine.refusal:
            return
        raise AssertionError("the codec encoded a cache that it does not know")


class _Kept:
    """A real cache with what was saved in it, and what each restored state must be."""

    def __init__(self, engine: CodecEngine, root: Path) -> None:
        self._engine = engine
        self._cache = open_cache(root / "kv", _ROOMY, Policy(thin=False), BLOCK_TOKENS)
        self._namespace = self._cache.namespace(Identity({"conformance": 1}))
        self._saved: list[tuple[tuple[int, ...], SequenceState]] = []

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, *exception: object) -> None:
        self._cache.close()

    def save(self, tokens: Sequence[int], live: Any = None) -> None:
        """Save the state of `live`, or of a cache that has just evaluated `tokens`."""
        state = self._engine.encode(self._engine.run(tokens) if live is None else live)
        self._saved.append((tuple(tokens), copy(state)))
        report = self._namespace.save(tokens, state)
        assert self._cache.flush(60.0)
        assert report.reason is None, report.reason

    def restore(self, prompt: Sequence[int]) -> SequenceState:
        """Restore `prompt`; the state is as long as it can be and right, before and after the codec."""
        best: SequenceState | None = None
        for tokens, state in self._saved:
            n = shared(tokens, prompt[:-1])
            if state.layout().rows_only and n >= max(1, state.valid_from):
                state = cut(state, n)  # noqa: PLW2901
            elif n < len(tokens):
                continue
            if best is None or state.n_tokens > best.n_tokens:
                best = state
        got = self._namespace.restore(self._namespace.find(prompt))
        if best is None or not best.n_tokens:
            assert got.n_tokens == 0, f"{got.n_tokens} tokens restored of none"
            return got
        _same(got, best)
        _same(self._engine.encode(self._engine.decode(got)), best)
        return got


def _same(got: SequenceState, want: SequenceState) -> None:
    told = difference(got, want)
    if told:
        raise AssertionError(told)
