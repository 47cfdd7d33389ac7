"""Prompts that drift: something near the head changes, and whoever looks is told at which token."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_server import Running

from rewarm.gateway.settings import Settings

LONG = " ".join(f"rule{number}" for number in range(280))


@pytest.fixture
def cached(settings: Settings) -> Iterator[Running]:
    """A gateway whose workers have a real cache; a word is a token."""
    command = (sys.executable, str(Path(__file__).with_name("cache_worker.py")))
    gateway = Running(settings.model_copy(update={"worker_command": command}))
    yield gateway
    gateway.close()


def ask(running: Running, *messages: tuple[str, str]) -> dict[str, Any]:
    """What the cache did."""
    body = {
        "model": "alpha",
        "messages": [{"role": role, "content": content} for role, content in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = running.client.post("/v1/chat/completions", json=body).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    report: dict[str, Any] = events[-1]["rewarm"]
    return report


@pytest.mark.parametrize(
    ("one", "other"),
    [("id=3f1a2", "id=9c0de"), ("Today is Monday, 10:31.", "Today is Monday, 10:32.")],
    ids=["a nonce", "the time"],
)
def test_what_changes_at_the_head_is_named_by_its_token_b138_b140(
    cached: Running, caplog: pytest.LogCaptureFixture, one: str, other: str
) -> None:
    caplog.set_level(logging.INFO, "rewarm.gateway.relay")
    assert ask(cached, ("system", f"{one} {LONG}"), ("user", "Hello"))["reason"] == "nothing_stored"
    again = ask(cached, ("system", f"{other} {LONG}"), ("user", "Hello"))
    at = len(one.split())  # the role is a token; all of the head but its last word is the same
    assert again["reason"] == "diverged"
    assert f"from token {at} on" in again["detail"]
    assert "(0 from disk" not in caplog.text.splitlines()[-1] or again["disk_tokens"] == 0
    assert "; diverged)" in caplog.text.splitlines()[-1]
    assert LONG not in caplog.text and "rule7" not in caplog.text
    # The same again is whole: what drifted was the prompt and not the cache.
    assert ask(cached, ("system", f"{other} {LONG}"), ("user", "Hello"))["reason"] == "hit"


def test_each_edit_of_an_agents_history_is_named_where_it_is_b146(cached: Running) -> None:
    turns = [("system", LONG), ("user", "memory: none"), ("user", "time: 1"), ("user", "resume: no"), ("user", "Go on")]
    ask(cached, *turns)
    for index, edit in ((1, "memory: cats"), (2, "time: 2"), (3, "resume: yes")):
        drifted = [*turns]
        drifted[index] = ("user", edit)
        told = ask(cached, *drifted)
        at = sum(1 + len(content.split()) for _, content in turns[:index]) + 2
        assert told["reason"] == "diverged" and f"from token {at} on" in told["detail"], told
        assert told["cached_tokens"] == at


def test_cached_tokens_are_those_not_evaluated_b149(cached: Running) -> None:
    first = ask(cached, ("user", LONG))
    assert first["cached_tokens"] == 0
    repeat = ask(cached, ("user", LONG))
    assert repeat["cached_tokens"] == repeat["prompt_tokens"] - 1
    longer = ask(cached, ("user", LONG + " more"))
    assert longer["cached_tokens"] == first["prompt_tokens"] < longer["prompt_tokens"]
