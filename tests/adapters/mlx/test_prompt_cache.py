"""`PromptCache` around `stream_generate`, on a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import stream_generate
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tiny_models import TOKENS, llama_config, tiny_llama, write_model

import rewarm
from rewarm.adapters.mlx import PromptCache
from rewarm.adapters.mlx.identity import from_files, from_live_model


class Words:
    """As much of a tokenizer as `stream_generate` needs: ids are words."""

    eos_token_ids = frozenset({-1})
    bos_token = None

    class detokenizer:  # noqa: N801
        last_segment = ""
        add_token = staticmethod(lambda _token: None)
        finalize = staticmethod(lambda: None)


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `stream_generate` take `Words` for one of its own tokenizers."""
    import sys

    monkeypatch.setattr(sys.modules["mlx_lm.generate"], "TokenizerWrapper", Words)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def cache(root: Path) -> Iterator[rewarm.PrefixCache]:
    with opened(root) as made:
        yield made


def opened(root: Path) -> rewarm.PrefixCache:
    return rewarm.open(root, limits=rewarm.Limits(max_bytes=1 << 30, max_files=1000, min_free_bytes=0))


def answer(model: Any, prompt: list[int], caches: list[Any], n: int = 6) -> list[int]:
    made = stream_generate(model, Words(), mx.array(prompt), max_tokens=n, prompt_cache=caches)
    return [response.token for response in made]


def test_the_next_turn_evaluates_only_what_is_new(cache: rewarm.PrefixCache, root: Path) -> None:
    model = tiny_llama()
    prompts = PromptCache(model, Words(), cache)
    caches, rest = prompts.fetch(TOKENS[:300])
    assert (rest, [c.offset for c in caches]) == (TOKENS[:300], [0, 0])
    assert prompts.last.reason == "nothing_stored"
    tokens = TOKENS[:300] + answer(model, rest, caches)
    prompts.insert(tokens, caches)
    assert cache.flush(10)
    cache.close()

    with opened(root) as again:
        prompts = PromptCache(tiny_llama(), Words(), again)
        follow = [*tokens, *TOKENS[400:420]]
        restored, rest = prompts.fetch(follow)
        assert rest == TOKENS[400:420]
        assert [c.offset for c in restored] == [306, 306]
        assert answer(model, rest, restored) == answer(model, rest, caches)


def test_an_exact_repeat_leaves_one_token(cache: rewarm.PrefixCache) -> None:
    model = tiny_llama()
    prompts = PromptCache(model, Words(), cache)
    caches, rest = prompts.fetch(TOKENS[:50])
    first = answer(model, rest, caches)
    prompts.insert(TOKENS[:50] + first, caches)
    cache.flush(10)
    caches, rest = prompts.fetch(TOKENS[:50])
    assert rest == TOKENS[49:50]
    assert prompts.last.reason == "hit"
    assert answer(model, rest, caches) == first


@pytest.mark.parametrize("n", [1, 100, 255, 256, 257, 299])
def test_a_branch_shares_what_it_shares(cache: rewarm.PrefixCache, n: int) -> None:
    model = tiny_llama()
    prompts = PromptCache(model, Words(), cache)
    caches, rest = prompts.fetch(TOKENS[:300])
    answer(model, rest, caches)
    prompts.insert(TOKENS[:300], caches, boundary="user")
    cache.flush(10)
    branch = [*TOKENS[:n], TOKENS[n] + 1, *TOKENS[500:520]]
    restored, rest = prompts.fetch(branch)
    assert (rest, restored[0].offset) == (branch[n:], n)
    fresh = make_prompt_cache(model)
    # The same chunks as the restored run: the shared part, then the rest.
    mx.eval(model(mx.array([TOKENS[:n]]), cache=fresh))
    assert answer(model, rest, restored) == answer(model, rest, fresh)


