"""Large states are read before their requests are queued, while the engine goes on: on a real mlx-lm server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from serving import Server, messages
from tiny_models import llama_config, tiny_llama, write_model

import rewarm
from conftest import VOCAB
from rewarm.adapters.mlx import ahead
from rewarm.adapters.mlx.disk_tier import DiskTier
from rewarm.state.reason import Boundary, Reason

pytestmark = pytest.mark.engine

Serve = Callable[..., Server]

LONG = " ".join(f"Line {i} is about the number {i * i}." for i in range(60))


@pytest.fixture(scope="module")
def wide_model(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose KV takes 32 KiB a token."""
    wide = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "num_hidden_layers": 4}
    folder = tmp_path_factory.mktemp("models") / "wide"
    return write_model(folder, llama_config(vocab=VOCAB) | wide, bundled_model)


def test_a_large_state_is_read_ahead_and_is_right(wide_model: Path, serve: Serve, tmp_path: Path) -> None:
    flags = ("--rewarm-dir", str(tmp_path / "kv"))
    with rewarm.open(tmp_path / "kv", policy=rewarm.Policy(load="always")):
        pass
    with serve(wide_model, *flags) as server:
        server.chat(LONG, max_tokens=4)
        turns = (LONG, "yes", "And then?")
        wanted = server.chat(*turns, max_tokens=8)["choices"]
        server.terminate()
    with serve(wide_model, *flags, secret="s3cret") as server:
        found: dict[int, Any] = {}

        def work(i: int) -> None:
            found[i] = server.chat(*turns, max_tokens=8)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[i]["choices"] for i in range(3)] == [wanted] * 3
        assert all(found[i]["rewarm"]["cached_tokens"] > 400 for i in range(3))
        assert any(found[i]["rewarm"]["disk_tokens"] > 400 for i in range(3))
        assert "tokens ahead of the queue" in server.text()
        # What makes no sense is refused as ever, and a wrong request reads nothing.
        status, _, answer = server.request(
            "POST", "/v1/chat/completions", {"messages": messages(LONG), "logit_bias": {"999999": 1}}
        )
        assert status == 400
        assert "logit_bias" in json.loads(answer)["error"]["message"]
        assert server.chat("Hello.")["choices"]


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ahead, "LARGE_NBYTES", 1)
    model = tiny_llama()
    with rewarm.open(tmp_path / "kv", policy=rewarm.Policy(load="always")) as cache:
        tier = DiskTier(cache, rewarm.Identity({"weights": "tiny"}), model)
        caches = make_prompt_cache(model)
        mx.eval(model(mx.array([list(range(1, 301))]), cache=caches))
        tier.save(list(range(1, 301)), caches, Boundary.ASSISTANT)
        assert cache.flush()
        yield tier


PROMPT = [*range(1, 301), 7, 8]


def test_what_is_read_on_another_thread_is_what_is_read_on_this_one(tier: DiskTier) -> None:
    planned = tier.plan(PROMPT, at_most=301, longer_than=0, tenant=b"")
    assert planned is not None
    assert tier.waiting.nbytes == planned.match.nbytes
    thread = threading.Thread(target=planned.read)
    thread.start()
    thread.join()
    made = tier.finish(planned, at_most=301, longer_than=0)
    assert tier.waiting.nbytes == 0
    assert made.n_tokens == 300
    direct = tier.restore(PROMPT, at_most=301)
    assert direct.caches is not None
    assert made.caches is not None
    for a, b in zip(made.caches, direct.caches, strict=True):
        assert mx.array_equal(a.keys[..., :300, :], b.keys[..., :300, :])
        assert mx.array_equal(a.values[..., :300, :], b.values[..., :300, :])
    planned.release()
    assert tier.waiting.nbytes == 0
    # Nothing is held by the request that had it.
    assert planned.state is None
    assert planned.buffers is None


def test_what_the_engine_holds_is_not_read(tier: DiskTier) -> None:
    assert tier.plan(PROMPT, at_most=301, longer_than=300, tenant=b"") is None
    assert tier.plan([5, 6, 7], at_most=2, longer_than=0, tenant=b"") is None
    assert tier.plan(PROMPT, at_most=301, longer_than=0, tenant=b"another") is None


def test_states_that_wait_are_bounded(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tier.plan(PROMPT, at_most=301, longer_than=0, tenant=b"")
    assert first is not None
    monkeypatch.setattr(ahead, "free_memory", lambda: ahead.SHARE * first.match.nbytes)
    second = tier.plan(PROMPT, at_most=301, longer_than=0, tenant=b"")
    assert second is not None
    second.read()
    found = tier.finish(second, at_most=301, longer_than=0)
    assert (found.caches, found.reason) == (None, Reason.BUSY)
    assert tier.waiting.nbytes == first.match.nbytes
    first.release()
    assert tier.waiting.nbytes == 0
    assert tier.plan(PROMPT, at_most=301, longer_than=0, tenant=b"") is not None


def test_a_memory_that_holds_more_by_then_serves(tier: DiskTier) -> None:
    planned = tier.plan(PROMPT, at_most=301, longer_than=0, tenant=b"")
    assert planned is not None
    planned.read()
    assert tier.finish(planned, at_most=301, longer_than=300).caches is None
    assert tier.waiting.nbytes == 0


@pytest.mark.parametrize(("prefill_s", "deadline_s"), [(0.0, 30.0), (0.2, 1.0), (5.0, 5.0), (100.0, 30.0)])
def test_reading_takes_no_longer_than_prefill_would(prefill_s: float, deadline_s: float) -> None:
    assert ahead.deadline_of(prefill_s) == deadline_s
