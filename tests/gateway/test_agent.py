"""An agent that people use against local servers, `llm`, in a loop with tools: each of its turns is restored.

In an environment of its own, made by the test from the package registry.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_server import Running

from rewarm.gateway.settings import Settings

pytestmark = pytest.mark.long

TOOL = """
def opening_hours() -> str:
    "When the museum is open."
    return "from ten to five"
"""
MODEL = """
- model_id: local
  model_name: alpha
  api_base: {url}/v1
  supports_tools: true
"""


@pytest.fixture
def cached(settings: Settings) -> Iterator[Running]:
    """A gateway whose workers have a real cache and call the first tool that they are offered."""
    command = (sys.executable, str(Path(__file__).with_name("cache_worker.py")))
    gateway = Running(settings.model_copy(update={"worker_command": command}))
    yield gateway
    gateway.close()


def test_an_agents_loop_with_tools_is_restored(cached: Running, tmp_path: Path) -> None:
    llm = _installed(tmp_path / "env")
    home = tmp_path / "llm"
    home.mkdir()
    (home / "extra-openai-models.yaml").write_text(MODEL.format(url=cached.url))
    replies: list[tuple[dict[str, Any], float | None]] = []
    cached.gateway.workers.on_reply(lambda _model, report, ttft_s: replies.append((dict(report), ttft_s)))
    env = {**os.environ, "LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none", "NO_PROXY": "127.0.0.1"}
    question = "When is the museum open? " + "Answer in one short sentence. " * 60

    def ask(*options: str) -> str:
        command = [str(llm), "-m", "local", "--functions", TOOL, *options, question]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "from ten to five" in ask()
    first, second = (report for report, _ in replies)
    assert first["disk_tokens"] == 0
    # The turn with the tool's result goes on from the turn before, the call included.
    assert second["disk_tokens"] >= first["prompt_tokens"] > 300
    cached.client.post("/api/models/alpha/unload")
    assert "from ten to five" in ask()
    assert replies[2][0]["disk_tokens"] == replies[2][0]["prompt_tokens"] - 1
    assert replies[3][0]["disk_tokens"] == replies[3][0]["prompt_tokens"] - 1


def _installed(folder: Path) -> Path:
    """The program, in an environment of its own."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    command = [str(folder / "bin" / "pip"), "install", "--quiet", "llm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip("needs llm from the package registry, which cannot be reached")
    return folder / "bin" / "llm"
