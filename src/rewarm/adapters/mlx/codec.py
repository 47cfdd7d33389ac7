"""Between mlx-lm's caches and `SequenceState`, bit for bit.

One small codec for each cache class, found by the exact class: a subclass may hold more than its base
shows, so it counts as unknown. Whatever is unknown is refused with `UnsupportedCache`, and its model is
served uncached. Arrays are read and made on the calling thread, which must be the one that generates:
MLX evaluates an array on the thread that made it. Knows nothing of tokens, models or the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from rewarm.errors import EngineError
from rewarm.state.sequence import Array, Rows, SequenceState, Tensor

VERSION = 1
"""Part of every identity: raised when the same cache gives other tensors."""

TOKEN_AXIS = 2
"""Of keys and values, shape (batch 1, heads, tokens, head dimension)."""

PAD_ROWS = 256
"""mlx-lm's own growth step; buffers of a multiple of it take the fused attention path."""


class UnsupportedCache(EngineError):
    """A cache whose state cannot be taken apart and put together again bit for bit."""


class CacheCodec(Protocol):
    """Takes one layer's cache apart and puts it together."""

    def n_tokens(self, cache: Any) -> int:
        """How many tokens `cache` holds."""
        ...

    def arrays(self, cache: Any) -> list[mx.array]:
        """What must be evaluated before `encode`."""
        ...

    def encode(self, cache: Any, n_tokens: int) -> dict[str, Tensor]:
        """The tensors of the first `n_tokens` tokens, as views into MLX's memory."""
        ...

    def decode(self, tensors: Mapping[str, Tensor], n_tokens: int) -> Any:
        """A new cache that holds `tensors`, sharing no memory with them."""
        ...


class KVCacheCodec:
    """`KVCache`: full attention; the rows `[0, offset)` of keys and values, nothing behind them."""

    def n_tokens(self, cache: KVCache) -> int:
        """Tokens held; 0 for a fresh cache."""
        return 0 if cache.keys is None else int(cache.offset)

    def arrays(self, cache: KVCache) -> list[mx.array]:
        """Keys and values, padding included."""
        return [] if cache.keys is None else [cache.keys, cache.values]

    def encode(self, cache: KVCache, n_tokens: int) -> dict[str, Tensor]:
        """Rows of keys and values, each (1, H, n_tokens, D)."""
        if cache.keys.shape[0] != 1:
            raise UnsupportedCache(f"KVCache with a batch of {cache.keys.shape[0]} sequences; extract one first")
        return {"keys": _rows(cache.keys, n_tokens), "values": _rows(cache.values, n_tokens)}

    def decode(self, tensors: Mapping[str, Tensor], n_tokens: int) -> KVCache:
        """A cache with buffers of the next multiple of 256 rows."""
        cache = KVCache()
        cache.keys, cache.values = _padded(tensors["keys"], n_tokens), _padded(tensors["values"], n_tokens)
        cache.offset = n_tokens
        return cache


CODECS: dict[type, CacheCodec] = {KVCache: KVCacheCodec()}


def check(caches: Sequence[Any]) -> None:
    """Whether every cache has a codec.

    Raises:
        UnsupportedCache: one has none; names its class.
    """
    unknown = sorted({type(cache).__name__ for cache in caches if type(cache) not in CODECS})
    if unknown:
        raise UnsupportedCache(f"no codec for the cache class {', '.join(unknown)}")


def n_common(caches: Sequence[Any]) -> int:
    """Tokens that all of `caches` hold.

    Raises:
        UnsupportedCache: a cache has no codec, or the caches disagree.
    """
    check(caches)
    lengths = {CODECS[type(cache)].n_tokens(cache) for cache in caches}
    if len(lengths) > 1:
        raise UnsupportedCache(f"the layers' caches hold different numbers of tokens: {sorted(lengths)}")
    return lengths.pop() if lengths else 0


def encode(caches: Sequence[Any], n_tokens: int | None = None) -> SequenceState:
    """The state of the first `n_tokens` tokens (all if None), as views: valid until `caches` change.

    Raises:
        UnsupportedCache: a cache has no codec, or the caches disagree.
        ValueError: `n_tokens` is more than the caches hold.
    """
    held = n_common(caches)
    n = held if n_tokens is None else n_tokens
    if not 0 <= n <= held:
        raise ValueError(f"{n} tokens of caches that hold {held}")
    if n == 0:
        return SequenceState(0, {})
    mx.eval([array for cache in caches for array in CODECS[type(cache)].arrays(cache)])
    tensors: dict[str, Tensor] = {}
    for i, cache in enumerate(caches):
        for name, tensor in CODECS[type(cache)].encode(cache, n).items():
            tensors[f"layers.{i:03d}.{name}"] = tensor
    return SequenceState(n, tensors)


def decode(state: SequenceState, fresh: Sequence[Any]) -> list[Any]:
    """Caches that hold `state`, of the classes of `fresh`, the model's empty caches.

    Raises:
        UnsupportedCache: a class has no codec, or the state was not made from such caches.
    """
    check(fresh)
    by_layer: list[dict[str, Tensor]] = [{} for _ in fresh]
    for name, tensor in state.tensors.items():
        _, index, part = name.split(".", 2)
        if int(index) >= len(fresh):
            raise UnsupportedCache(f"a state of more than the model's {len(fresh)} layers")
        by_layer[int(index)][part] = tensor
    try:
        made = [
            CODECS[type(cache)].decode(tensors, state.n_tokens) for cache, tensors in zip(fresh, by_layer, strict=True)
        ]
    except KeyError as error:
        raise UnsupportedCache(f"a state without the tensor {error} of some layer") from error
    mx.eval([array for cache in made for array in CODECS[type(cache)].arrays(cache)])
    return made


def _rows(array: mx.array, n_tokens: int) -> Rows:
    """A view of the first rows. numpy has no bfloat16: its bits travel as uint16."""
    dtype = "bfloat16" if array.dtype == mx.bfloat16 else None
    bits = array.view(mx.uint16) if dtype else array
    view: Array = np.array(bits, copy=False)
    return Rows(view[:, :, :n_tokens, :], TOKEN_AXIS, dtype)


def _padded(tensor: Tensor, n_tokens: int) -> mx.array:
    """The rows in a buffer that is longer than they are; what lies past `n_tokens` is never read."""
    rows = tensor.array
    shape = list(rows.shape)
    shape[TOKEN_AXIS] = -(-n_tokens // PAD_ROWS) * PAD_ROWS
    buffer = np.zeros(shape, rows.dtype)
    buffer[:, :, :n_tokens, :] = rows
    made = mx.array(buffer)
    return made.view(mx.bfloat16) if tensor.dtype == "bfloat16" else made
