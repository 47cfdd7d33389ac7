"""Where prompts are stopped at, so that their states are kept: on a real mlx-lm server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import Server, messages

import rewarm

pytestmark = pytest.mark.engine

Serve = Callable[..., Server]

STEP = 256
LAST = 16
"""Tokens at a prompt's end, about as many as its last part has."""

LONG = " ".join(f"Line {i} is about the number {i * i}." for i in range(160))


def cancel_half_way(server: Server, body: dict[str, Any]) -> tuple[int, int]:
    """Leave while the prompt is evaluated; tokens evaluated when the client left at the latest, and all."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}))
    response = connection.getresponse()
    done = whole = 0
    while not whole or done < 0.8 * whole:
        line = response.readline().decode()
        if line.startswith(": keepalive"):
            done, whole = (int(part) for part in line.split()[-1].split("/"))
        assert line
    response.close()
    connection.close()
    return done, whole


@pytest.mark.parametrize("which", ["tiny_model", "windowed_model"])
@pytest.mark.parametrize("alone", [False, True])
def test_b162_a_prompt_that_is_cancelled_loses_one_chunk_at_most(
    which: str, alone: bool, request: pytest.FixtureRequest, serve: Serve, tmp_path: Path
) -> None:
    model, more = request.getfixturevalue(which), {"seed": 5} if alone else {}
    flags = ("--rewarm-dir", str(tmp_path / "kv"), "--prefill-step-size", str(STEP))
    body = {"messages": messages(LONG), "max_tokens": 2, "temperature": 0.0, **more}
    with serve(model, *flags) as server:
        done, whole = cancel_half_way(server, body)
        assert server.chat("Hello.", **more)["choices"]  # the engine is free again
        assert server.chat(LONG, max_tokens=2, **more)["rewarm"]["cached_tokens"] >= done - STEP
    assert whole > 4 * STEP


@pytest.mark.parametrize("which", [pytest.param("tiny_model", marks=pytest.mark.long), "windowed_model"])
def test_what_was_evaluated_before_the_end_comes_back_in_the_next_process(
    which: str, request: pytest.FixtureRequest, serve: Serve, tmp_path: Path
) -> None:
    model = request.getfixturevalue(which)
    flags = ("--rewarm-dir", str(tmp_path / "kv"), "--prefill-step-size", str(STEP))
    body = {"messages": messages(LONG), "max_tokens": 2, "temperature": 0.0}
    with serve(model, *flags) as server:
        done, _ = cancel_half_way(server, body)
        server.terminate()
    with serve(model, *flags) as server:
        answer = server.chat(LONG, max_tokens=2)
        assert answer["rewarm"]["disk_tokens"] >= done - STEP
        wanted = answer["choices"]
    with serve(model, "--rewarm-off", "--prefill-step-size", str(STEP)) as server:
        assert server.chat(LONG, max_tokens=2)["choices"] == wanted


def test_a_prompt_that_ends_in_a_tools_result_has_a_system_point(
    windowed_model: Path, serve: Serve, tmp_path: Path
) -> None:
    """As in every agent loop; such prompts are one piece to mlx-lm."""
    system = "You are an agent with a tool that reads files. " * 3
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    turns = [
        {"role": "system", "content": system},
        {"role": "user", "content": "What is in the file?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "It says hello.", "tool_call_id": "1"},
    ]
    flags = ("--rewarm-dir", str(tmp_path / "kv"))
    with serve(windowed_model, *flags) as server:
        body = {"messages": turns, "max_tokens": 2, "temperature": 0.0}
        assert server.request("POST", "/v1/chat/completions", body)[0] == 200
        server.terminate()
    with rewarm.open(tmp_path / "kv") as cache:
        assert [entry.boundary for entry in cache.entries() if entry.boundary == "system"] == ["system"]
    with serve(windowed_model, *flags) as server:
        other = server.chat("And something else?", system=system)
        assert other["rewarm"]["disk_tokens"] > 10
