"""Another version of mlx-lm goes on with what is stored, where it computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from families import FAMILIES
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import TOKENS, tiny, tiny_llama

import rewarm
from rewarm.adapters.mlx import epoch_probe, identity
from rewarm.adapters.mlx.disk_tier import DiskTier
from rewarm.cache.epochs import PROBE_TOKENS, same

PROMPT = TOKENS[:90]


def tier(cache: rewarm.PrefixCache, model: Any, version: str, monkeypatch: pytest.MonkeyPatch) -> DiskTier:
    """A loaded model under a version of mlx-lm."""
    monkeypatch.setattr(identity.importlib.metadata, "version", lambda name: version)
    return DiskTier(cache, identity.from_live_model(model), model)


def save(disk: DiskTier, cache: rewarm.PrefixCache, model: Any) -> None:
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([PROMPT]), cache=caches))
    disk.save(PROMPT, caches, rewarm.Boundary.ASSISTANT)
    assert cache.flush(30)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_b020_an_update_that_computes_the_same_keeps_the_cache(
    tmp_path: Path, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(dtype=dtype)
    with rewarm.open(tmp_path / "kv") as cache:
        save(tier(cache, model, "1.0.0", monkeypatch), cache, model)
        newer = tier(cache, model, "1.1.0", monkeypatch)
        assert newer.restore([*PROMPT, 1], at_most=len(PROMPT)).n_tokens == len(PROMPT)
        assert [entry.n_tokens for entry in cache.entries()] == [len(PROMPT)]


def test_b020_an_update_that_computes_something_else_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    with rewarm.open(tmp_path / "kv") as cache:
        save(tier(cache, model, "1.0.0", monkeypatch), cache, model)
        real = epoch_probe.states
        monkeypatch.setattr(epoch_probe, "states", lambda _: real(tiny_llama(seed=9)))
        newer = tier(cache, model, "1.1.0", monkeypatch)
        assert newer.restore([*PROMPT, 1], at_most=len(PROMPT)).n_tokens == 0


@pytest.mark.parametrize("family", sorted(FAMILIES)[::4])
def test_a_model_agrees_with_itself_and_with_no_other(family: str) -> None:
    one, other = (epoch_probe.states(tiny(family, seed=seed)) for seed in (0, 1))
    assert all(state.n_tokens == len(PROBE_TOKENS) for state in one)
    assert same(one[0], epoch_probe.states(tiny(family)))
    assert not same(one[0], other)
