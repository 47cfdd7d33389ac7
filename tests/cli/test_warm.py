"""`rewarm warm`: what it asks for, what it pins, and what it says when nothing was kept. No process is started."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import rewarm
from rewarm.cli import extras, warm
from rewarm.cli.app import app
from rewarm.cli.asking import Reply
from rewarm.errors import EngineError, RootError
from rewarm.testing.fake_engine import FakeEngine, pair

TOKENS = list(range(100, 122))


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any]]:
    """The requests that were sent; each leaves an entry under its label, as a worker's seam does."""
    calls: list[tuple[str, Any, Any]] = []

    def ask(path: str, body: Any, headers: Any, progress: Callable[[int, int], None]) -> Reply:
        calls.append((path, body, headers))
        progress(11, 22)
        engine = FakeEngine(1, (pair(),))
        with rewarm.open(tmp_path / "kv", block_tokens=4) as cache:
            space = cache.namespace(rewarm.Identity({"weights": "a"}, name="m"))
            space.save(TOKENS, engine.state(TOKENS), label=headers["X-Rewarm-Conversation"])
            assert cache.flush(30)
        return Reply("", 0.5, 22, 4)

    @contextlib.contextmanager
    def asking(*_: Any) -> Iterator[Any]:
        yield ask

    monkeypatch.setattr(warm, "_asking", asking)
    monkeypatch.setattr(extras, "gateway_address", lambda: None)
    return calls


def run(tmp_path: Path, *arguments: str) -> Result:
    line = ["warm", str(tmp_path / "a b.txt"), "--model", "m", "--dir", str(tmp_path / "kv"), *arguments]
    return CliRunner().invoke(app, line)


def test_a_system_prompt_is_kept_and_pinned(asked: list[tuple[str, Any, Any]], tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_text("You are kind.")
    done = run(tmp_path, "--pin", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    ((path, body, headers),) = asked
    assert path == "/v1/chat/completions"
    assert body["messages"][0] == {"role": "system", "content": "You are kind."}
    assert said["label"].startswith("warm:a-b:")
    assert said["label"] == headers["X-Rewarm-Conversation"]
    assert (said["prompt_tokens"], said["cached_tokens"], said["pinned"], said["by"]) == (22, 4, True, "worker")
    with rewarm.open(tmp_path / "kv") as cache:
        (entry,) = cache.entries()
    assert (entry.id, entry.pinned) == (said["entry"], True)


@pytest.mark.parametrize(("role", "key"), [("user", "messages"), ("text", "prompt")])
def test_a_file_can_be_a_message_or_bare(
    asked: list[tuple[str, Any, Any]], tmp_path: Path, role: str, key: str
) -> None:
    (tmp_path / "a b.txt").write_text("x")
    assert run(tmp_path, "--as", role, "--label", "mine").exit_code == 0
    ((_, body, headers),) = asked
    assert headers == {"X-Rewarm-Conversation": "mine"}
    assert body[key] in ("x", [{"role": "user", "content": "x"}])


@pytest.mark.parametrize("content", [b"", b" \n", bytes(range(256))], ids=["empty", "blank", "binary"])
def test_what_is_no_text_is_not_sent(asked: list[tuple[str, Any, Any]], tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a b.txt").write_bytes(content)
    assert run(tmp_path).exit_code == 2
    assert run(tmp_path / "gone").exit_code == 2
    assert asked == []


def test_a_label_that_no_header_can_bear_is_refused(asked: list[tuple[str, Any, Any]], tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_text("x")
    assert run(tmp_path, "--label", "my talk").exit_code == 2
    assert asked == []


def test_nothing_kept_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "SAVE_DEADLINE_S", 0.0)
    with pytest.raises(RootError, match="nothing was kept"):
        warm._saved(tmp_path / "kv", "x", pin=False)


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(EngineError, match="'no-such'"):
        extras.worker_command("no-such", lambda _part, _what: None)
    assert extras.worker_command("/", lambda _part, _what: None) == ["mlx-lm", "--model", "/"]
