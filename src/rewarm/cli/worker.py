"""One engine process and a conversation with it over HTTP, for `rewarm demo` and `rewarm warm`.

Knows how a worker is started, asked and ended, and nothing of caches or models. The gateway has its own,
which lives longer; this one needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rewarm.cli.asking import NoReply, Progress, Reply, Server
from rewarm.errors import EngineError

Message = Mapping[str, str]

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
LOG_LINES = 12


class Worker:
    """A worker process, from `with` to the end of its block; it never outlives the block.

    Args:
        command: starts the process; `--host`, `--port` are added.
        log: the file that takes what the process prints.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = list(command)
        self._log = log
        self._secret = secrets.token_urlsafe(32)
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the process and wait until it can answer.

        Raises:
            EngineError: it ended early, or took more than `START_TIMEOUT_S`.
        """
        self._port = _free_port()
        command = [*self._command, "--host", HOST, "--port", str(self._port)]
        environment = {**os.environ, "REWARM_WORKER_SECRET": self._secret}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - a list, no shell; the program is this Python
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process: SIGTERM, so that it writes what it still holds, and SIGKILL when it does not go."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()

    def chat(self, messages: Sequence[Message], max_tokens: int) -> Reply:
        """Ask for a reply at temperature 0, streamed.

        Raises:
            EngineError: the worker refused, died, or sent no text or no usage.
        """
        body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": 0.0}
        reply = self.ask("/v1/chat/completions", body)
        if not reply.text:
            raise self._failure("sent no text")
        return reply

    def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> Reply:
        """As `Server.ask`.

        Raises:
            EngineError: the worker refused, died, or sent no usage; has its last words.
        """
        try:
            return self._server().ask(path, body, headers, progress)
        except NoReply as error:
            self._let_it_end()
            raise self._failure(str(error)) from error

    def _server(self) -> Server:
        return Server(HOST, self._port, self._secret)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise self._failure("ended before it could answer")
            if self._is_ready():
                return
            time.sleep(0.1)
        raise self._failure(f"could not answer within {START_TIMEOUT_S:.0f} s")

    def _is_ready(self) -> bool:
        try:
            return self._server().get("/health", 5.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False  # not listening yet

    def _let_it_end(self) -> None:
        """A connection breaks a moment before its process is gone: wait that moment, to know its exit status."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)

    def _failure(self, what: str) -> EngineError:
        code = self._process.poll() if self._process else None
        ended = "" if code is None else f" Its exit status was {code}."
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        told = "\n  ".join(["Its last words:", *lines]) if lines else "It printed nothing."
        return EngineError(f"The worker {what}.{ended} {told}")


def _free_port() -> int:
    """A port that was free a moment ago; a worker that finds it taken ends with a message of its own."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
