"""The matrix's questions to a real model and real text: SmolLM2, in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix import Runner, Shelf, apart, cut, same, shelves, spans
from mlx_lm import load

from rewarm.adapters.mlx import self_test
from rewarm.testing.conformance import difference

TEXT = """The river Danube rises in the Black Forest and flows through ten countries, more than any other river in the \
world, before it reaches the Black Sea. Four capitals lie on its banks: Vienna, Bratislava, Budapest and Belgrade."""
OTHER = " Four of its tributaries are longer than the Thames"
CHUNK = 16


@pytest.mark.engine
def test_real_text_goes_on_as_the_live_cache_and_as_cold(bundled_model: Path, tmp_path: Path) -> None:
    model, tokenizer = load(str(bundled_model))
    self_test.run(model)
    it = Runner(model)
    tokens = tokenizer.encode(TEXT)
    n = 38
    plan = spans(n, chunk=CHUNK)
    more = [(n, n + 5), (n + 5, n + 6)]
    with shelves(tmp_path / "kv") as cache:
        shelf = Shelf(cache, "text", it)
        live, _ = it.cold(tokens, plan)
        saved = shelf.save(tokens[:n], live)
        state, restored = shelf.restore(tokens, straight=True)
        assert difference(state, saved) == ""
        before = it.n_evaluated
        assert same(it.run(restored, tokens, more), it.run(live, tokens, more))
        assert it.n_evaluated - before == 2 * 6

        # Another sentence behind the first one: what is common is restored, wherever it ends.
        begun = TEXT.index(" Four")
        prompt = tokenizer.encode(TEXT[:begun] + OTHER)
        common = next(i for i, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b)
        assert CHUNK < common < n, "the test's texts part inside what was saved"
        state, restored = shelf.restore(prompt)
        assert state.n_tokens == common
        cut(live, common)
        rest = [(common, len(prompt))]
        warm = it.run(restored, prompt, rest)
        assert same(warm, it.run(live, prompt, rest))
        cold = [it.cold(prompt, spans(len(prompt), chunk=chunk))[1][-1] for chunk in (CHUNK, 11, len(prompt))]
        spread = max(apart(a, b) for a in cold for b in cold)
        assert min(apart(warm[-1], one) for one in cold) <= spread
        assert spread < 1, f"cold runs on other plans are {spread} apart"
