"""Every family of models, every way of keeping state: what is restored is what was saved, and goes on as it would have.

Through a real store with blocks of 16 tokens. The measure is always the live cache that was saved and a cold
run on the same chunk plan, bit for bit; where a layout of rows is cut off the plan, the difference to a cold
run is held against what cold runs on different plans differ by.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from families import FAMILIES
from matrix import BLOCK, CHUNK, TOKENS, Runner, Shelf, apart, copied, cut, one_by_one, runner, same, shelves, spans
from mlx_lm.models import cache as mlx_cache

from rewarm.adapters.mlx import codec
from rewarm.adapters.mlx.codecs.windows import chunks_slide_too_far
from rewarm.testing.conformance import difference

LLAMAS = ("kept ring", "quantised", "concatenated")
QUICK = {
    "llama", "gemma3_text", "gpt_oss", "deepseek_v3", "deepseek_v41", "llama4", "mamba2", "qwen3_next", "lfm2",
    "falcon_h1", "jamba", "baichuan_m1", *LLAMAS,
}  # fmt: skip
FP32_ONLY = {("deepseek_v41", "bfloat16")}
"""It rounds to bfloat16 just before it gathers its experts, which MLX's CPU backend does in float32 only."""

CHUNKED = "mlx_lm.models.cache.ChunkedKVCache"

REFUSED = {"ChunkedKVCache"} if chunks_slide_too_far() else set()

CASES = [
    pytest.param(name, dtype, id=f"{name}-{dtype}", marks=() if name in QUICK else pytest.mark.long)
    for name in (*FAMILIES, *LLAMAS)
    for dtype in ("float32", "bfloat16")
    if (name, dtype) not in FP32_ONLY and (name != "llama4" or CHUNKED in codec.CODECS)
]

LENGTHS = (1, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 41)
"""Around block edges (16), window edges (16) and chunk ends (8)."""

DECODED = (14, 15, 16, 17, 18, 31, 33, 40)
"""Reached from 13 on a token at a time: rings before they turn, turned, and turned twice."""


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_b001_restored_goes_on_as_the_live_one(name: str, dtype: str, tmp_path: Path) -> None:
    it = runner(name, dtype)
    with shelves(tmp_path / "kv") as cache:
        plans = [spans(n) for n in LENGTHS] + [[*spans(13), *one_by_one(n, 13)] for n in DECODED]
        for i, plan in enumerate(plans):
            # A namespace each: records are shared between plans, and rows of other plans differ in their last bits.
            check(it, Shelf(cache, f"plan {i}", it), plan, straight=bool(i % 2))
        assert cache.verify().is_clean


def check(it: Runner, shelf: Shelf, plan: list[tuple[int, int]], *, straight: bool) -> None:
    """Save what `plan` leaves, restore it, and go on in chunks and single tokens beside the live and a cold one."""
    n = plan[-1][1]
    more = [(n, n + CHUNK), (n + CHUNK, n + CHUNK + 1), (n + CHUNK + 1, n + CHUNK + 2)]
    prompt = TOKENS[: n + CHUNK + 2]
    live, _ = it.cold(prompt, plan)
    saved = shelf.save(prompt[:n], live)
    state, restored = shelf.restore(prompt, straight=straight)
    assert state.n_tokens == n
    assert difference(state, saved) == ""
    assert difference(it.encode(restored, n), saved) == ""

    single = copied(live), copied(restored)
    assert same(*(it.run(caches, prompt, [(n, n + 1)]) for caches in single)), f"one token after {n}"

    before = it.n_evaluated
    warm = it.run(restored, prompt, more)
    assert it.n_evaluated - before + n == len(prompt)
    assert same(warm, it.run(live, prompt, more)), f"chunks after {n}"
    assert same(warm, it.cold(prompt, [*plan, *more])[1][len(plan) :]), f"cold on the same plan after {n}"
    assert difference(it.encode(restored, len(prompt)), it.encode(live, len(prompt))) == ""
    assert difference(shelf.restore(prompt)[0], saved) == "", "the borrower wrote into the store"


