"""A worker process for tests: started, asked over HTTP, ended."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_S = 120.0


@dataclass
class Server:
    """One `rewarm mlx-lm` process.

    Attributes:
        model: the model's folder.
        flags: more of its command line.
        secret: what its environment demands of every request.
        log: what it has printed, once it is ended or while it runs.
    """

    model: Path
    flags: tuple[str, ...]
    log: Path
    secret: str | None = None
    port: int = 0
    process: Any = field(default=None, repr=False)

    def __enter__(self) -> Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "rewarm.adapters.mlx.server", "--model", str(self.model)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("REWARM_")} | {"HF_HUB_OFFLINE": "1"}
        if self.secret:
            environment["REWARM_WORKER_SECRET"] = self.secret
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *self.flags], stdout=log, stderr=log, env=environment
            )
        deadline = time.monotonic() + START_S
        while self._health() != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the worker did not start:\n{self.text()}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        return int(self.process.wait(30))

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace")

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

    def chat(self, *texts: str, system: str | None = None, max_tokens: int = 4, **more: Any) -> dict[str, Any]:
        """A completion at temperature 0: user and assistant by turns in `texts`."""
        body = {"messages": messages(*texts, system=system), "max_tokens": max_tokens, "temperature": 0.0, **more}
        status, _, answer = self.request("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        return json.loads(answer)

    def stream(self, *texts: str, max_tokens: int = 4) -> list[dict[str, Any]]:
        """The chunks of a streamed completion, with usage."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"messages": messages(*texts), "max_tokens": max_tokens, "temperature": 0.0, **options}
        status, _, answer = self.request("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def _health(self) -> int:
        try:
            return self.request("GET", "/health")[0]
        except OSError:
            return 0


def messages(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation: `system`, then user and assistant by turns."""
    head = [{"role": "system", "content": system}] if system else []
    return head + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def reply(answer: dict[str, Any]) -> str:
    """The text of a completion."""
    return str(answer["choices"][0]["message"]["content"] or "")
