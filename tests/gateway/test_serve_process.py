"""`rewarm serve` as a process: what it says, what it refuses, how it ends, and that the page is there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from gateway_server import FAKE_WORKER, is_alive, model_folder

from waiting import until

Serve = Callable[..., "Served"]


class Served:
    """A `rewarm serve` that runs."""

    def __init__(self, home: Path, *options: str, **environment: str) -> None:
        env = {
            **os.environ,
            "REWARM_DIR": str(home / "kv"),
            "REWARM_DATA_DIR": str(home / "data"),
            "REWARM_BUNDLED": "false",
            "REWARM_WORKER_COMMAND": str(list(FAKE_WORKER)).replace("'", '"'),
            **environment,
        }
        self._stderr = (home / "stderr.txt").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rewarm", "serve", "--port", "0", *options],
            env=env,
            cwd=home,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        assert self.process.stdout
        self.said: list[str] = []
        for line in self.process.stdout:
            self.said.append(line.rstrip())
            if line.startswith("Ctrl-C"):
                break
        address = re.fullmatch(r"rewarm: (http://\S+)", self.said[0]) if self.said else None
        self.url = address[1] if address else ""
        self.client = httpx.Client(base_url=self.url, timeout=20, trust_env=False)

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()
        self._stderr.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts `rewarm serve`."""
    started: list[Served] = []

    def start(*options: str, **environment: str) -> Served:
        started.append(Served(tmp_path, *options, **environment))
        return started[-1]

    yield start
    for served in started:
        served.close()


def test_it_says_where_things_are_and_serves_the_page(serve: Serve, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "my model")
    served = serve("--model", str(model), "--max-bytes", "2GiB", "--max-files", "1000")
    assert served.said[1:] == [
        f"  API     {served.url}/v1",
        "  models  my model",
        f"  cache   {tmp_path / 'kv'}, up to 2.0 GiB and 1,000 files",
        "Ctrl-C ends it.",
    ]
    page = served.client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    hosts = set(re.findall(r"https?://([^/'\"\\ )]+)", page.text)) - {"www.w3.org"}
    assert hosts <= {served.url.removeprefix("http://")}
    assert served.client.get("/v1/models").json()["data"][0]["id"] == "my model"
    limits = served.client.get("/api/stats").json()["limits"]
    assert (limits["max_bytes"], limits["max_files"]) == (2 * 2**30, 1000)
    # Nothing is left in the folder that it was started in.
    assert {path.name for path in tmp_path.iterdir()} <= {"kv", "data", "my model", "stderr.txt"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_order_with_its_workers(serve: Serve, tmp_path: Path, number: signal.Signals) -> None:
    served = serve("--model", str(model_folder(tmp_path / "alpha")))
    pid = served.client.post("/api/models/alpha/load").json()["pid"]
    served.process.send_signal(number)
    assert served.process.wait(20) == 0
    assert not is_alive(pid)
    assert (tmp_path / "kv" / f"ended-{pid}").exists()
    assert "Traceback" not in (tmp_path / "stderr.txt").read_text()


def test_it_ends_while_a_stream_is_read(serve: Serve, tmp_path: Path) -> None:
    served = serve("--model", str(model_folder(tmp_path / "alpha")))
    body = {"model": "alpha", "messages": [{"role": "user", "content": "SLOW"}], "stream": True}
    with served.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
    assert "Traceback" not in (tmp_path / "stderr.txt").read_text()


def test_a_client_that_leaves_a_stream_ends_the_request_with_the_page_in_place_too(
    serve: Serve, tmp_path: Path
) -> None:
    """The page's framework brings middleware of its own, which must neither hold streams back nor hide an end."""
    served = serve("--model", str(model_folder(tmp_path / "alpha")))
    body = {"model": "alpha", "messages": [{"role": "user", "content": "SLOW"}], "stream": True}
    with served.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert next(answer.iter_lines()).startswith(": keepalive")
        assert not (tmp_path / "kv" / "left").exists()
    until((tmp_path / "kv" / "left").exists)
    assert served.client.get("/api/models").json()["models"][0]["state"] == "ready"


def run(tmp_path: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`rewarm serve` that is expected to end by itself."""
    env = {**os.environ, "REWARM_DIR": str(tmp_path / "kv"), "REWARM_DATA_DIR": str(tmp_path / "data"), **environment}
    command = [sys.executable, "-m", "rewarm", "serve", *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "example.org", "::"])
def test_other_addresses_than_loopback_are_refused(tmp_path: Path, host: str) -> None:
    done = run(tmp_path, "--host", host)
    assert done.returncode == 5
    assert "not an address of this machine alone" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_setting_in_the_environment_that_makes_no_sense_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, REWARM_PORT="many", REWARM_MAX_BYTES="heaps")
    assert done.returncode == 5
    assert "port (REWARM_PORT in the environment):" in done.stderr and "'heaps' is no size" in done.stderr


def test_a_port_that_is_taken_is_told(serve: Serve, tmp_path: Path) -> None:
    served = serve("--model", str(model_folder(tmp_path / "alpha")))
    done = run(tmp_path, "--port", served.url.rpartition(":")[2])
    assert done.returncode == 5
    assert "cannot be opened: Address already in use" in done.stderr
    assert served.client.get("/v1/models").status_code == 200


def test_a_cache_folder_that_cannot_be_used_stops_nothing(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    served = serve("--model", str(model_folder(tmp_path / "alpha")), "--dir", str(tmp_path / "file"))
    assert served.said[3].startswith("  cache   none: ")
    report = served.client.get("/api/stats").json()
    assert not report["usable"] and report["problem"]
    assert served.client.get("/v1/models").status_code == 200


def test_ipv6(serve: Serve, tmp_path: Path) -> None:
    served = serve("--model", str(model_folder(tmp_path / "alpha")), "--host", "::1")
    if not served.url:
        pytest.skip("this machine has no IPv6 loopback address")
    assert served.url.startswith("http://[::1]:")
    assert served.client.get("/v1/models").status_code == 200


def test_a_folder_that_changed_its_mind_is_seen(serve: Serve, tmp_path: Path) -> None:
    """A model is looked at when it is loaded, not when the gateway starts."""
    served = serve("--model", str(tmp_path / "later"))
    assert served.client.post("/api/models/later/load").status_code == 503
    model_folder(tmp_path / "later")
    assert served.client.post("/api/models/later/load").status_code == 200
    until(lambda: served.client.get("/api/models").json()["models"][0]["state"] == "ready")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_first_moment_is_heeded(serve: Serve, number: signal.Signals) -> None:
    """It has said its address, and does not serve it yet."""
    served = serve()
    served.process.send_signal(number)
    assert served.process.wait(20) == 0
