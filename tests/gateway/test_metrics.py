"""`/metrics`: true, per model, readable by Prometheus, and there whatever a worker lacks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_server import Running
from prometheus_client.parser import text_string_to_metric_families

from rewarm.gateway.settings import Settings


@pytest.fixture
def cached(settings: Settings) -> Iterator[Running]:
    """A gateway whose workers have a real cache, and no `/rewarm/stats`."""
    command = (sys.executable, str(Path(__file__).with_name("cache_worker.py")))
    gateway = Running(settings.model_copy(update={"worker_command": command}))
    yield gateway
    gateway.close()


def figures(running: Running) -> dict[tuple[str, ...], float]:
    """Every sample, by name and the values of its labels."""
    answer = running.client.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain")
    families = list(text_string_to_metric_families(answer.text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples = [sample for family in families for sample in family.samples]
    return {(one.name, *(one.labels[name] for name in sorted(one.labels))): one.value for one in samples}


def ask(running: Running, text: str, model: str = "alpha", **headers: str) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": True}
    return running.client.post("/v1/chat/completions", json=body, headers=headers)


def test_hits_misses_tokens_and_times_per_model(cached: Running) -> None:
    words = " ".join(f"w{number}" for number in range(300))
    ask(cached, words)
    ask(cached, words + " and more")
    ask(cached, "other", "beta")
    told = figures(cached)
    assert told["rewarm_replies_total", "alpha", "prefill"] == 1
    assert told["rewarm_replies_total", "alpha", "disk"] == 1
    assert told["rewarm_misses_total", "alpha", "nothing_stored"] == 1
    assert ("rewarm_misses_total", "alpha", "diverged") not in told
    assert told["rewarm_prompt_tokens_total", "alpha", "disk"] >= 300
    assert told["rewarm_prompt_tokens_total", "alpha", "prefill"] >= 301
    assert told["rewarm_prompt_tokens_total", "beta", "disk"] == 0
    assert told["rewarm_saved_seconds_total", "alpha"] > 0
    assert told["rewarm_ttft_seconds_count", "alpha", "yes"] == told["rewarm_ttft_seconds_count", "alpha", "no"] == 1
    assert told["rewarm_model_loaded", "alpha"] == 1
    assert told["rewarm_model_memory_bytes", "alpha"] > 1_000_000
    assert told["rewarm_cache_usable",] == 1
    assert told["rewarm_cache_bytes_written_total",] > 0
    assert told["rewarm_limit_max_bytes",] > 0


def test_a_request_past_the_cache_is_no_miss_b150(cached: Running) -> None:
    cached.client.patch("/api/models/alpha", json={"caching": False})
    ask(cached, "one")
    told = figures(cached)
    assert told["rewarm_replies_total", "alpha", "bypass"] == 1
    assert not any(key[0] == "rewarm_misses_total" for key in told)


def test_figures_are_there_before_anything_was_asked(running: Running) -> None:
    told = figures(running)
    assert told["rewarm_model_loaded", "alpha"] == 0
    assert told["rewarm_cache_usable",] == 1


def test_what_a_worker_says_is_no_metric_of_its_own(running: Running) -> None:
    metrics = running.gateway.metrics
    for number in range(50):
        metrics.note("alpha", {"reason": f"made up {number}", "prompt_tokens": "many", "disk_tokens": -5}, None)
    told = figures(running)
    assert told["rewarm_misses_total", "alpha", "other"] == 50
    assert told["rewarm_prompt_tokens_total", "alpha", "prefill"] == 0