def test_a_list_longer_than_the_caches_is_cut_to_them(cache: rewarm.PrefixCache) -> None:
    model = tiny_llama()
    prompts = PromptCache(model, Words(), cache)
    caches, rest = prompts.fetch(TOKENS[:20])
    mx.eval(model(mx.array([rest]), cache=caches))
    prompts.insert(TOKENS[:25], caches)
    cache.flush(10)
    assert prompts.fetch(TOKENS[:30])[1] == TOKENS[20:30]


def test_other_weights_share_nothing(cache: rewarm.PrefixCache) -> None:
    one, other = tiny_llama(seed=0), tiny_llama(seed=1)
    prompts = PromptCache(one, Words(), cache)
    caches, rest = prompts.fetch(TOKENS[:50])
    prompts.insert(TOKENS[:50] + answer(one, rest, caches), caches)
    cache.flush(10)
    assert PromptCache(other, Words(), cache).fetch(TOKENS[:50])[1] == TOKENS[:50]
    assert PromptCache(tiny_llama(seed=0), Words(), cache).fetch(TOKENS[:50])[1] == TOKENS[49:50]


def test_the_identity_of_a_live_model() -> None:
    model = tiny_llama()
    known = from_live_model(model).fingerprint
    assert from_live_model(tiny_llama()).fingerprint == known
    assert from_live_model(tiny_llama(dtype=mx.float32)).fingerprint != known
    model.args.rope_theta = 20000.0
    assert from_live_model(model).fingerprint != known


def test_the_identity_of_a_model_folder(tmp_path: Path, bundled_model: Path) -> None:
    def fingerprint(*args: Any) -> str:
        known = from_files(*args)
        assert known.wait(30), known.error
        return str(known.fingerprint)

    folder = write_model(tmp_path / "model", llama_config(vocab=49152), bundled_model)
    plain = fingerprint(folder)
    other = {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 0}
    changed = [fingerprint(folder, None, other), fingerprint(folder, None, {**other, "kv_bits": 4})]
    for scale in (10.0, 20.0):
        adapter = tmp_path / f"adapter-{scale}"
        adapter.mkdir()
        (adapter / "adapters.safetensors").write_bytes(b"the same weights")
        (adapter / "adapter_config.json").write_text(f'{{"lora_parameters": {{"scale": {scale}}}}}')
        changed.append(fingerprint(folder, adapter))
    (folder / "model.py").write_text("class Model: ...")
    changed.append(fingerprint(folder))
    assert len({plain, *changed}) == 6
    (folder / "model.py").unlink()
    (folder / "README.md").write_text("Words change no weights.")
    assert fingerprint(folder) == plain


def test_a_scale_that_is_no_parameter_is_part_of_the_identity() -> None:
    from mlx_lm.tuner.lora import LoRALinear

    def adapted(scale: float) -> Any:
        model = tiny_llama()
        mx.random.seed(5)
        for layer in model.layers:
            layer.self_attn.k_proj = LoRALinear.from_base(layer.self_attn.k_proj, r=2, scale=scale)
        return from_live_model(model).fingerprint

    assert adapted(1.0) == adapted(1.0)
    assert len({adapted(1.0), adapted(2.0), from_live_model(tiny_llama()).fingerprint}) == 3


def test_an_unknown_class_is_served_uncached_with_a_reason(
    cache: rewarm.PrefixCache, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama()
    novel = type("NovelCache", (KVCache,), {})
    model.make_cache = lambda: [novel(), novel()]
    prompts = PromptCache(model, Words(), cache)
    assert "NovelCache" in prompts.reason
    assert caplog.text.count("NovelCache") == 1
    for _ in range(2):
        caches, rest = prompts.fetch(TOKENS[:50])
        assert rest == TOKENS[:50]
        assert prompts.last.reason == "disabled"
        prompts.insert(TOKENS[:50] + answer(model, rest, caches), caches)
    assert cache.entries() == []


def test_wrong_calls_raise(cache: rewarm.PrefixCache) -> None:
    prompts = PromptCache(tiny_llama(), Words(), cache)
    with pytest.raises(ValueError, match="no tokens"):
        prompts.fetch([])
    with pytest.raises(ValueError, match="boundary"):
        prompts.insert([1], make_prompt_cache(tiny_llama()), boundary="boundary")
