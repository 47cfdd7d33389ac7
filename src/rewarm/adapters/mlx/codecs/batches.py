"""One sequence's caches out of a batch's, to be saved: as views, where the engine's `extract` copies the prefix.

Not for the engine's own use: they share the batch's memory. Knows nothing of tensors and states.
"""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import ArraysCache, BatchKVCache, BatchRotatingKVCache, CacheList, KVCache, RotatingKVCache

from rewarm.adapters.mlx.codecs.tensors import UnsupportedCache


def one_of(cache: Any, index: int) -> Any:
    """The cache of one sequence.

    Raises:
        UnsupportedCache: not a batch's cache, or one in the middle of prompts of different lengths.
    """
    kind = type(cache)
    if kind is BatchKVCache:
        return _rows(cache, index)
    if kind is BatchRotatingKVCache:
        _check_settled(cache, "_lengths")
        return cache.extract(index) if cache.keys is not None else RotatingKVCache(cache.max_size)
    if kind is ArraysCache:
        return _states(cache, index)
    if kind is CacheList:
        return CacheList(*(one_of(inner, index) for inner in cache.caches))
    raise UnsupportedCache(f"{kind.__name__}, which is no batch of sequences")


def _rows(cache: BatchKVCache, index: int) -> KVCache:
    _check_settled(cache, "_right_padding")
    one = KVCache()
    if cache.keys is not None:
        padding = int(cache.left_padding.tolist()[index])
        part = (slice(index, index + 1), slice(None), slice(padding, cache._idx))
        one.keys, one.values = cache.keys[part], cache.values[part]
        one.offset = cache._idx - padding
    return one


def _states(cache: ArraysCache, index: int) -> ArraysCache:
    own = slice(index, index + 1)
    one = ArraysCache(len(cache.cache))
    one.cache = [None if array is None else array[own] for array in cache.cache]
    for name in ("left_padding", "lengths"):
        found = getattr(cache, name)
        setattr(one, name, None if found is None else found[own])
    return one


def _check_settled(cache: Any, name: str) -> None:
    if getattr(cache, name, None) is not None:
        raise UnsupportedCache(f"{type(cache).__name__} in the middle of prompts of different lengths")
