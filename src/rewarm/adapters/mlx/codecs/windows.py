"""Caches that forget: `RotatingKVCache` (a ring, once it is full) and `ChunkedKVCache` (Llama 4).

What lies in the window is taken in token order. A ring's turn is kept beside it, so that the buffer comes
back as it lay: attention adds up in the buffer's order, and another order gives other last bits.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ChunkedKVCache

from rewarm.adapters.mlx.codecs.tensors import Given, Taken, UnsupportedCache, one_sequence, view
from rewarm.state.sequence import Array

_TURN = "turn"
"""The next row that the engine writes, as `_idx`."""


class RotatingCodec:
    """`RotatingKVCache`: the first `keep` rows and the last `max_size - keep`.

    Four ways the buffer may lie: filling up; one append after another, up to `max_size - 1` rows too long,
    in token order; cut to `max_size`; turned. Rows beyond the window are dropped, which is exact: the engine
    drops the same rows at its next step.
    """

    attributes = frozenset({"keys", "values", "offset", "keep", "max_size", "_idx"})

    def n_tokens(self, cache: Any) -> int:
        """Tokens read, in the window or not; 0 for a fresh cache."""
        return 0 if cache.keys is None else int(cache.offset)

    def arrays(self, cache: Any) -> list[mx.array]:
        """Keys and values."""
        return [] if cache.keys is None else [cache.keys, cache.values]

    def encode(self, cache: Any, taken: Taken) -> None:
        """The window's rows in token order, and where the ring stands."""
        one_sequence(cache, cache.keys, cache.values)
        n, size, keep = taken.n_tokens, int(cache.max_size), int(cache.keep)
        length, index = cache.keys.shape[2], int(cache._idx)
        turned = index < cache.offset and index < length
        if turned and length != size:
            raise UnsupportedCache(f"RotatingKVCache of {size} that has turned with {length} rows")
        held = length if turned else min(index, length)
        if held > taken.n_held:
            raise UnsupportedCache(f"RotatingKVCache of {held} rows after {taken.n_held} tokens")
        begin = _begin(n, taken.n_held, held, size, keep)
        for name, array in (("keys", cache.keys), ("values", cache.values)):
            bits, dtype = view(array)
            if turned:
                bits = np.concatenate([bits[:, :, :keep], bits[:, :, index:], bits[:, :, keep:index]], axis=2)
            taken.window(name, _cut(bits[:, :, :held], n, taken.n_held, begin, keep), dtype, size, keep)
        taken.meta[taken.prefix + _TURN] = index if turned and n == taken.n_held else min(n, size)

    def decode(self, given: Given, fresh: Any) -> Any:
        """A cache whose buffer lies as the saved one did."""
        size, keep, n = int(fresh.max_size), int(fresh.keep), given.n_tokens
        cache = type(fresh)(max_size=size, keep=keep)
        rows = [given.window(name, size, keep) for name in ("keys", "values")]
        index = given.value(_TURN)
        if index != min(n, size) and not (n > size and keep < index < size):
            raise UnsupportedCache(f"a ring of {size} rows that stands at {index} after {n} tokens")
        cache.keys, cache.values = (_turned(array, keep, index) for array in rows)
        cache.offset, cache._idx = n, index
        return cache


class ChunkedCodec:
    """`ChunkedKVCache`: the last `chunk_size` rows at most, in token order, from `start_position` on."""

    attributes = frozenset({"keys", "values", "offset", "chunk_size", "start_position"})

    def n_tokens(self, cache: Any) -> int:
        """Tokens read, held or not; 0 for a fresh cache."""
        return 0 if cache.keys is None else int(cache.offset)

    def arrays(self, cache: Any) -> list[mx.array]:
        """Keys and values, padding included."""
        return [] if cache.keys is None else [cache.keys, cache.values]

    def encode(self, cache: Any, taken: Taken) -> None:
        """The rows that the engine's next step will not drop."""
        one_sequence(cache, cache.keys, cache.values)
        n, size, held = taken.n_tokens, int(cache.chunk_size), int(cache.offset - cache.start_position)
        begin = _begin(n, taken.n_held, held, size, 0)
        for name, array in (("keys", cache.keys), ("values", cache.values)):
            bits, dtype = view(array)
            taken.window(name, _cut(bits[:, :, :held], n, taken.n_held, begin, 0), dtype, size)

    def decode(self, given: Given, fresh: Any) -> Any:
        """A cache that begins at its first row's position."""
        size = int(fresh.chunk_size)
        cache = type(fresh)(size)
        cache.keys, cache.values = given.window("keys", size), given.window("values", size)
        cache.offset = given.n_tokens
        cache.start_position = given.n_tokens - min(given.n_tokens, size)
        return cache


def chunks_slide_too_far() -> bool:
    """Whether this release's `ChunkedKVCache` counts its padding as rows, and so drops some that it still needs.

    mlx-lm 0.31.3 does. What it holds then depends on how its buffer grew, and cannot be rebuilt.
    """
    cache = ChunkedKVCache(2)
    row = mx.zeros((1, 1, 1, 1))
    cache.update_and_fetch(row, row)
    cache.maybe_trim_front()
    return bool(cache.start_position)


def _begin(n: int, n_held: int, n_rows: int, size: int, keep: int) -> int:
    """The token with which the window at `n` begins behind its kept rows.

    Raises:
        UnsupportedCache: the cache, of `n_rows` rows after `n_held` tokens, has dropped it.
    """
    kept = min(keep, n)
    begin = max(kept, n - (size - keep))
    oldest = n_held - (n_rows - min(keep, n_rows))
    if begin < n and begin < oldest:
        what = "are not all there" if n == n_held else f"were dropped on the way to {n_held}"
        raise UnsupportedCache(f"a window of {size} rows after {n} tokens whose rows {what}")
    return begin


def _cut(rows: Array, n: int, n_held: int, begin: int, keep: int) -> Array:
    """The kept rows and those of tokens `[begin, n)`, out of rows in token order that end at `n_held`."""
    first = begin - n_held + rows.shape[2]
    last = rows[:, :, first : first + n - begin]
    kept = min(keep, n)
    if first == kept:
        return rows[:, :, : kept + n - begin]
    return np.concatenate([rows[:, :, :kept], last], axis=2) if kept else last


def _turned(rows: mx.array, keep: int, index: int) -> mx.array:
    """Rows in token order, laid as in a ring whose next row is `index`: there the oldest one lies."""
    n = rows.shape[2]
    if index == n:
        return rows
    split = keep + n - index
    laid = mx.concatenate([rows[:, :, :keep], rows[:, :, split:], rows[:, :, keep:split]], axis=2)
    mx.eval(laid)
    return laid
