"""Workers: started once, watched, ended; and nothing of them is left, however the gateway ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway_server import FAKE_WORKER, Running, is_alive, model_folder

from rewarm.gateway import worker as worker_module
from rewarm.gateway.settings import Settings
from waiting import until

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")


def test_the_first_request_loads_the_model_and_the_next_uses_it(running: Running) -> None:
    running.chat("x")
    pid = running.state()["pid"]
    running.chat("y")
    told = running.state()
    assert told["memory_bytes"] > 1_000_000
    assert told["options"] == {
        "context_length": None,
        "kv_type": None,
        "adapter": None,
        "adapter_scale": 1.0,
        "draft_model": None,
        "flags": [],
        "caching": True,
    }
    assert {name: told[name] for name in told if name not in ("memory_bytes", "options")} == {
        "name": "alpha",
        "bundled": False,
        "source": "given",
        "format": "safetensors",
        "engine": "mlx-lm",
        "path": str(running.settings.models[0]),
        "nbytes": 0,
        "why_not": "",
        "state": "ready",
        "message": "",
        "progress": None,
        "pid": pid,
        "n_asked": 0,
        "reload_needed": False,
        "log": [],
    }


def test_ten_first_requests_start_one_worker(running: Running) -> None:
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(running.chat("x").status_code)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 10
    assert len(list(running.settings.cache_dir.glob("ended-*"))) == 0
    running.client.post("/api/models/alpha/unload")
    assert len(list(running.settings.cache_dir.glob("ended-*"))) == 1


@needs_proc
def test_unloading_ends_the_process_in_order_and_the_next_request_restores(running: Running) -> None:
    running.chat("one two three")
    pid = running.state()["pid"]
    answer = running.client.post("/api/models/alpha/unload")
    assert (answer.status_code, answer.json()["state"], answer.json()["pid"]) == (200, "stopped", None)
    assert not is_alive(pid)
    assert (running.settings.cache_dir / f"ended-{pid}").exists()
    report = running.chat("one two three four").json()["rewarm"]
    assert (report["disk_tokens"], report["memory_tokens"]) == (3, 0)


def test_unloading_what_is_not_loaded_is_no_error(running: Running) -> None:
    assert running.client.post("/api/models/beta/unload").json()["state"] == "stopped"
    assert running.client.post("/api/models/gamma/unload").status_code == 404


def test_loading_on_request(running: Running) -> None:
    assert running.client.post("/api/models/beta/load").json()["state"] == "ready"
    assert running.client.post("/api/models/gamma/load").status_code == 404


def test_unloading_in_a_reply_ends_it_with_words(running: Running) -> None:
    body = {"model": "alpha", "messages": [{"role": "user", "content": "SLOW"}], "stream": True}
    with running.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        unloaded = running.client.post("/api/models/alpha/unload")
        rest = [line for line in lines if line]
    assert unloaded.json()["state"] == "stopped"
    error = json.loads(rest[-1][6:])["error"]
    assert error["code"] == "worker_failed"
    assert "The model was stopped." in error["message"]


@needs_proc
def test_a_worker_that_does_not_end_is_killed(settings: Settings, tmp_path: Path) -> None:
    stubborn = model_folder(tmp_path / "stubborn", end="ignore")
    running = Running(settings.model_copy(update={"models": [stubborn], "stop_timeout_s": 0.3}))
    try:
        running.chat("x", "stubborn")
        pid = running.state("stubborn")["pid"]
        assert running.client.post("/api/models/stubborn/unload").json()["state"] == "stopped"
        assert not is_alive(pid)
    finally:
        running.close()


# Starts that fail.


@pytest.fixture
def failing(settings: Settings, tmp_path: Path) -> Iterator[Running]:
    """A gateway whose models cannot be loaded, each for its own reason."""
    folder = tmp_path / "failing"
    paths = [model_folder(folder / "broken", start="fail"), model_folder(folder / "slow", start="hang")]
    paths += [folder / "missing", folder / "empty"]
    (folder / "empty").mkdir()
    running = Running(settings.model_copy(update={"models": paths, "start_timeout_s": 1.0}))
    yield running
    running.close()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("broken", "ended before it could answer (exit status 1)"),
        ("broken", "the weights do not fit"),
        ("slow", "could not answer within 1 s"),
        ("missing", "there is no such folder"),
        ("empty", "it has no config.json"),
    ],
)
def test_a_start_that_fails_is_a_503_that_says_why(failing: Running, model: str, why: str) -> None:
    answer = failing.chat("x", model)
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "model_not_started")
    assert why in error["message"]
    state = failing.state(model)
    assert (state["state"], state["pid"]) == ("failed", None)
    assert why in state["message"]


def test_a_start_that_failed_is_tried_again(failing: Running, tmp_path: Path) -> None:
    assert failing.chat("x", "broken").status_code == 503
    (tmp_path / "failing" / "broken" / "behave.json").write_text("{}")
    assert failing.chat("x", "broken").status_code == 200


def test_a_program_that_is_not_there_is_told(settings: Settings) -> None:
    running = Running(settings.model_copy(update={"worker_command": ("/nowhere/worker",)}))
    try:
        answer = running.chat("x")
        assert answer.status_code == 503
        assert "No such file" in answer.json()["error"]["message"]
    finally:
        running.close()


def test_a_worker_that_ends_as_it_becomes_ready_is_not_taken_for_ready(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = running.gateway.workers.get("alpha")
    until_healthy = worker._until_healthy

    async def ends_then(live: worker_module.Running) -> None:
        await until_healthy(live)
        live.process.kill()
        # Its watcher has seen the end, too early to tell of it: the model is still being loaded.
        assert live.watcher
        await live.watcher

    with monkeypatch.context() as patched:
        patched.setattr(worker, "_until_healthy", ends_then)
        answer = running.chat("x")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_started")
    assert "signal 9" in answer.json()["error"]["message"]
    assert (running.state()["state"], running.state()["pid"]) == ("failed", None)
    assert running.chat("one two").status_code == 200


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_a_worker_that_leaves_its_output_to_a_child_still_fails_to_start(settings: Settings) -> None:
    command = ("/bin/sh", "-c", "sleep 600 & echo $!; exit 3")
    running = Running(settings.model_copy(update={"worker_command": command}))
    try:
        answer = running.chat("x")
        assert answer.status_code == 503
        assert "exit status 3" in answer.json()["error"]["message"]
    finally:
        _kill_child_named_in(running)
        running.close()


@needs_proc
def test_a_worker_that_ends_while_a_child_holds_its_output_is_seen_and_started_again(
    settings: Settings, tmp_path: Path
) -> None:
    command = ("/bin/sh", "-c", 'sleep 600 & echo $!; exec "$0" "$@"', *FAKE_WORKER)
    running = Running(settings.model_copy(update={"worker_command": command}))
    try:
        running.chat("x")
        os.kill(running.state()["pid"], signal.SIGKILL)
        until(lambda: running.state()["state"] == "failed")
        _kill_child_named_in(running)
        assert running.chat("one two").status_code == 200
        assert running.client.post("/api/models/alpha/unload").json()["state"] == "stopped"
    finally:
        _kill_child_named_in(running)
        running.close()


def _kill_child_named_in(running: Running) -> None:
    """End the child whose number is the first line of the worker's log."""
    log = running.gateway.workers.get("alpha").log_tail
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(log[0]), signal.SIGKILL)


