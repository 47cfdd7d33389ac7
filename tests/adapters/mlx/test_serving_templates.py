"""Conversations whose templates do more: thinking that is dropped, tools in the middle, several system messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import Server
from tiny_models import gemma_config, write_model

Serve = Callable[..., Server]

pytestmark = pytest.mark.engine

VOCAB = 49152
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ (m['content'] or '').split('</think>')[-1] }}"
    "{% for call in m.get('tool_calls') or [] %}CALL {{ call['function']['name'] }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
LONG = "Where does the Danube begin, and which towns does it see? " * 6
"""Longer than the model's window of 32 tokens."""


@pytest.fixture(scope="module")
def thinking_model(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3 with a window, whose template opens a thought and drops it from earlier turns."""
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny-thinking", gemma_config(vocab=VOCAB), bundled_model)
    # Two tokens that are there anyway get other names: the vocabulary stays as large as the model's.
    text = (folder / "tokenizer.json").read_text()
    settings = (folder / "tokenizer_config.json").read_text()
    for old, new in (("<repo_name>", "<think>"), ("<file_sep>", "</think>")):
        assert f'"{old}"' in text
        text, settings = text.replace(f'"{old}"', f'"{new}"'), settings.replace(f'"{old}"', f'"{new}"')
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps({**json.loads(settings), "chat_template": TEMPLATE}))
    return folder


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def ask(server: Server, turns: list[dict[str, Any]], max_tokens: int = 6) -> dict[str, Any]:
    body = {"messages": turns, "max_tokens": max_tokens, "temperature": 0.0}
    status, _, answer = server.request("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    return dict(json.loads(answer))


def n_common(folder: Path, one: list[dict[str, Any]], two: list[dict[str, Any]]) -> tuple[int, int]:
    """Tokens up to where two prompts part, and all of the first."""
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(folder)
    assert tokenizer.has_thinking
    a, b = (tokenizer.apply_chat_template(turns, add_generation_prompt=True) for turns in (one, two))
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a)


USER = turn("user", LONG)
TOOLS = [USER, turn("assistant", "", tool_calls=[CALL]), turn("tool", "It says hello.", tool_call_id="1")]
SYSTEMS = [turn("system", "You are a guide to rivers. " * 8), turn("system", "Today is a day in May. " * 8)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            [USER], [USER, turn("assistant", "<think>So.</think>Here."), turn("user", "Go on.")], id="thought"
        ),
        pytest.param(TOOLS, [*TOOLS, turn("assistant", "Hello."), turn("user", "Go on.")], id="tool's result"),
        pytest.param([USER], TOOLS, id="tool's call"),
        pytest.param([*SYSTEMS, USER], [*SYSTEMS, turn("user", "Lakes?")], id="several system messages"),
    ],
)
def test_the_next_prompt_is_served_up_to_where_the_template_parts(
    thinking_model: Path, serve: Serve, first: list[dict[str, Any]], second: list[dict[str, Any]], tmp_path: Path
) -> None:
    with serve(thinking_model) as server:
        usage = ask(server, first)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert server.terminate() == 0
    with serve(thinking_model) as server:
        again = ask(server, second)
    with serve(thinking_model, "--rewarm-off") as server:
        cold = ask(server, second)
    n, n_prompt = n_common(thinking_model, first, second)
    assert n_prompt == usage["prompt_tokens"], "the worker's prompt is the one that is looked at here"
    assert n > 32, "the model's window is full"
    assert again["rewarm"]["disk_tokens"] == again["usage"]["prompt_tokens_details"]["cached_tokens"] == n
    assert again["choices"][0]["message"] == cold["choices"][0]["message"]
    assert any(again["choices"][0]["message"].values())
