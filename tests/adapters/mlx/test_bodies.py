"""Requests that the engine would fail at are refused before it sees them, and whatever it fails at, it goes on."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import Server, messages

from rewarm.adapters.mlx import bodies

Serve = Callable[..., Server]

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", 5),
        ("stop", [5]),
        ("stop", [None]),
        ("stop", [["a"]]),
        ("top_k", 2**40),
        ("top_k", -1),
        ("top_k", True),
        ("top_p", float("nan")),
        ("top_p", 1.5),
        ("temperature", "hot"),
        ("temperature", float("inf")),
        ("max_tokens", 0),
        ("max_tokens", 2**70),
        ("max_completion_tokens", 1.5),
        ("n", 2),
        ("n", True),
        ("seed", -1),
        ("seed", 2**70),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": [1]}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {"1": float("nan")}),
        ("logit_bias", {str(2**70): 1}),
        ("logit_bias", {"\u0661": 1}),
        ("logit_bias", {str(i): 1 for i in range(5000)}),
        ("repetition_context_size", 2**70),
        ("presence_context_size", -1),
        ("frequency_penalty", float("-inf")),
        ("repetition_penalty", -1),
        ("xtc_threshold", 1),
        ("xtc_probability", 2),
        ("num_draft_tokens", 10**6),
        ("stream", 1),
        ("stream_options", 5),
        ("model", 7),
        ("tools", [5]),
        ("tools", {}),
        ("chat_template_kwargs", {"chat_template": ""}),
        ("chat_template_kwargs", {"tokenize": False}),
        ("chat_template_kwargs", []),
        ("messages", []),
        ("messages", "hi"),
        ("messages", ["hi"]),
        ("messages", [{"content": "hi"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [5]}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(bodies.BadRequest, match=field) as caught:
        bodies.read(json.dumps({**CHAT, field: value}).encode(), is_chat=True)
    assert caught.value.field == field


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [1, 2], None, 5, {"a": 1}])
def test_a_prompt_is_one_text(prompt: Any) -> None:
    with pytest.raises(bodies.BadRequest, match="prompt"):
        bodies.read(json.dumps({"prompt": prompt}).encode(), is_chat=False)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"5", b"null", b"\xff", b"[" * 100_000])
def test_a_body_is_a_json_object(raw: bytes) -> None:
    with pytest.raises(bodies.BadRequest):
        bodies.read(raw, is_chat=True)


def test_null_is_as_good_as_nothing() -> None:
    null = dict.fromkeys((*bodies._CHECKS, "user"))
    assert bodies.read(json.dumps({**null, **CHAT}).encode(), is_chat=True) == CHAT


def test_what_makes_sense_comes_through() -> None:
    asked = {
        "stop": "end",
        "max_tokens": 5.0,
        "temperature": 0,
        "xtc_threshold": 0,
        "logit_bias": {"5": -100},
        "n": 1,
        "logprobs": True,
        "user": "me",
    }
    found = bodies.read(json.dumps({**CHAT, **asked}).encode(), is_chat=True)
    assert found == {**CHAT, **asked, "stop": ["end"], "max_tokens": 5, "temperature": 0.0}
    assert bodies.read(b'{"prompt": ["a"], "stop": ["", "b"]}', is_chat=False) == {"prompt": "a", "stop": ["b"]}


@given(
    st.dictionaries(
        st.sampled_from(sorted(bodies._CHECKS)),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        ),
    )
)
def test_any_body_is_read_or_refused(fields: dict[str, Any]) -> None:
    try:
        found = bodies.read(json.dumps({**CHAT, **fields}).encode(), is_chat=True)
    except bodies.BadRequest as bad:
        assert str(bad)
    else:
        assert set(found) <= {*CHAT, *fields}


@pytest.mark.engine
def test_wrong_requests_end_nobody_elses(tiny_model: Path, serve: Serve) -> None:
    """One reply is being written all the time, while wrong requests come in."""
    with serve(tiny_model) as server:
        wanted = server.chat("count for me", max_tokens=120)
        found: list[dict[str, Any]] = []
        other = threading.Thread(target=lambda: found.append(server.chat("count for me", max_tokens=120)))
        other.start()
        for path, body in (
            ("/v1/completions", {"prompt": ""}),
            ("/v1/completions", {"prompt": ["a", "b"]}),
            ("/v1/chat/completions", {**CHAT, "logit_bias": {"1000000": 5}}),
            ("/v1/chat/completions", {**CHAT, "logit_bias": {"1": None}}),
            ("/v1/chat/completions", {**CHAT, "stop": [["a"]]}),
            ("/v1/chat/completions", {**CHAT, "xtc_probability": 1.0, "xtc_threshold": 1.0}),
            ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"chat_template": ""}}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
            ("/v1/chat/completions", b"[" * 100_000),
        ):
            status, _, answer = server.request("POST", path, body)
            assert status == 400, (body, answer)
            error = json.loads(answer)["error"]
            assert error["type"] == "invalid_request_error"
            assert str(tiny_model.parent) not in error["message"]
        for fields in (
            {"top_k": 2**31 - 1},
            {"max_tokens": None, "temperature": None, "stop": []},
            {"top_logprobs": 11},
        ):
            body = {"messages": messages("hi"), "max_tokens": 2, **fields}
            body["max_tokens"] = body["max_tokens"] or 2
            assert server.request("POST", "/v1/chat/completions", body)[0] == 200
        assert server.request("POST", "/v1/nothing", {})[0] == 404
        assert server.request("POST", "/v1/chat/completions", {**CHAT, "model": "no/such"})[0] == 404
        other.join()
        assert found[0]["choices"] == wanted["choices"]


def failing_generator(monkeypatch: pytest.MonkeyPatch, failures: int) -> tuple[Any, list[str]]:
    """A generator whose loop fails so many times, each time with one request in hand, and then ends."""
    import weakref

    from rewarm.adapters.mlx import seam

    loops: list[str] = []

    def loop(generator: Any) -> None:
        loops.append("begun")
        if len(loops) <= failures:
            taken = generator._next_request()
            raise RuntimeError(f"broken by {taken[1]}")

    monkeypatch.setattr(seam.engine.ResponseGenerator, "_generate", loop)
    monkeypatch.setattr(seam.engine.ResponseGenerator, "_next_request", lambda self, timeout=None: self.asked.pop())
    generator = seam.ResponseGenerator.__new__(seam.ResponseGenerator)
    generator._open = weakref.WeakSet()
    generator._orders, generator._idle_since = queue.SimpleQueue(), None
    generator.prompt_cache = Silent()
    return generator, loops


def arguments() -> Any:
    return SimpleNamespace(model=SimpleNamespace(model="m", draft=None, adapter=None))


class Silent:
    """A prompt cache that is told things."""

    def let_go(self) -> None: ...

    def begin(self, context: Any) -> None: ...


def test_what_ends_the_engines_loop_ends_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, loops = failing_generator(monkeypatch, failures=2)
    queues: list[queue.Queue[Any]] = [queue.Queue(), queue.Queue(), queue.Queue()]
    generator.asked = [(each, i, arguments()) for i, each in enumerate(queues)]
    generator._generate_on()
    assert len(loops) == 3
    assert [each.qsize() for each in queues] == [0, 1, 1]
    assert str(queues[2].get()) == "broken by 2"


def test_an_engine_that_fails_again_and_again_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, loops = failing_generator(monkeypatch, failures=100)
    generator.asked = [(queue.Queue(), i, arguments()) for i in range(100)]
    with pytest.raises(RuntimeError, match="broken by"):
        generator._generate_on()
    assert len(loops) == 4
