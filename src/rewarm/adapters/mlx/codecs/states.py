"""States that stand for all tokens at once (`ArraysCache`), DeepSeek 4.1's cache, and lists of caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from rewarm.adapters.mlx.codecs.base import CacheCodec
from rewarm.adapters.mlx.codecs.tensors import Given, Taken, UnsupportedCache, one_sequence, view

_LATENTS = ("compress_kv", "index_k", "pending_kv", "pending_gate")


class ArraysCodec:
    """`ArraysCache`: Mamba, gated delta nets, short convolutions. Opaque; the class counts no tokens."""

    attributes = frozenset({"cache", "left_padding", "lengths"})

    def n_tokens(self, cache: Any) -> int | None:
        """0 for a fresh cache; else nobody knows."""
        return None if any(array is not None for array in cache.cache) else 0

    def arrays(self, cache: Any) -> list[mx.array]:
        """The slots that hold something."""
        found = [array for array in cache.cache if array is not None]
        if not all(isinstance(array, mx.array) for array in found):
            raise UnsupportedCache("ArraysCache with something else than arrays in it")
        return found

    def encode(self, cache: Any, taken: Taken) -> None:
        """Every slot that holds something, whole."""
        one_sequence(cache, *self.arrays(cache))
        if cache.lengths is not None:
            raise UnsupportedCache("ArraysCache of a batch that is not finished")
        if cache.left_padding is not None and max(cache.left_padding.tolist()) > 0:
            raise UnsupportedCache("ArraysCache whose padding is not behind it")
        for i, array in enumerate(cache.cache):
            if array is not None:
                taken.opaque(f"state.{i}", array)

    def decode(self, given: Given, fresh: Any) -> Any:
        """A cache with as many slots as `fresh`."""
        cache = type(fresh)(len(fresh.cache))
        slots = {int(name.removeprefix("state.")): name for name in given.names() if name.startswith("state.")}
        if not slots or max(slots) >= len(cache.cache):
            raise UnsupportedCache(f"a state with other slots than the model's {len(cache.cache)}")
        for i, name in slots.items():
            cache.cache[i] = given.opaque(name)
        return cache


class ListCodec:
    """`CacheList`: several caches of one layer, nested as deep as they come.

    Args:
        codec_of: the codec of a cache.
    """

    attributes = frozenset({"caches"})

    def __init__(self, codec_of: Callable[[Any], CacheCodec]) -> None:
        self._codec_of = codec_of

    def n_tokens(self, cache: Any) -> int | None:
        """What the caches inside agree on."""
        return agreed([self._codec_of(inner).n_tokens(inner) for inner in cache.caches])

    def arrays(self, cache: Any) -> list[mx.array]:
        """Those of the caches inside."""
        return [array for inner in cache.caches for array in self._codec_of(inner).arrays(inner)]

    def encode(self, cache: Any, taken: Taken) -> None:
        """Each cache under its number."""
        for i, inner in enumerate(cache.caches):
            self._codec_of(inner).encode(inner, taken.under(str(i)))

    def decode(self, given: Given, fresh: Any) -> Any:
        """A list of new caches."""
        made = [self._codec_of(inner).decode(given.under(str(i)), inner) for i, inner in enumerate(fresh.caches)]
        return type(fresh)(*made)


class LayerCodec:
    """DeepSeek 4.1's `LayerCache`: a window (1, T, D), latents of closed groups, and the group that is open."""

    attributes = frozenset({"window_size", "offset", "window", *_LATENTS})

    def n_tokens(self, cache: Any) -> int:
        """Tokens read."""
        return int(cache.offset)

    def arrays(self, cache: Any) -> list[mx.array]:
        """Whatever is there."""
        found = [getattr(cache, name) for name in ("window", *_LATENTS)]
        return [array for array in found if array is not None]

    def encode(self, cache: Any, taken: Taken) -> None:
        """The window's rows; the latents, whole, which belong to this length only."""
        one_sequence(cache, *self.arrays(cache))
        if taken.n_tokens != taken.n_held or cache.window is None:
            raise UnsupportedCache(f"LayerCache that cannot be cut to {taken.n_tokens} tokens")
        size = int(cache.window_size)
        if cache.window.shape[1] != min(taken.n_tokens, size):
            raise UnsupportedCache(f"LayerCache whose window of {size} holds {cache.window.shape[1]} rows")
        bits, dtype = view(cache.window)
        taken.window("window", bits, dtype, size, axis=1)
        for name in _LATENTS:
            array = getattr(cache, name)
            if array is not None:
                taken.opaque(name, array)

    def decode(self, given: Given, fresh: Any) -> Any:
        """A cache with what the saved one held, and nothing where it held nothing."""
        cache = type(fresh)(fresh.window_size)
        cache.window = given.window("window", int(fresh.window_size), axis=1)
        for name in set(given.names()) & set(_LATENTS):
            setattr(cache, name, given.opaque(name))
        cache.offset = given.n_tokens
        return cache


def agreed(counts: list[int | None]) -> int | None:
    """The number of tokens that all who count agree on; None when nobody counts.

    Raises:
        UnsupportedCache: they do not agree.
    """
    lengths = {count for count in counts if count is not None}
    if len(lengths) > 1:
        raise UnsupportedCache(f"the layers' caches hold different numbers of tokens: {sorted(lengths)}")
    return lengths.pop() if lengths else None