SAVED = (8, 16, 24, 33, 40)
DIVERGE = (9, 12, 16, 20, 24, 31, 33, 34, 39, 40)
"""Behind, inside and right at the edges of blocks, windows and points."""


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_b003_b014_divergence_gives_the_longest_that_is_true(name: str, dtype: str, tmp_path: Path) -> None:
    it = runner(name, dtype)
    with shelves(tmp_path / "kv") as cache:
        shelf = Shelf(cache, "one conversation", it)
        plan = [(0, 8), (8, 16), (16, 24), (24, 32), (32, 33), (33, 40)]
        live = it.fresh()
        for span in plan:
            it.run(live, TOKENS, [span])
            if span[1] in SAVED:
                shelf.save(TOKENS[: span[1]], live)
        rows_only = shelf.saved[40].layout().rows_only
        start = shelf.saved[40].valid_from
        files = digests(tmp_path / "kv")
        for at in DIVERGE:
            prompt = [*TOKENS[:at], *(token + 1 for token in TOKENS[at : at + 6])]
            state, caches = shelf.restore(prompt)
            n = at if rows_only and at >= start else max(length for length in SAVED if length <= at)
            assert state.n_tokens == n, f"diverging at {at}"
            diverging(it, prompt, caches, n, plan, exact=not rows_only or n in SAVED)
        repeat, caches = shelf.restore(TOKENS[:40])
        assert repeat.n_tokens == (39 if rows_only else 33), "an exact repeat leaves a token to evaluate"
        it.run(caches, TOKENS, spans(40, repeat.n_tokens))
        assert digests(tmp_path / "kv") == files, "borrowers wrote into the store"


def diverging(
    it: Runner, prompt: list[int], caches: list[Any], n: int, plan: list[tuple[int, int]], *, exact: bool
) -> None:
    """Go on from `n` tokens with a prompt of its own: as cold on the same plan, or within what plans differ by."""
    before = it.n_evaluated
    rest = spans(len(prompt), n)
    warm = it.run(caches, prompt, rest)
    assert it.n_evaluated - before + n == len(prompt)
    if exact:
        past = [span for span in plan if span[1] <= n]
        assert same(warm, it.cold(prompt, [*past, *rest])[1][len(past) :]), f"cold on the same plan after {n}"
        return
    # Rows computed in other pieces: the live cache, cut, is the measure in bits ...
    live = it.cold(TOKENS, plan)[0]
    cut(live, n)
    assert same(warm, it.run(live, prompt, rest)), f"the live cache cut to {n}"
    # ... and in numbers, what cold runs on other plans differ by among themselves.
    cold = [it.cold(prompt, spans(len(prompt), chunk=chunk))[1][-1] for chunk in (3, CHUNK, 11, len(prompt))]
    spread = max(apart(a, b) for a in cold for b in cold)
    nearest = min(apart(warm[-1], one) for one in cold)
    assert nearest <= spread, f"{nearest} apart after {n}, cold runs {spread}"


def digests(root: Path) -> dict[str, str]:
    """Every record file and its content."""
    files = [path for kind in ("block", "point") for path in root.rglob(f"*.{kind}")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_block_and_window_edges_are_where_the_matrix_thinks() -> None:
    lengths = {*LENGTHS, *DECODED}
    assert {BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1} <= lengths


def test_a_release_whose_chunks_slide_too_far_is_refused() -> None:
    """mlx-lm 0.31.3 takes its padding for rows; the newest release and 0.32.0 do not."""
    old = mlx_lm.__version__ == "0.31.3"
    assert chunks_slide_too_far() is old
    if old:
        with pytest.raises(codec.UnsupportedCache, match="ChunkedKVCache"):
            codec.check(runner("llama4").fresh())


def test_b087_every_class_of_the_release_has_a_codec_or_is_one_of_a_batch() -> None:
    """A class that is new in a release fails here, before anybody meets it."""
    found = {
        name for name, one in vars(mlx_cache).items() if isinstance(one, type) and issubclass(one, mlx_cache._BaseCache)
    }
    known = {name.rpartition(".")[2] for name in codec.CODECS}
    assert found - known <= {"_BaseCache", "BatchKVCache", "BatchRotatingKVCache"} | REFUSED


def test_every_family_uses_classes_that_have_a_codec() -> None:
    """The classes that the models' own modules name; a family outside the matrix counts too."""
    named = set()
    for path in Path(mlx_cache.__file__).parent.glob("*.py"):
        if path.name != "cache.py":
            named |= set(re.findall(r"\b([A-Z]\w*Cache)\(", path.read_text()))
    known = {name.rpartition(".")[2] for name in codec.CODECS} | {"CacheList"}
    assert named - known <= REFUSED, "a family with a cache class of its own"
