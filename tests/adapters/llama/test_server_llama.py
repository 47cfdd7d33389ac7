"""The worker's face and its process: keys, routes that pass through, signals, and what it leaves behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from llama_worker import FAKE, FakeWorker, Process, cached, reply, write_gguf

from rewarm.adapters.llama.proxy import Access
from waiting import until

SYSTEM = "You are the guide of a museum, and answer in one sentence. " * 3


@pytest.fixture
def binary(tmp_path: Path) -> Path:
    """A program that is a llama-server of the user's own, as far as anybody can tell."""
    path = tmp_path / "llama-server"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    path.chmod(0o755)
    return path


def arguments(tmp_path: Path, binary: Path) -> list[str]:
    return ["--llama-server", str(binary), "--rewarm-dir", str(tmp_path / "kv"), "--rewarm-min-free", "1MB"]


def test_other_routes_pass_untouched(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        assert json.loads(worker.request("GET", "/v1/models")[2])["data"][0]["id"] == "fake"
        assert json.loads(worker.request("POST", "/rerank", {"query": "x"})[2]) == {"echo": {"query": "x"}}
        status, _, raw = worker.request("POST", "/v1/embeddings", {"input": "x"})
        assert (status, json.loads(raw)["error"]["type"]) == (501, "not_supported_error")
        assert worker.request("GET", "/no/such")[0] == 404
        assert worker.request("POST", "/v1/chat/completions", b"{")[0] != 200
        assert json.loads(worker.request("POST", "/tokenize", {"content": "ab"})[2]) == {"tokens": [97, 98]}


def test_a_body_in_chunks_is_read(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=60)
        pieces = [b'{"messages": [{"role": "user", ', b'"content": "Hello."}]}']
        connection.request("POST", "/v1/chat/completions", iter(pieces), encode_chunked=True)
        assert "rewarm" in json.loads(connection.getresponse().read())
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200
        connection.close()


def test_a_body_without_a_length_is_refused(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        assert worker.request("POST", "/completion", b"", **{"Content-Length": "many"})[0] == 400


def test_b069_slot_actions_of_clients_are_refused(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        for action in ("save", "restore", "erase"):
            status, _, raw = worker.request("POST", f"/slots/0?action={action}", {"filename": "x"})
            assert (status, json.loads(raw)["error"]["code"]) == (501, 501)


def test_the_gateways_secret_is_asked_for_everywhere(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, access=Access(secret="s3cret")) as worker:
        assert cached(worker.chat("Hello.")) == 0
        assert (
            "Access-Control-Allow-Origin"
            not in worker.request("POST", "/v1/chat/completions", {"messages": [], "stream": True})[1]
        )
        for path in ("/health", "/v1/models", "/props"):
            assert worker.request("GET", path)[0] == 200
            status, _, raw = worker.request("GET", path, Authorization="Bearer wrong")
            assert (status, json.loads(raw)["error"]["type"]) == (401, "authentication_error")
        assert worker.request("POST", "/completion", {"prompt": "x"}, Authorization="")[0] == 401


def test_the_users_api_keys_are_asked_for(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, access=Access(keys=frozenset({"one", "two"}))) as worker:
        assert worker.request("GET", "/v1/models")[0] == 200
        assert worker.request("GET", "/props")[0] == 401
        assert worker.request("GET", "/props", Authorization="Bearer two")[0] == 200
        assert worker.request("GET", "/props", **{"X-Api-Key": "one"})[0] == 200


def test_sigterm_saves_and_ends_everything(tmp_path: Path, binary: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf")
    with Process(model, tmp_path / "log", *arguments(tmp_path, binary)) as server:
        cold = server.chat("Hello.", system=SYSTEM)
        pid = json.loads(server.request("GET", "/fake/pid")[2])
        assert server.terminate() == 0
    assert not _runs(pid)
    with Process(model, tmp_path / "log", *arguments(tmp_path, binary), secret="s3cret") as server:
        again = server.chat("Hello.", reply(cold), "More.", system=SYSTEM)
        assert again["rewarm"]["disk_tokens"] == cached(again) >= cold["usage"]["prompt_tokens"]
        assert server.request("GET", "/health", Authorization="")[0] == 401


@pytest.mark.parametrize(("timeout_s", "is_kept"), [("20", True), ("0.5", False)])
def test_how_long_the_end_may_take_is_for_the_user_to_say(
    tmp_path: Path, binary: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: str, is_kept: bool
) -> None:
    model = write_gguf(tmp_path / "model.gguf")
    monkeypatch.setenv("FAKE_BEHAVIOUR", json.dumps({"saves_slowly": 3}))
    words = [*arguments(tmp_path, binary), "--rewarm-stop-timeout", timeout_s]
    with Process(model, tmp_path / "log", *words) as server:
        cold = server.chat("Hello.", system=SYSTEM)
        assert server.terminate() == 0
    monkeypatch.delenv("FAKE_BEHAVIOUR")
    with Process(model, tmp_path / "log", *words) as server:
        again = server.chat("Hello.", reply(cold), "More.", system=SYSTEM)
        assert (cached(again) > 0) is is_kept


def test_what_was_said_a_moment_before_the_end_is_kept(tmp_path: Path) -> None:
    for i in range(4):
        with FakeWorker(tmp_path) as worker:
            worker.chat(f"Conversation {i}.", system=SYSTEM)
    with FakeWorker(tmp_path) as worker:
        assert sum(entry.boundary == "assistant" for entry in worker.cache.entries()) == 4


def test_a_save_in_progress_at_the_end_is_kept(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, behaviour={"saves_slowly": True}) as worker:
        worker.chat("Hello.", system=SYSTEM)
        until(lambda: any(slot.saving for slot in worker.runner.ensure().pool.all()))
    with FakeWorker(tmp_path) as worker:
        assert "assistant" in [entry.boundary for entry in worker.cache.entries()]


def test_no_engine_outlives_a_killed_worker(tmp_path: Path, binary: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf")
    with Process(model, tmp_path / "log", *arguments(tmp_path, binary)) as server:
        pid = json.loads(server.request("GET", "/fake/pid")[2])
        server.process.kill()
        until(lambda: not _runs(pid))


def test_a_worker_of_a_gateway_ends_when_its_input_does(tmp_path: Path, binary: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf")
    more = {"stdin": subprocess.PIPE}
    with Process(model, tmp_path / "log", *arguments(tmp_path, binary), secret="s", **more) as server:
        server.process.stdin.close()
        assert server.process.wait(30) == 0


def test_an_engine_that_does_not_start_is_told(tmp_path: Path, binary: Path) -> None:
    binary.write_text('#!/bin/sh\ncase "$1" in --*n) echo "version: 1";; *) echo no such model >&2; exit 3;; esac\n')
    command = [sys.executable, "-m", "rewarm.adapters.llama.server", "--port", "0", "--model", "none.gguf"]
    done = subprocess.run([*command, *arguments(tmp_path, binary)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert "The engine ended while it was starting" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "x"], "--port needs a whole number"),
        (["stray"], "is no flag"),
        (["--ssl-key-file", "k"], "TLS"),
        (["--llama-server", "/no/such/binary"], "cannot be run"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_wrong_flags_are_told_in_words(tmp_path: Path, binary: Path, words: list[str], said: str) -> None:
    command = [sys.executable, "-m", "rewarm.adapters.llama.server", *arguments(tmp_path, binary), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (2, 4)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_sigint_ends_it_too(tmp_path: Path, binary: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf")
    with Process(model, tmp_path / "log", *arguments(tmp_path, binary)) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
