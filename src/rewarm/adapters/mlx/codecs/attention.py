"""Full attention: `KVCache`, `ConcatenateKVCache` and `QuantizedKVCache`. Everything is rows."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from rewarm.adapters.mlx.codecs.tensors import Given, Taken, UnsupportedCache, one_sequence

_PARTS = ("packed", "scales", "biases")
_QUANTISED = re.compile(r"keys\.q(\d+)g(\d+)\.packed")


class RowsCodec:
    """Keys and values, each (1, H, T, D); the rows `[0, offset)` of them and nothing behind.

    Args:
        pad: whether the class keeps its buffers longer than their rows.
    """

    attributes = frozenset({"keys", "values", "offset"})

    def __init__(self, *, pad: bool) -> None:
        self._pad = pad

    def n_tokens(self, cache: Any) -> int:
        """Tokens held; 0 for a fresh cache."""
        return 0 if cache.keys is None else int(cache.offset)

    def arrays(self, cache: Any) -> list[mx.array]:
        """Keys and values, padding included."""
        return [] if cache.keys is None else [cache.keys, cache.values]

    def encode(self, cache: Any, taken: Taken) -> None:
        """Rows of keys and values."""
        one_sequence(cache, cache.keys, cache.values)
        taken.rows("keys", cache.keys)
        taken.rows("values", cache.values)

    def decode(self, given: Given, fresh: Any) -> Any:
        """A cache of the class of `fresh`; a quantised one where the state was taken from such a cache."""
        quantised = next((found for name in given.names() if (found := _QUANTISED.fullmatch(name))), None)
        if quantised is not None and type(fresh) is KVCache:
            return _quantised(given, bits=int(quantised[1]), group_size=int(quantised[2]))
        cache = type(fresh)()
        cache.keys, cache.values = given.rows("keys", pad=self._pad), given.rows("values", pad=self._pad)
        cache.offset = given.n_tokens
        return cache


class QuantisedCodec:
    """Packed keys and values with their scales and biases, all (1, H, T, ...): rows, exact at every cut.

    Bits and group size stand in the tensors' names and so in the layout: a state that was cut has no values
    beside its tensors. Below the length at which the engine began to quantise, a cold run holds other numbers,
    so that length must be known.
    """

    attributes = frozenset({"keys", "values", "offset", "group_size", "bits"})

    def n_tokens(self, cache: Any) -> int:
        """Tokens held; 0 for a fresh cache."""
        return 0 if cache.keys is None else int(cache.offset)

    def arrays(self, cache: Any) -> list[mx.array]:
        """All six of them, padding included."""
        return [] if cache.keys is None else [*cache.keys, *cache.values]

    def encode(self, cache: Any, taken: Taken) -> None:
        """Rows of the packed numbers, their scales and their biases."""
        if taken.quantised_from is None:
            raise UnsupportedCache("QuantizedKVCache, and nobody said from which length on KV is quantised")
        if len(cache.keys) != len(_PARTS) or len(cache.values) != len(_PARTS):
            raise UnsupportedCache("QuantizedKVCache in a form without scales and biases")
        one_sequence(cache, *cache.keys, *cache.values)
        for side, arrays in (("keys", cache.keys), ("values", cache.values)):
            for part, array in zip(_PARTS, arrays, strict=True):
                taken.rows(f"{side}.q{cache.bits}g{cache.group_size}.{part}", array)

    def decode(self, given: Given, fresh: Any) -> Any:
        """A cache with the bits and groups of `fresh`, which must be the state's."""
        return _quantised(given, bits=fresh.bits, group_size=fresh.group_size)


def _quantised(given: Given, *, bits: int, group_size: int) -> QuantizedKVCache:
    cache = QuantizedKVCache(group_size=group_size, bits=bits)
    cache.keys, cache.values = (
        tuple(given.rows(f"{side}.q{bits}g{group_size}.{part}") for part in _PARTS) for side in ("keys", "values")
    )
    cache.offset = given.n_tokens
    return cache
