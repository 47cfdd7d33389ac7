"""Between mlx-lm's caches and `SequenceState`, bit for bit: the face of the codecs.

One codec for each cache class, found by the exact class: a subclass may hold more than its base shows, and
so may an object with an attribute that its codec does not know. Whatever is unknown is refused with
`UnsupportedCache`, and its model is served uncached. Only attributes are used that the classes of all
supported releases have, never `state`, which changed between them.

Arrays are read and made on the calling thread, which must be the one that generates: MLX evaluates an array
on the thread that made it. Knows nothing of tokens, models or the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from rewarm.adapters.mlx.codecs.attention import QuantisedCodec, RowsCodec
from rewarm.adapters.mlx.codecs.base import CacheCodec
from rewarm.adapters.mlx.codecs.batches import one_of
from rewarm.adapters.mlx.codecs.states import ArraysCodec, LayerCodec, ListCodec, agreed
from rewarm.adapters.mlx.codecs.tensors import Buffers, Given, Taken, UnsupportedCache
from rewarm.adapters.mlx.codecs.windows import ChunkedCodec, RotatingCodec, chunks_slide_too_far
from rewarm.state.sequence import SequenceState

__all__ = ["Buffers", "UnsupportedCache", "check", "decode", "encode", "n_common", "n_held", "sequence"]

VERSION = 1
"""Part of every identity: raised when the same cache gives other tensors."""


def _codec_of(cache: Any) -> CacheCodec:
    """The codec of a cache that passed `check`."""
    return CODECS[_name(cache)]


CODECS: dict[str, CacheCodec] = {
    "mlx_lm.models.cache.KVCache": RowsCodec(pad=True),
    "mlx_lm.models.cache.ConcatenateKVCache": RowsCodec(pad=False),
    "mlx_lm.models.cache.QuantizedKVCache": QuantisedCodec(),
    "mlx_lm.models.cache.RotatingKVCache": RotatingCodec(),
    "mlx_lm.models.cache.ChunkedKVCache": ChunkedCodec(),
    "mlx_lm.models.cache.ArraysCache": ArraysCodec(),
    "mlx_lm.models.cache.CacheList": ListCodec(_codec_of),
    "mlx_lm.models.deepseek_v41.LayerCache": LayerCodec(),
}
"""By the class's full name: a release that lacks a class needs no import of it here."""

if chunks_slide_too_far():
    del CODECS["mlx_lm.models.cache.ChunkedKVCache"]


def check(caches: Sequence[Any]) -> None:
    """Whether every cache, and every cache inside one, has a codec that knows all it holds.

    Raises:
        UnsupportedCache: one has none; names its class.
    """
    unknown = sorted({why for cache in caches for why in _why_not(cache)})
    if unknown:
        raise UnsupportedCache(f"no codec for the cache class {', '.join(unknown)}")


def n_common(caches: Sequence[Any]) -> int | None:
    """Tokens that all of `caches` hold; None when there are only caches that do not count them.

    Raises:
        UnsupportedCache: a cache has no codec, or the caches disagree.
    """
    check(caches)
    return agreed([_codec_of(cache).n_tokens(cache) for cache in caches]) if caches else 0


def n_held(caches: Sequence[Any], n_listed: int) -> int:
    """How many of the `n_listed` tokens that a caller lists its caches hold.

    A list may be longer than the caches: an engine's last token need not be evaluated. Where no cache counts,
    the caller's number stands.

    Raises:
        UnsupportedCache: as `n_common`.
    """
    held = n_common(caches)
    return n_listed if held is None else min(n_listed, held)


def encode(caches: Sequence[Any], n_tokens: int | None = None, *, quantised_from: int | None = None) -> SequenceState:
    """The state of the first `n_tokens` tokens (all if None), as views: valid until `caches` change.

    Args:
        caches: as a model's forward pass has left them, one sequence.
        n_tokens: needed where no cache counts.
        quantised_from: the length from which on the engine quantises KV; needed where it did.

    Raises:
        UnsupportedCache: a cache has no codec, the caches disagree, or their state cannot be cut there.
        ValueError: `n_tokens` is more than the caches hold, or is needed and missing.
    """
    held = n_common(caches)
    n = held if n_tokens is None else n_tokens
    if n is None:
        raise ValueError("these caches do not count tokens: say how many they hold")
    if not 0 <= n <= (n if held is None else held):
        raise ValueError(f"{n} tokens of caches that hold {held}")
    if n == 0:
        return SequenceState(0, {})
    taken = Taken(n, n if held is None else held, quantised_from)
    with _refusal("taken apart"):
        mx.eval([array for cache in caches for array in _codec_of(cache).arrays(cache)])
        for i, cache in enumerate(caches):
            _codec_of(cache).encode(cache, taken.under(f"layers.{i:03d}"))
    quantised = any("QuantizedKVCache" in name for cache in caches for name in _class_names(cache))
    return SequenceState(n, taken.tensors, taken.meta, (quantised_from or 0) if quantised else 0)


def decode(state: SequenceState, fresh: Sequence[Any], buffers: Buffers | None = None) -> list[Any]:
    """Caches that hold `state`, of the classes of `fresh`, the model's empty caches.

    Without `buffers` they share no memory with `state`. With the buffers that the state was read into, these
    are the caches' memory, and the state is used up.

    Raises:
        UnsupportedCache: a class has no codec, or the state was not made from such caches.
    """
    check(fresh)
    if state.n_tokens == 0:
        return list(fresh)
    given = Given(state, buffers)
    with _refusal("put together"):
        made = [_codec_of(cache).decode(given.under(f"layers.{i:03d}"), cache) for i, cache in enumerate(fresh)]
        given.check_used_up()
        mx.eval([array for cache in made for array in _codec_of(cache).arrays(cache)])
    return made


def sequence(caches: Sequence[Any], index: int) -> list[Any]:
    """One sequence's caches out of a batch's, to be encoded: they share the batch's memory where they can.

    Raises:
        UnsupportedCache: a cache is no batch's, or its prompts are not yet settled.
    """
    with _refusal("taken out of their batch"):
        return [one_of(cache, index) for cache in caches]


@contextlib.contextmanager
def _refusal(what: str) -> Iterator[None]:
    """Turn what goes wrong inside a codec into a refusal: a save that fails must not take a reply with it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, UnsupportedCache):
            raise
        raise UnsupportedCache(f"caches that cannot be {what} ({type(error).__name__}: {error})") from error


def _why_not(cache: Any) -> list[str]:
    """What there is no codec for, in `cache` and inside it."""
    known = CODECS.get(_name(cache))
    if known is None:
        return [type(cache).__name__]
    more = sorted(set(vars(cache)) - known.attributes)
    if more:
        return [f"{type(cache).__name__} with {', '.join(more)}"]
    inner = cache.caches if isinstance(known, ListCodec) else ()
    return [why for one in inner for why in _why_not(one)]


def _class_names(cache: Any) -> list[str]:
    inner = cache.caches if isinstance(CODECS[_name(cache)], ListCodec) else ()
    return [type(cache).__name__, *(name for one in inner for name in _class_names(one))]


def _name(cache: Any) -> str:
    return f"{type(cache).__module__}.{type(cache).__qualname__}"
