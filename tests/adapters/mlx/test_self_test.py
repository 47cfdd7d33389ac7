"""The self-test at load: every family passes it, and what a codec or a model keeps elsewhere fails it."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import pytest
from families import FAMILIES
from matrix import runner
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import TOKENS, tiny, tiny_llama

import rewarm
from rewarm.adapters.mlx import PromptCache, codec, self_test
from rewarm.adapters.mlx.codecs.attention import RowsCodec
from rewarm.adapters.mlx.codecs.windows import chunks_slide_too_far

SERVED = [name for name in FAMILIES if name != "llama4" or not chunks_slide_too_far()]


@pytest.mark.parametrize("name", [*SERVED, "kept ring", "concatenated"])
def test_every_family_passes(name: str) -> None:
    self_test.run(runner(name).model)


class Forgetful(RowsCodec):
    """Gives rows back one token late."""

    def decode(self, given: Any, fresh: Any) -> Any:
        cache = super().decode(given, fresh)
        cache.keys = mx.roll(cache.keys, 1, axis=2)
        return cache


class Late(RowsCodec):
    """Gives everything back as it was, and a wrong position with it."""

    def decode(self, given: Any, fresh: Any) -> Any:
        cache = super().decode(given, fresh)
        cache.offset += 1
        return cache


@pytest.mark.parametrize("wrong", [Forgetful(pad=True), Late(pad=True)], ids=["rows", "position"])
def test_a_codec_that_is_wrong_fails(wrong: RowsCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codec.CODECS, "mlx_lm.models.cache.KVCache", wrong)
    with pytest.raises(codec.UnsupportedCache, match="self-test failed"):
        self_test.run(tiny_llama())


class Elsewhere:
    """A model that remembers its last prompt outside its caches."""

    def __init__(self) -> None:
        self._model = tiny("llama")
        self.layers = self._model.layers
        self._last = mx.array(0.0)

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        logits = self._model(inputs, cache=cache) + self._last
        self._last = inputs.sum() * 1e-3
        return logits


class Beginnings(Elsewhere):
    """A model that remembers how its last prompt began, outside its caches."""

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        if cache[0].offset == 0:
            self._last = inputs.sum() * 1e-3
        return self._model(inputs, cache=cache) + self._last


class Broken(Elsewhere):
    """A model that cannot evaluate a single token."""

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        if inputs.shape[1] == 1:
            raise IndexError("no such row")
        return self._model(inputs, cache=cache)


@pytest.mark.parametrize(
    ("model", "why"), [(Elsewhere, "other logits"), (Beginnings, "other logits"), (Broken, "IndexError: no such row")]
)
def test_a_model_that_is_not_its_caches_fails(model: type[Any], why: str) -> None:
    with pytest.raises(codec.UnsupportedCache, match=why):
        self_test.run(model())


def test_a_model_that_fails_is_served_uncached_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(codec.CODECS, "mlx_lm.models.cache.KVCache", Forgetful(pad=True))
    model = tiny_llama()
    with caplog.at_level(logging.WARNING), rewarm.open(tmp_path / "kv") as cache:
        prompts = PromptCache(model, None, cache, rewarm.Identity({"test": "wrong codec"}))
        for _ in range(3):
            caches, rest = prompts.fetch(TOKENS[:20])
            assert rest == TOKENS[:20]
            model(mx.array([rest]), cache=caches)
            prompts.insert(TOKENS[:20], caches)
        assert cache.entries() == []
    assert "self-test failed" in prompts.reason
    assert caplog.text.count("self-test failed") == 1


def test_the_self_test_leaves_the_model_alone() -> None:
    model = tiny("qwen3_next")
    before = model(mx.array([TOKENS[:9]]), cache=make_prompt_cache(model))
    self_test.run(model)
    assert mx.array_equal(before, model(mx.array([TOKENS[:9]]), cache=make_prompt_cache(model)))
