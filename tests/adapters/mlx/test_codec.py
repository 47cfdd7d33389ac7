"""The codec against a live model: bits, cuts, and what it must refuse."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache
from tiny_models import TOKENS, tiny_llama

from rewarm.adapters.mlx import codec
from rewarm.state.sequence import SequenceState


def prefilled(model: Any, tokens: list[int], chunk: int = 64) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    for start in range(0, len(tokens), chunk):
        mx.eval(model(mx.array([tokens[start : start + chunk]]), cache=caches))
    return caches


def logits(model: Any, caches: list[Any], tokens: list[int]) -> np.ndarray[Any, Any]:
    return np.array(model(mx.array([tokens]), cache=caches).astype(mx.float32))


def copied(state: SequenceState) -> SequenceState:
    """What a store gives back: the same bytes in arrays of their own."""
    tensors = {
        name: type(t)(np.ascontiguousarray(t.array).copy(), t.axis, t.dtype) for name, t in state.tensors.items()
    }
    return SequenceState(state.n_tokens, tensors)


@pytest.fixture(params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_llama(dtype=getattr(mx, request.param))


def test_round_trip_is_bit_exact_and_goes_on_bit_exact(model: Any) -> None:
    live = prefilled(model, TOKENS[:300])
    state = copied(codec.encode(live))
    assert state.n_tokens == 300
    assert set(state.tensors) == {f"layers.{i:03d}.{part}" for i in range(2) for part in ("keys", "values")}
    restored = codec.decode(state, make_prompt_cache(model))
    again = codec.encode(restored)
    for name, tensor in state.tensors.items():
        assert tensor.array.shape == (1, 2, 300, 32)
        assert tensor.dtype == again.tensors[name].dtype
        np.testing.assert_array_equal(tensor.array, again.tensors[name].array)
    assert [cache.keys.shape[2] for cache in restored] == [512, 512]
    for rest in (TOKENS[300:317], TOKENS[317:318], TOKENS[318:319]):
        np.testing.assert_array_equal(logits(model, restored, rest), logits(model, live, rest))


@pytest.mark.parametrize("n", [1, 63, 64, 255, 256, 257, 299])
def test_every_cut_is_the_state_of_the_shorter_prompt(model: Any, n: int) -> None:
    live = prefilled(model, TOKENS[:300])
    cut = copied(codec.encode(live, n))
    assert {tensor.array.shape[2] for tensor in cut.tensors.values()} == {n}
    restored = codec.decode(cut, make_prompt_cache(model))
    for cache in live:
        cache.trim(300 - n)
    np.testing.assert_array_equal(logits(model, restored, TOKENS[400:405]), logits(model, live, TOKENS[400:405]))


def test_rows_past_the_offset_never_leave(model: Any) -> None:
    live = prefilled(model, TOKENS[:100])
    for cache in live:
        cache.trim(60)
    state = codec.encode(live)
    assert state.n_tokens == 40
    assert {tensor.array.shape[2] for tensor in state.tensors.values()} == {40}
    assert {array.shape[2] for cache in live for array in (cache.keys, cache.values)} == {256}


def test_encode_gives_views_not_copies(model: Any) -> None:
    state = codec.encode(prefilled(model, TOKENS[:10]))
    assert all(not tensor.array.flags.owndata for tensor in state.tensors.values())


def test_a_fresh_cache_is_an_empty_state(model: Any) -> None:
    state = codec.encode(make_prompt_cache(model))
    assert (state.n_tokens, dict(state.tensors)) == (0, {})


class Subclass(KVCache):  # type: ignore[misc]
    """Holds whatever it likes."""


def more() -> KVCache:
    """A cache with an attribute that no release known to the codec has."""
    cache = KVCache()
    cache.sinks = mx.zeros((1,))
    return cache


@pytest.mark.parametrize(
    ("cache", "name"),
    [(Subclass(), "Subclass"), (CacheList(KVCache(), Subclass()), "Subclass"), (more(), "KVCache with sinks")],
    ids=["subclass", "inside a list", "unknown attribute"],
)
def test_b087_what_is_not_known_is_refused_by_name(cache: Any, name: str) -> None:
    for wrong in (
        lambda: codec.check([KVCache(), cache]),
        lambda: codec.encode([KVCache(), cache]),
        lambda: codec.decode(SequenceState(0, {}), [cache]),
    ):
        with pytest.raises(codec.UnsupportedCache, match=name):
            wrong()


def test_layers_that_disagree_are_refused(model: Any) -> None:
    live = prefilled(model, TOKENS[:20])
    live[1].trim(1)
    with pytest.raises(codec.UnsupportedCache, match="different numbers"):
        codec.encode(live)


def test_more_tokens_than_held_is_a_wrong_call(model: Any) -> None:
    with pytest.raises(ValueError, match="hold 20"):
        codec.encode(prefilled(model, TOKENS[:20]), 21)


def test_a_state_of_another_model_is_refused(model: Any) -> None:
    state = copied(codec.encode(prefilled(model, TOKENS[:20])))
    with pytest.raises(codec.UnsupportedCache, match="do not hold: layers.001"):
        codec.decode(state, make_prompt_cache(tiny_llama(layers=1)))
    with pytest.raises(codec.UnsupportedCache, match="without the tensor"):
        codec.decode(state, make_prompt_cache(tiny_llama(layers=3)))
