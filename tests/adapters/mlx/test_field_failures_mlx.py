"""What went wrong for others with MLX caches, by the ids of `docs/field-failures.md`: on all kinds of state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import BLOCK, TOKENS, Runner, Shelf, one_by_one, runner, same, shelves, spans
from tiny_models import tiny

import rewarm
from rewarm.adapters.mlx import PromptCache, codec
from rewarm.adapters.mlx.codecs.attention import RowsCodec
from rewarm.testing.conformance import copy as copied
from rewarm.testing.conformance import difference

KINDS = {"dense": "llama", "sliding window": "gemma3_text", "hybrid": "qwen3_next", "states alone": "mamba2"}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def it(request: pytest.FixtureRequest) -> Runner:
    return runner(request.param)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[rewarm.PrefixCache]:
    with shelves(tmp_path / "kv") as opened:
        yield opened


def prompts_of(it: Runner, cache: rewarm.PrefixCache) -> PromptCache:
    return PromptCache(it.model, None, cache, rewarm.Identity({"test": "field failures"}))


def turn(it: Runner, prompts: PromptCache, tokens: list[int], n: int = 3) -> list[int]:
    """A greedy reply of `n` tokens, as a program would make it; what it leaves is inserted."""
    caches, rest = prompts.fetch(tokens)
    assert prompts.last.n_tokens + len(rest) == len(tokens)
    logits = it.run(caches, rest, spans(len(rest)))
    said: list[int] = []
    for _ in range(n):
        said.append(int(np.argmax(logits[-1][0, -1])))
        logits = it.run(caches, said, [(len(said) - 1, len(said))])
    prompts.insert([*tokens, *said], caches)
    return said


@pytest.mark.parametrize("n", [2, 3, 4, BLOCK, BLOCK + 1, 2 * BLOCK, 33])
def test_b006_b007_b037_an_exact_repeat_evaluates_its_last_token_once(
    it: Runner, cache: rewarm.PrefixCache, n: int
) -> None:
    """At its true position, and on caches that cannot be cut too: from a state one token earlier."""
    plan = [*spans(n - 1), (n - 1, n)]
    shelf = Shelf(cache, "repeat", it)
    live = it.fresh()
    it.run(live, TOKENS, plan[:-1])
    shelf.save(TOKENS[: n - 1], live)
    cold = it.run(live, TOKENS, plan[-1:])
    shelf.save(TOKENS[:n], live)
    shelf.save(TOKENS[: n + 9], it.cold(TOKENS, [*plan, (n, n + 9)])[0])
    state, caches = shelf.restore(TOKENS[:n])
    assert state.n_tokens == n - 1
    assert same(it.run(caches, TOKENS, plan[-1:]), cold)


def test_b007_a_stored_prompt_longer_than_the_new_one_is_cut_or_left(it: Runner, cache: rewarm.PrefixCache) -> None:
    shelf = Shelf(cache, "longer", it)
    live = it.fresh()
    it.run(live, TOKENS, spans(40))
    rows_only = shelf.save(TOKENS[:40], live).layout().rows_only
    prompts = cache.namespace(rewarm.Identity({"test": "longer"}))
    assert prompts.find(TOKENS[:20]).n_tokens == (19 if rows_only else 0)


def test_b010_what_others_asked_before_changes_no_reply(it: Runner, cache: rewarm.PrefixCache, tmp_path: Path) -> None:
    with shelves(tmp_path / "other") as empty:
        alone = turn(it, prompts_of(it, empty), TOKENS[:30], 6)
    prompts = prompts_of(it, cache)
    turn(it, prompts, TOKENS[:16])
    turn(it, prompts, [*TOKENS[:24], 7, 8, 9])
    turn(it, prompts, [9, 8, 7])
    assert cache.flush(60)
    assert turn(it, prompts, TOKENS[:30], 6) == alone


def test_b012_a_short_prompt_leaves_its_own_rows_and_no_more(it: Runner) -> None:
    state = it.encode(it.cold(TOKENS, [(0, 3)])[0], 3)
    for tensor in state.tensors.values():
        axis = getattr(tensor, "axis", None)
        assert axis is None or tensor.array.shape[axis] == 3


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "mamba2"])
def test_b027_the_last_tokens_are_edited_after_a_restart(name: str, tmp_path: Path) -> None:
    it = runner(name)
    points = (8, 32, 38, 40)
    for start in (True, False):
        with shelves(tmp_path / "kv") as cache:
            shelf = Shelf(cache, "edited", it)
            if start:
                live = it.fresh()
                for span in ((0, 8), (8, 32), (32, 38), (38, 40)):
                    it.run(live, TOKENS, [span])
                    assert span[1] in points
                    shelf.save(TOKENS[: span[1]], live)
                continue
            for prompt, n in (([*TOKENS[:40], 1], 40), ([*TOKENS[:38], 1, 2], 38), ([*TOKENS[:37], 1, 2, 3], 32)):
                state, caches = shelf.restore(prompt)
                before = it.n_evaluated
                it.run(caches, prompt, [(n, len(prompt))])
                assert (state.n_tokens, it.n_evaluated - before) == (n, len(prompt) - n)


def test_b028_b030_every_turn_hits_and_repeats_write_nothing(it: Runner, cache: rewarm.PrefixCache) -> None:
    prompts = prompts_of(it, cache)
    tokens = TOKENS[:20]
    for i in range(6):
        said = turn(it, prompts, tokens)
        assert prompts.last.n_tokens == (0 if i == 0 else len(tokens) - 4)
        tokens = [*tokens, *said, *TOKENS[60 + i * 4 : 64 + i * 4]]
        assert cache.flush(60)
    written = cache.stats()["bytes_written"]
    for _ in range(5):
        caches, rest = prompts.fetch(tokens)
        assert prompts.last.n_tokens == len(tokens) - 4
        it.run(caches, rest, [(0, len(rest))])
    assert cache.flush(60)
    assert cache.stats()["bytes_written"] == written


@pytest.mark.parametrize("n", [7, 8, 9, 20])
@pytest.mark.parametrize("less", [1, 3, 9])
def test_b031_a_ring_that_has_turned_is_never_sliced(n: int, less: int) -> None:
    it = Runner(tiny("gemma3_text", sliding_window=8))
    for plan in (spans(n), one_by_one(n, 0)):
        live, _ = it.cold(TOKENS, plan)
        cut = n - less
        if cut <= 0:
            continue
        try:
            state = copied(it.encode(live, cut))
        except codec.UnsupportedCache:
            continue
        # What was not refused is what a cold run of the shorter prompt holds, and goes on as it does.
        cold, _ = it.cold(TOKENS, spans(cut) if plan == spans(n) else one_by_one(cut, 0))
        again = codec.decode(state, it.fresh())
        more = [(cut, cut + 5), (cut + 5, cut + 6)]
        for warm, want in zip(it.run(again, TOKENS, more), it.run(cold, TOKENS, more), strict=True):
            np.testing.assert_allclose(warm, want, atol=1e-5)


@pytest.mark.parametrize("n", [2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1])
def test_b032_whatever_the_length_something_can_be_restored(it: Runner, cache: rewarm.PrefixCache, n: int) -> None:
    shelf = Shelf(cache, "lengths", it)
    shelf.save(TOKENS[:n], it.cold(TOKENS, spans(n))[0])
    assert [entry.n_tokens for entry in cache.entries()] == [n]
    assert shelf.restore(TOKENS[: n + 1])[0].n_tokens == n


def test_b035_a_repeat_with_one_token_more_hits_on_every_kind(it: Runner, cache: rewarm.PrefixCache) -> None:
    prompts = prompts_of(it, cache)
    tokens = [*TOKENS[:20], *turn(it, prompts, TOKENS[:20])]
    assert cache.flush(60)
    prompts.fetch([*tokens, 1])
    assert prompts.last.n_tokens == len(tokens)


@pytest.mark.parametrize("name", ["deepseek_v32", "gemma3_text", "llama4", "quantised", "falcon_h1", "minimax_m3_vl"])
def test_b089_an_array_that_is_missing_is_refused(name: str) -> None:
    it = runner(name)
    state = copied(it.encode(it.cold(TOKENS, spans(20))[0], 20))
    fresh = it.fresh()
    assert difference(it.encode(codec.decode(state, it.fresh()), 20), state) == ""
    for missing in state.tensors:
        if ".state." in missing:
            continue  # a slot may be empty; the layout of every record lists those that are not
        less = {name: tensor for name, tensor in state.tensors.items() if name != missing}
        with pytest.raises(codec.UnsupportedCache):
            codec.decode(dataclasses.replace(state, tensors=less), fresh)
    more = {**state.tensors, "layers.000.index": next(iter(state.tensors.values()))}
    with pytest.raises(codec.UnsupportedCache, match="layers.000.index"):
        codec.decode(dataclasses.replace(state, tensors=more), fresh)


class Failing(RowsCodec):
    """Takes nothing apart."""

    def encode(self, cache: Any, taken: Any) -> None:
        raise IndexError("no such array")


def test_b091_a_save_that_fails_takes_nothing_with_it(
    cache: rewarm.PrefixCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it = runner("llama")
    prompts = prompts_of(it, cache)
    monkeypatch.setitem(codec.CODECS, "mlx_lm.models.cache.KVCache", Failing(pad=True))
    assert len(turn(it, prompts, TOKENS[:20])) == len(turn(it, prompts, TOKENS[:20])) == 3
    assert caplog.text.count("cannot be taken apart (IndexError: no such array)") == 1
    assert cache.entries() == []


def test_b093_b094_nothing_is_a_state_that_is_not_stored(it: Runner, cache: rewarm.PrefixCache) -> None:
    empty = it.encode(it.fresh(), 0)
    assert (empty.n_tokens, dict(empty.tensors)) == (0, {})
    prompts = prompts_of(it, cache)
    prompts.insert([], it.fresh())
    assert cache.flush(60)
    assert cache.entries() == []
    again = codec.decode(empty, it.fresh())
    assert same(it.run(again, TOKENS, spans(9)), it.cold(TOKENS, spans(9))[1])
    live, _ = it.cold(TOKENS, spans(9))
    want = it.run(live, TOKENS, [(9, 10)])
    live, _ = it.cold(TOKENS, spans(9))
    caches, rest = prompts.fetch(TOKENS[:9])  # a miss touches nothing that lives
    assert len(rest) == 9
    assert caches is not live
    assert same(it.run(live, TOKENS, [(9, 10)]), want)
