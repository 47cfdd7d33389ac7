"""The gateway with the bundled model in the real worker, asked by the official `openai` client."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_server import Running, is_alive

from rewarm.gateway.settings import Settings
from waiting import until

pytestmark = pytest.mark.engine

SYSTEM = (
    "You are the guide of a small town museum. You answer in one short sentence. The museum shows clocks, maps "
    "and old radios, is open from ten to five, and is closed on Mondays. Children pay nothing."
)


@pytest.fixture(scope="module")
def running(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A gateway that offers the bundled model, and nothing in its cache yet."""
    home = tmp_path_factory.mktemp("gateway")
    settings = Settings(cache_dir=home / "kv", data_dir=home / "data", models=[bundled_model], bundled=False)
    gateway = Running(settings)
    yield gateway
    gateway.close()


def test_a_conversation_goes_on_after_the_model_was_unloaded(running: Running) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        (model,) = [one.id for one in client.models.list()]
        messages: list[Any] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "When are you closed?"},
        ]
        first = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)
        assert first.model == model and first.usage
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        text = first.choices[0].message.content or ""
        assert "Monday" in text

        pid = running.state(model)["pid"]
        unloaded = running.client.post(f"/api/models/{model}/unload").json()
        assert unloaded["state"] == "stopped" and not is_alive(pid)

        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And who pays nothing?"}]
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert {chunk.model for chunk in chunks} == {model}
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices).strip()
        usage, report = chunks[-1].usage, chunks[-1].model_dump()["rewarm"]
        assert usage and usage.prompt_tokens_details.cached_tokens == report["disk_tokens"]
        # All of the first turn but its last token or two.
        assert report["disk_tokens"] >= first.usage.total_tokens - 2
        counters = running.client.get("/api/stats").json()["counters"]
        assert counters["bytes_used"] > 0


def test_a_request_past_the_cache_and_one_that_only_reads(running: Running) -> None:
    (model,) = running.gateway.workers.names
    text = "Tell of the old radios. " + "They are in the cellar, beside the maps and the clocks. " * 6

    def ask(**headers: str) -> tuple[int, str]:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2, "temperature": 0}
        answer = running.client.post("/v1/chat/completions", json=body, headers=headers, timeout=300)
        assert answer.status_code == 200, answer.text
        return int(answer.headers["X-Rewarm-Cached-Tokens"]), answer.headers["X-Rewarm-Reason"]

    assert ask(**{"X-Rewarm-Cache": "off"}) == (0, "disabled")
    assert ask(**{"X-Rewarm-Cache": "off"}) == (0, "disabled")
    n_shared, _ = ask(**{"X-Rewarm-Conversation": "radios"})
    running.client.post(f"/api/models/{model}/unload")
    before = running.client.get("/api/stats").json()["counters"]["files_used"]
    n_restored, _ = ask(**{"X-Rewarm-Cache": "read-only"})
    assert n_restored > n_shared + 60
    running.client.post(f"/api/models/{model}/unload")
    assert running.client.get("/api/stats").json()["counters"]["files_used"] == before
    labels = [entry["label"] for entry in running.client.get("/api/entries").json()["entries"]]
    assert "radios" in labels


def test_a_completion(running: Running) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        (model,) = [one.id for one in client.models.list()]
        done = client.completions.create(model=model, prompt="One, two, three,", max_tokens=4, temperature=0)
        assert "four" in done.choices[0].text


def test_a_killed_worker_is_started_again_and_one_whose_gateway_is_gone_ends(running: Running) -> None:
    (model,) = running.gateway.workers.names
    pid = running.client.post(f"/api/models/{model}/load").json()["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: running.state(model)["state"] == "failed")
    answer = running.chat("Say hello.", model, max_tokens=4)
    assert answer.status_code == 200
    pid = running.state(model)["pid"]
    # What the operating system does when a gateway is killed: its end of the worker's input closes.
    live = running.gateway.workers.get(model)._running
    assert live is not None
    end, live.process.leash = live.process.leash, os.open(os.devnull, os.O_RDONLY)
    os.close(end)
    until(lambda: not is_alive(pid))
