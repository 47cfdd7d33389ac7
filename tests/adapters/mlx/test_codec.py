"""The codec against a live model: bits, cuts, and what it must refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from families import FAMILIES, WINDOW
from matrix import runner, same
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)
from tiny_models import TOKENS, tiny_llama

from rewarm.adapters.mlx import codec
from rewarm.adapters.mlx.codecs.windows import chunks_slide_too_far
from rewarm.state.sequence import Opaque, SequenceState, Window
from rewarm.testing.conformance import copy as copied
from rewarm.testing.conformance import difference


def prefilled(model: Any, tokens: list[int], chunk: int = 64) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    for start in range(0, len(tokens), chunk):
        mx.eval(model(mx.array([tokens[start : start + chunk]]), cache=caches))
    return caches


def logits(model: Any, caches: list[Any], tokens: list[int]) -> np.ndarray[Any, Any]:
    return np.array(model(mx.array([tokens]), cache=caches).astype(mx.float32))


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


# Cuts, windows, states.


def test_a_ring_is_cut_while_its_rows_are_there_and_not_after() -> None:
    it = runner("gemma3_text")
    live, _ = it.cold(TOKENS, [(0, 12)])
    for n in (1, 11, 12):
        again, _ = it.cold(TOKENS, [(0, 12)])
        trim_prompt_cache(again, 12 - n)
        restored = codec.decode(copied(it.encode(live, n)), it.fresh())
        assert same(it.run(restored, TOKENS, [(n, n + 5)]), it.run(again, TOKENS, [(n, n + 5)]))
    it.run(live, TOKENS, [(i, i + 1) for i in range(12, 30)])
    assert it.encode(live, 30).n_tokens == 30
    with pytest.raises(codec.UnsupportedCache, match="dropped on the way to 30"):
        it.encode(live, 29)


def test_a_buffer_that_is_too_long_is_cut_to_its_window() -> None:
    it = runner("gemma3_text")
    live, _ = it.cold(TOKENS, [(0, 40)])
    assert live[0].keys.shape[2] == 40
    # Everything is still there, so it can be cut at any length too.
    for n in (40, 33, 10):
        window = it.encode(live, n).tensors["layers.000.keys"]
        assert isinstance(window, Window)
        assert (window.size, window.keep, window.array.shape[2]) == (WINDOW, 0, min(n, WINDOW))
        np.testing.assert_array_equal(window.array, np.array(live[0].keys)[:, :, max(0, n - WINDOW) : n])


def test_rows_that_are_missing_or_too_many_are_refused() -> None:
    it = runner("gemma3_text")
    live, _ = it.cold(TOKENS, [(0, 40)])
    ring = live[0]
    ring.keys, ring.values, ring._idx = ring.keys[:, :, -9:], ring.values[:, :, -9:], 9
    with pytest.raises(codec.UnsupportedCache, match="not all there"):
        it.encode(live, 40)
    live, _ = it.cold(TOKENS, [(0, 10)])
    live[0].keys, live[0]._idx = mx.pad(live[0].keys, [(0, 0), (0, 0), (2, 0), (0, 0)]), 12
    with pytest.raises(codec.UnsupportedCache, match="12 rows after 10 tokens"):
        it.encode(live, 10)


@pytest.mark.skipif(chunks_slide_too_far(), reason="this release's chunked caches are refused altogether")
def test_a_chunked_cache_that_was_trimmed_after_it_slid_is_refused() -> None:
    it = runner("llama4")
    live, _ = it.cold(TOKENS, [(0, 24), (24, 40)])
    assert it.encode(live, 40).n_tokens == 40
    for cache in live:
        cache.trim(20)
    with pytest.raises(codec.UnsupportedCache, match="not all there"):
        it.encode(live, 20)


def test_a_window_of_another_size_is_refused() -> None:
    it = runner("gemma3_text")
    state = copied(it.encode(it.cold(TOKENS, [(0, 20)])[0], 20))
    other = [RotatingKVCache(max_size=8), KVCache()]
    with pytest.raises(codec.UnsupportedCache, match="no window of 8"):
        codec.decode(state, other)
    with pytest.raises(codec.UnsupportedCache, match="another kind"):
        codec.decode(state, [KVCache(), KVCache()])


@pytest.mark.parametrize("turn", [None, -1, 0, 4, 17])
def test_a_ring_that_stands_nowhere_is_refused(turn: int | None) -> None:
    it = runner("kept ring")
    live, _ = it.cold(TOKENS, [(0, 15)])
    state = copied(it.encode(live, 15))
    assert state.meta == {"layers.000.turn": 15, "layers.001.turn": 15}
    assert [cache._idx for cache in codec.decode(state, it.fresh())] == [15, 15]
    longer = copied(it.encode(it.cold(TOKENS, [(0, 15), (15, 16), (16, 17), (17, 18)])[0], 18))
    assert longer.meta == {"layers.000.turn": 6, "layers.001.turn": 6}
    wrong = {} if turn is None else dict.fromkeys(state.meta, turn)
    with pytest.raises(codec.UnsupportedCache, match="without the number|a ring of 16 rows that stands at"):
        codec.decode(dataclasses.replace(state, meta=wrong), it.fresh())
    with pytest.raises(codec.UnsupportedCache, match="without the number|a ring of 16 rows that stands at"):
        codec.decode(dataclasses.replace(longer, meta=wrong), it.fresh())


@pytest.mark.skipif("deepseek_v41" not in FAMILIES, reason="this release has no DeepSeek 4.1")
def test_a_latent_window_that_is_short_is_refused() -> None:
    it = runner("deepseek_v41")
    live, _ = it.cold(TOKENS, [(0, 20)])
    live[0].window = live[0].window[:, 1:]
    with pytest.raises(codec.UnsupportedCache, match="holds 15 rows"):
        it.encode(live, 20)


def test_states_alone_count_no_tokens() -> None:
    it = runner("mamba2")
    live, _ = it.cold(TOKENS, [(0, 20)])
    assert codec.n_common(it.fresh()) == 0
    assert codec.n_common(live) is None
    assert codec.n_held(live, 20) == 20
    with pytest.raises(ValueError, match="do not count tokens"):
        codec.encode(live)
    state = codec.encode(live, 20)
    assert state.n_tokens == 20
    assert all(isinstance(tensor, Opaque) for tensor in state.tensors.values())


def test_states_cannot_be_cut_and_must_agree_with_the_rest() -> None:
    it = runner("qwen3_next")
    live, _ = it.cold(TOKENS, [(0, 20)])
    assert (codec.n_common(live), codec.n_held(live, 21), codec.n_held(live, 19)) == (20, 20, 19)
    with pytest.raises(codec.UnsupportedCache, match="cannot be cut to 19"):
        codec.encode(live, 19)
    live[0] = it.fresh()[0]
    with pytest.raises(codec.UnsupportedCache, match="different numbers of tokens: \\[0, 20\\]"):
        codec.encode(live, 20)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lengths": [3]}, "not finished"),
        ({"left_padding": [1]}, "not behind it"),
        ({"cache": ["text", "text"]}, "something else than arrays"),
    ],
)
def test_states_of_a_batch_in_the_middle_are_refused(change: dict[str, Any], why: str) -> None:
    it = runner("mamba2")
    live, _ = it.cold(TOKENS, [(0, 20)])
    for name, value in change.items():
        setattr(live[0], name, value if name == "cache" else mx.array(value))
    with pytest.raises(codec.UnsupportedCache, match=why):
        codec.encode(live, 20)


def test_padding_that_is_behind_is_no_matter() -> None:
    it = runner("mamba2")
    live, _ = it.cold(TOKENS, [(0, 20)])
    want = copied(codec.encode(live, 20))
    live[0].left_padding = mx.array([-17])
    assert difference(codec.encode(live, 20), want) == ""


def test_a_slot_that_holds_nothing_stays_empty() -> None:
    live = [ArraysCache(3), KVCache()]
    live[0][1] = mx.arange(12, dtype=mx.int32).reshape(1, 3, 4)
    live[1].update_and_fetch(mx.ones((1, 1, 5, 4)), mx.ones((1, 1, 5, 4)))
    restored = codec.decode(copied(codec.encode(live)), [ArraysCache(3), KVCache()])
    assert [slot is None for slot in restored[0].cache] == [True, False, True]
    assert mx.array_equal(restored[0][1], live[0][1]).item()
    with pytest.raises(codec.UnsupportedCache, match="other slots"):
        codec.decode(copied(codec.encode(live)), [ArraysCache(1), KVCache()])


# Quantised KV.


def test_kv_that_was_quantised_on_the_way_is_another_layout() -> None:
    it = runner("quantised")
    before, _ = it.cold(TOKENS, [(0, 8)])
    after, _ = it.cold(TOKENS, [(0, 8), (8, 12)])
    plain, packed = it.encode(before, 8), it.encode(after, 12)
    assert (plain.valid_from, packed.valid_from) == (0, 9)
    assert plain.layout() != packed.layout()
    assert plain.layout().rows_only and packed.layout().rows_only
    assert sorted(packed.tensors)[:2] == ["layers.000.keys.q8g32.biases", "layers.000.keys.q8g32.packed"]
    made = codec.decode(copied(packed), it.fresh())
    assert [(type(cache).__name__, cache.bits, cache.group_size) for cache in made] == [("QuantizedKVCache", 8, 32)] * 2
    with pytest.raises(codec.UnsupportedCache, match="nobody said from which length"):
        codec.encode(after)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_rows_are_exact_at_every_cut(bits: int) -> None:
    live = [KVCache()]
    rows = mx.random.normal((1, 2, 300, 64), key=mx.random.key(0))
    live[0].update_and_fetch(rows, rows * 2)
    live = [live[0].to_quantized(group_size=64, bits=bits)]
    for n in (1, 255, 256, 257, 299, 300):
        restored = codec.decode(copied(codec.encode(live, n, quantised_from=0)), [KVCache()])[0]
        for side in ("keys", "values"):
            for want, got in zip(getattr(live[0], side), getattr(restored, side), strict=True):
                assert mx.array_equal(want[..., :n, :], got[..., :n, :]).item()
        assert restored.keys[0].shape[2] % 256 == 0


# Batches.


BATCHED = ["llama", "gemma3_text", "mamba2", "qwen3_next", "falcon_h1", "deepseek_v32", "recurrent_gemma"]


@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_is_saved_sequence_by_sequence(name: str) -> None:
    it = runner(name)
    lengths = (11, 30, 23)
    singles = [it.cold(TOKENS[i:], [(0, 8), (8, n)])[0] for i, n in enumerate(lengths)]
    batch = [type(caches[0]).merge(list(caches)) for caches in zip(*singles, strict=True)]
    with pytest.raises(codec.UnsupportedCache):
        codec.encode(batch, 11)
    for i, n in enumerate(lengths):
        one = codec.sequence(batch, i)
        assert codec.n_held(one, n) == n
        state, want = codec.encode(one, n), codec.encode(singles[i], n)
        assert difference(state, codec.encode([cache.extract(i) for cache in batch], n)) == ""
        assert state.tensors.keys() == want.tensors.keys()
        for tensor in want.tensors:
            np.testing.assert_array_equal(state.tensors[tensor].array, want.tensors[tensor].array)
        restored = codec.decode(copied(state), it.fresh())
        # A batch keeps a ring in token order, so the extracted cache is the measure.
        more = [(n, n + 3), (n + 3, n + 4)]
        extracted = [cache.extract(i) for cache in batch]
        assert same(it.run(restored, TOKENS[i:], more), it.run(extracted, TOKENS[i:], more))


def test_a_sequence_of_a_batch_is_encoded_without_a_copy() -> None:
    it = runner("llama")
    long, short = (it.cold(TOKENS, [(0, n)])[0] for n in (9, 5))
    batch = [KVCache.merge(list(pair)) for pair in zip(long, short, strict=True)]
    state = codec.encode(codec.sequence(batch, 1), 5)
    whole = np.array(batch[0].keys, copy=False)
    assert np.shares_memory(state.tensors["layers.000.keys"].array, whole)
    np.testing.assert_array_equal(state.tensors["layers.000.keys"].array, whole[1:, :, 4:9])


def test_a_batch_whose_prompts_are_not_settled_is_refused() -> None:
    rows, ring, states = BatchKVCache([0, 0]), BatchRotatingKVCache(8, [0, 0]), ArraysCache(1)
    rows.prepare(right_padding=[0, 3])
    ring.prepare(right_padding=[0, 3], lengths=[5, 2])
    for cache in (rows, ring, KVCache()):
        with pytest.raises(codec.UnsupportedCache, match="middle of prompts|no batch"):
            codec.sequence([CacheList(cache)], 0)
    states[0] = mx.zeros((2, 3))
    states.prepare(lengths=[5, 2])
    one = codec.sequence([states, KVCache.merge([KVCache(), KVCache()])], 1)
    with pytest.raises(codec.UnsupportedCache, match="not finished"):
        codec.encode(one[:1], 2)


@pytest.mark.parametrize(("max_tokens", "leave_at"), [(5, 5), (5, 6), (9, 4), (1, 1)])
def test_what_was_yielded_is_what_the_caches_hold(max_tokens: int, leave_at: int) -> None:
    """However generation ends. So where no cache counts, a caller's list of tokens can be believed."""
    model = tiny_llama()
    caches = make_prompt_cache(model)
    tokens = list(TOKENS[:20])
    steps = generate_step(mx.array(tokens), model, max_tokens=max_tokens, prompt_cache=caches)
    for n, (token, _) in enumerate(steps, start=1):
        tokens.append(int(token))
        if n == leave_at:
            break
    steps.close()
    assert len(tokens) == 20 + min(max_tokens, leave_at)
    assert codec.n_common(caches) == len(tokens)
