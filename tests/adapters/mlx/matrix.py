"""What the matrix of model families has in common: chunk plans, a real store, and what must be equal."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import CacheList, ConcatenateKVCache, RotatingKVCache, make_prompt_cache
from tiny_models import tiny, tiny_llama

import rewarm
from rewarm.adapters.mlx import codec
from rewarm.state.sequence import SequenceState
from rewarm.testing import conformance

BLOCK = 16
CHUNK = 8
TOKENS = [(i * i * 31 + 7 * i + 3) % 500 for i in range(96)]

Logits = npt.NDArray[np.float32]
Spans = Sequence[tuple[int, int]]


def spans(end: int, start: int = 0, chunk: int = CHUNK) -> list[tuple[int, int]]:
    """A chunk plan: `[start, end)` in pieces of `chunk`."""
    return [(a, min(end, a + chunk)) for a in range(start, end, chunk)]


def one_by_one(end: int, start: int) -> list[tuple[int, int]]:
    """A reply's plan: a token at a time."""
    return spans(end, start, 1)


class Runner:
    """A model that evaluates tokens by a plan, and counts them.

    Args:
        model: of mlx-lm.
        quantise: quantise KV from this length on.

    Attributes:
        n_evaluated: tokens evaluated so far.
    """

    def __init__(self, model: Any, quantise: int | None = None) -> None:
        self.model = model
        self.n_evaluated = 0
        self.quantised_from = quantise

    def fresh(self) -> list[Any]:
        """The model's empty caches."""
        made: list[Any] = make_prompt_cache(self.model)
        return made

    def run(self, caches: list[Any], tokens: Sequence[int], plan: Spans) -> list[Logits]:
        """Evaluate `tokens` by `plan` on top of `caches`; the logits of each piece."""
        found = []
        for start, end in plan:
            piece = list(tokens[start:end])
            logits = self.model(mx.array([piece]), cache=caches)
            if self.quantised_from is not None:
                maybe_quantize_kv_cache(caches, self.quantised_from, 32, 8)
            found.append(np.array(logits.astype(mx.float32)))
            self.n_evaluated += end - start
        return found

    def cold(self, tokens: Sequence[int], plan: Spans) -> tuple[list[Any], list[Logits]]:
        """The same from nothing."""
        caches = self.fresh()
        return caches, self.run(caches, tokens, plan)

    def encode(self, caches: list[Any], n: int) -> SequenceState:
        """The codec's state of `caches`, which hold `n` tokens, as views."""
        return codec.encode(caches, n, quantised_from=self.quantised_from)


def runner(name: str, dtype: str = "float32") -> Runner:
    """A family by its name, or a llama whose caches are made in another way."""
    kind = getattr(mx, dtype)
    if name == "kept ring":
        # As `stream_generate` makes them for `max_kv_size`.
        model = tiny_llama(dtype=kind)
        model.make_cache = lambda: [RotatingKVCache(max_size=BLOCK, keep=4) for _ in model.layers]
        return Runner(model)
    if name == "quantised":
        return Runner(tiny_llama(dtype=kind), quantise=9)
    if name == "concatenated":
        model = tiny_llama(dtype=kind)
        model.make_cache = lambda: [ConcatenateKVCache() for _ in model.layers]
        return Runner(model)
    return Runner(tiny(name, kind))


class Shelf:
    """A namespace of a real cache, and what was put into it."""

    def __init__(self, cache: rewarm.PrefixCache, name: str, made_by: Runner) -> None:
        self._cache = cache
        self._runner = made_by
        self._space = cache.namespace(rewarm.Identity({"test": name}))
        self.saved: dict[int, SequenceState] = {}

    def save(self, tokens: Sequence[int], caches: list[Any]) -> SequenceState:
        """Save what `caches` hold after all of `tokens`; a copy of it."""
        state = self._runner.encode(caches, len(tokens))
        self.saved[len(tokens)] = conformance.copy(state)
        report = self._space.save(tokens, state)
        assert self._cache.flush(60.0)
        assert report.reason is None, report.reason
        return self.saved[len(tokens)]

    def restore(self, prompt: Sequence[int], *, straight: bool = False) -> tuple[SequenceState, list[Any]]:
        """The longest stored prefix of `prompt`, as a state of its own and as caches.

        Args:
            prompt: token ids.
            straight: read into MLX's own memory.
        """
        match = self._space.find(prompt)
        assert match.n_tokens and match.layout is not None, match.reason
        state = self._space.restore(match)
        assert state.n_tokens == match.n_tokens, state.reason
        if not straight:
            return state, codec.decode(state, self._runner.fresh())
        buffers = codec.Buffers(match.layout, match.n_tokens)
        again = self._space.restore(match, into=buffers.into)
        return state, codec.decode(again, self._runner.fresh(), buffers)


@contextmanager
def shelves(root: Path) -> Iterator[rewarm.PrefixCache]:
    """A cache with small blocks that keeps every point."""
    roomy = rewarm.Limits(max_bytes=2**40, max_files=10**6, min_free_bytes=0)
    with rewarm.open(root, roomy, rewarm.Policy(thin=False), block_tokens=BLOCK) as cache:
        yield cache


def same(left: Sequence[Logits], right: Sequence[Logits]) -> bool:
    """Whether logits are equal, bit for bit."""
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def apart(left: Logits, right: Logits) -> float:
    """The largest difference between two logits of one token."""
    return float(np.abs(left[0, -1] - right[0, -1]).max())


def copied(caches: list[Any]) -> list[Any]:
    """Caches of their own, as mlx-lm copies them."""
    return copy.deepcopy(caches)


def cut(caches: Sequence[Any], n: int) -> None:
    """Cut live caches as mlx-lm does; where it forgets to let go of the rows, they go here."""
    for one in caches:
        if isinstance(one, CacheList):
            cut(one.caches, n)
            continue
        one.trim(one.offset - n)
        if isinstance(one, ConcatenateKVCache):
            one.keys, one.values = one.keys[:, :, :n], one.values[:, :, :n]
