"""The demo's story and its worker, against a worker without a model: what is measured, and every way to fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rewarm.cli import story, worker
from rewarm.cli.worker import Worker
from rewarm.errors import EngineError

STAND_IN = Path(__file__).with_name("stand_in.py")
FIRST_TEXT_DELAY_S = 0.05
ASK = [{"role": "user", "content": "hello there"}]

DRIVER = """
import sys
from rewarm.cli import demo
from rewarm.cli.main import main
fault, script = sys.argv.pop(1), sys.argv.pop(1)
start = lambda folder: [sys.executable, script, fault, str(folder or "off")]
for engine in demo.ENGINES:
    demo.ENGINES[engine] = (lambda console, model: start, demo.story.SYSTEM)
main()
"""
"""`rewarm demo` with the stand-in as its engine."""


def command(fault: str, folder: Path | str = "off") -> list[str]:
    return [sys.executable, str(STAND_IN), fault, str(folder)]


def starter(fault: str) -> Callable[[Path | None], Sequence[str]]:
    return lambda folder: command(fault, folder or "off")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written")


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which every stand-in notes its process id."""
    path = tmp_path / "pids"
    monkeypatch.setenv("STAND_IN_PIDS", str(path))
    return path


def test_the_four_runs_have_the_stores_that_they_should(pids: Path, tmp_path: Path) -> None:
    told = story.tell(starter("none"), lambda _: None)
    n_first = len(f"{story.SYSTEM} {story.FIRST}".split())
    n_second = len(f"{story.SYSTEM} {story.FIRST} reply2 {story.SECOND}".split())
    assert (told.cold.cached_tokens, told.cold.prompt_tokens) == (0, n_first)
    assert (told.restored.cached_tokens, told.restored.prompt_tokens) == (n_first, n_second)
    assert (told.uninterrupted.cached_tokens, told.uninterrupted.prompt_tokens) == (n_first, n_second)
    assert (told.reference.cached_tokens, told.reference.prompt_tokens) == (0, n_second)
    assert [told.cold.text, told.restored.text, told.reference.text] == ["reply2", "reply4", "reply4"]
    assert told.identical
    assert told.speedup == told.reference.ttft_s / told.restored.ttft_s
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 4
    assert not any(is_running(pid) for pid in started)


def test_temporary_stores_are_removed_at_the_end_and_on_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    story.tell(starter("none"), lambda _: None)
    with pytest.raises(EngineError):
        story.tell(starter("die"), lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_another_text_after_the_restart_is_told_and_is_a_failure() -> None:
    told = story.tell(starter("drift"), lambda _: None)
    assert (told.restored.text, told.uninterrupted.text) == ("reply4differs", "reply4")
    assert not told.identical
    done = run_demo("drift", "--json")
    assert json.loads(done.stdout)["identical"] is False
    assert done.returncode == EngineError.exit_code


def test_the_clock_runs_to_the_first_piece_of_text_not_to_the_role(tmp_path: Path) -> None:
    with Worker(command("none"), tmp_path / "log") as running:
        assert running.chat(ASK, 24).ttft_s >= FIRST_TEXT_DELAY_S


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("refuse", ["answered 503", "the model is on holiday"]),
        ("die", ["exit status was 9", "out of memory, says the stand-in"]),
        ("error", ["prefill failed"]),
        ("silent", ["no text"]),
        ("no-usage", ["no usage"]),
    ],
)
def test_a_failing_reply_is_told_with_its_cause(fault: str, words: list[str], tmp_path: Path) -> None:
    with Worker(command(fault), tmp_path / "log") as running, pytest.raises(EngineError) as caught:
        running.chat(ASK, 24)
    for word in words:
        assert word in str(caught.value)


def test_a_worker_that_ends_early_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as caught, Worker(command("early"), tmp_path / "log"):
        raise AssertionError("it cannot have started")
    assert "ended before it could answer" in str(caught.value)
    assert "exit status was 5" in str(caught.value)
    assert "no such model, says the stand-in" in str(caught.value)


def test_a_worker_that_never_answers_is_given_up_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "START_TIMEOUT_S", 0.5)
    sleeper = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"]
    with pytest.raises(EngineError, match="could not answer within"), Worker(sleeper, tmp_path / "log"):
        raise AssertionError("it cannot have started")
    assert not is_running(int((tmp_path / "log").read_text()))


def test_a_worker_that_ignores_sigterm_is_killed(pids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "STOP_TIMEOUT_S", 0.2)
    with Worker(command("stubborn"), tmp_path / "log"):
        pid = int(pids.read_text())
        assert is_running(pid)
    assert not is_running(pid)


def run_demo(fault: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", DRIVER, fault, str(STAND_IN), "demo", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def test_json_is_one_object_alone_on_standard_output() -> None:
    done = run_demo("none", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told) == {"cold", "restored", "uninterrupted", "reference", "speedup", "identical"}
    for run in ("cold", "restored", "uninterrupted", "reference"):
        assert set(told[run]) == {"ttft_s", "prompt_tokens", "cached_tokens", "text"}
    assert told["identical"] is True
    assert "reference" in done.stderr


def test_the_table_names_every_run_and_what_was_gained() -> None:
    done = run_demo("none")
    assert done.returncode == 0, done.stderr
    for word in ("cold", "restored", "uninterrupted", "reference", "times sooner", "reply"):
        assert word in done.stdout


def test_a_failing_worker_gives_a_message_and_no_traceback() -> None:
    done = run_demo("early", "--json")
    assert done.returncode == EngineError.exit_code
    assert done.stdout == ""
    assert "no such model, says the stand-in" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals as on POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_no_worker_outlives_an_interrupted_demo(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_PID", str(tmp_path / "pid"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    line = [sys.executable, "-c", DRIVER, "hang", str(STAND_IN), "demo", "--json"]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as demo:
        pid = int(wait_for(tmp_path / "pid"))
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode not in (0, -number)
    assert not is_running(pid)
    assert not list(tmp_path.glob("rewarm-demo-*"))
    assert "Traceback" not in errors