def test_stopping_a_model_that_is_being_loaded(settings: Settings, tmp_path: Path) -> None:
    slow = model_folder(tmp_path / "slow", start="hang")
    running = Running(settings.model_copy(update={"models": [slow]}))
    try:
        answers: list[int] = []
        waiting = threading.Thread(target=lambda: answers.append(running.chat("x", "slow").status_code))
        waiting.start()
        until(lambda: running.state("slow")["pid"])
        pid = running.state("slow")["pid"]
        assert running.client.post("/api/models/slow/unload").json()["state"] == "stopped"
        waiting.join()
        assert answers == [503]
        until(lambda: not is_alive(pid))
    finally:
        running.close()


# The end of the gateway.

SERVE = """
import sys, uvicorn
from rewarm.gateway.app import Gateway, create_app
from rewarm.gateway.settings import Settings
app = create_app(Gateway(Settings(bundled=False, worker_command=sys.argv[2:])))
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", timeout_graceful_shutdown=1)
"""


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_gateway(settings: Settings, tmp_path: Path, number: signal.Signals) -> None:
    """In order when the gateway is told to end; by the end of its input when it is killed."""
    running = Running(settings)  # for its free port
    port = running.port
    running.close()
    environment = {
        **os.environ,
        "REWARM_DIR": str(settings.cache_dir),
        "REWARM_MODELS": os.pathsep.join(str(path) for path in settings.models),
        "REWARM_DATA_DIR": str(tmp_path / "data"),
    }
    with subprocess.Popen([sys.executable, "-c", SERVE, str(port), *FAKE_WORKER], env=environment) as gateway:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client:
                until(lambda: _answers(client))
                client.post("/api/models/alpha/load")
                pid = client.post("/api/models/beta/load").json()["pid"]
            assert is_alive(pid)
            gateway.send_signal(number)
            gateway.wait(20)
        finally:
            gateway.kill()
    until(lambda: not is_alive(pid))
    until(lambda: len(list(settings.cache_dir.glob("ended-*"))) == 2)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/v1/models").status_code == 200
    except httpx.TransportError:
        time.sleep(0.05)
        return False
