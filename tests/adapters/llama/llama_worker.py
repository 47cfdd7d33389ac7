"""Workers for the tests of llama.cpp's seam: in this process before a fake engine, or as a process of its own."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rewarm
from rewarm.adapters.llama import flags
from rewarm.adapters.llama.engine import Program
from rewarm.adapters.llama.face import Access
from rewarm.adapters.llama.proxy import Handler
from rewarm.adapters.llama.raw_folder import RawFolder
from rewarm.adapters.llama.runner import Runner
from rewarm.adapters.worker_process import listen
from rewarm.state.reason import Reason
from waiting import until

FAKE = Path(__file__).with_name("fake_llama_server.py")
START_S = 180.0


class Client:
    """Asks a worker at a port of this machine."""

    port = 0
    secret: str | None = None

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of any request; bears the secret unless told otherwise."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        if self.secret:
            headers.setdefault("Authorization", f"Bearer {self.secret}")
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, raw, headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def chat(
        self, *texts: str, system: str | None = None, max_tokens: int = 4, cache: str | None = None, **more: Any
    ) -> dict[str, Any]:
        """A completion at temperature 0: user and assistant by turns in `texts`."""
        body = {"messages": messages(*texts, system=system), "max_tokens": max_tokens, "temperature": 0, **more}
        status, _, answer = self.request(
            "POST", "/v1/chat/completions", body, **({"X-Rewarm-Cache": cache} if cache else {})
        )
        assert status == 200, answer
        found: dict[str, Any] = json.loads(answer)
        return found

    def stream(self, *texts: str, usage: bool = True, **more: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed completion."""
        body = {"messages": messages(*texts), "max_tokens": 4, "temperature": 0, "stream": True, **more}
        if usage:
            body["stream_options"] = {"include_usage": True}
        status, _, answer = self.request("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


def messages(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation: `system`, then user and assistant by turns."""
    head = [{"role": "system", "content": system}] if system else []
    return head + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def reply(answer: dict[str, Any]) -> str:
    """The text of a completion."""
    return str(answer["choices"][0]["message"]["content"] or "")


def said(chunks: list[dict[str, Any]]) -> str:
    """The text of a stream."""
    return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk.get("choices", ()))


def cached(answer: dict[str, Any]) -> int:
    """Tokens that were not evaluated; checks that all that tells of it agrees."""
    told = answer["rewarm"]
    n = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert told["cached_tokens"] == n == told["disk_tokens"] + told["memory_tokens"]
    assert told["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    return int(n)


def write_gguf(path: Path, content: bytes = b"weights") -> Path:
    """A file that begins as a GGUF file does, for the fake engine, which loads none."""
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16) + content)
    return path


class FakeWorker(Client):
    """The proxy in this process before a fake engine; `with FakeWorker(tmp_path) as worker:`.

    Args:
        folder: keeps model and cache, from one worker to the next.
        arguments: llama-server's flags.
        behaviour: what the fake does wrong.
        access: who may ask.
        memory: the raw folder's memory file system.
        flags: more names in the fake's help.
        version: that the fake tells.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        behaviour: Mapping[str, Any] | None = None,
        access: Access | None = None,
        memory: Path | None = None,
        flags: str = "",
        version: str = "version: 1 (fake)",
    ) -> None:
        self._version = version
        self._flags = flags
        self.model = folder / "model.gguf"
        if not self.model.exists():
            write_gguf(self.model)
        self._folder = folder
        self._arguments = ["--model", str(self.model), *arguments]
        self._behaviour = json.dumps(behaviour or {})
        self._access = access or Access()
        self._memory = memory

    def __enter__(self) -> FakeWorker:
        from fake_llama_server import FLAGS

        self.cache = rewarm.open(self._folder / "kv", limits=rewarm.Limits(min_free_bytes=0), block_tokens=16)
        where = [self._folder / "raw", *([self._memory] if self._memory else [])]
        self.raw = RawFolder(*where)
        os.environ["FAKE_BEHAVIOUR"] = self._behaviour
        program = Program(
            (sys.executable, str(FAKE)), self._version, frozenset(f"{FLAGS} {self._flags}".split()), False
        )
        given = flags.parse(self._arguments)
        self.runner = Runner(program, given, self.cache, (Reason.HIT, ""), self.raw)
        self._server = listen("127.0.0.1", 0, lambda *a: Handler(self.runner, self._access, *a))
        self.port = self._server.server_address[1]
        self.secret = self._access.secret
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.runner.ensure()
        # What was looked at at the start is of no interest.
        self.runner.engine.ask("POST", "/fake/begin", {})
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.runner.close(time.monotonic() + 20)
        self.cache.close()
        self.runner.end()
        os.environ.pop("FAKE_BEHAVIOUR", None)

    def wait_for_pause(self) -> None:
        """Wait until the slots of all requests were given back: a client has its answer a moment before."""
        assert self.runner.ensure().pool.wait_for_pause(20)

    def settle(self, *, at_hand_over: bool = False) -> None:
        """Wait until what was served is stored; or only what was handed over."""
        tier = self.runner.ensure()
        until(lambda: not (tier.pool.n_held or (tier.pool.dirty() and not at_hand_over) or not tier.is_settled))
        assert self.cache.flush(20)

    def actions(self) -> list[str]:
        """Slot actions and completions that the engine has seen, in order."""
        log = self.runner.engine.ask("GET", "/fake/log")
        return [path.partition("action=")[2] or path for path, _ in log]

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """What the engine was sent at `path`."""
        return [body for at, body in self.runner.engine.ask("GET", "/fake/log") if at == path]


class Process(Client):
    """`rewarm llama-server` as a process of its own; `with Process(model, log, ...) as server:`."""

    def __init__(self, model: Path, log: Path, *arguments: str, secret: str | None = None, **more: Any) -> None:
        self.log = log
        self.secret = secret
        self._command = [sys.executable, "-m", "rewarm.adapters.llama.server", "--model", str(model), *arguments]
        self._more = more

    def __enter__(self) -> Process:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("REWARM_")}
        if self.secret:
            environment["REWARM_WORKER_SECRET"] = self.secret
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._command, "--port", str(self.port)], stdout=log, stderr=log, env=environment, **self._more
            )
        deadline = time.monotonic() + START_S
        while self._health() != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise AssertionError(f"the worker did not start:\n{self.text()}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdin:
            self.process.stdin.close()

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        return int(self.process.wait(30))

    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

    def _health(self) -> int:
        try:
            return self.request("GET", "/health")[0]
        except OSError:
            return 0
