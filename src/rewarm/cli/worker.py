"""One engine process and a conversation with it over HTTP, for `rewarm demo`.

Knows how a worker is started, asked and ended, and nothing of caches or models. The gateway has its own,
which lives longer; this one needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rewarm.errors import EngineError

Message = Mapping[str, str]

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
REPLY_TIMEOUT_S = 600.0
LOG_LINES = 12


@dataclass(frozen=True, slots=True)
class Reply:
    """What one request gave.

    Attributes:
        text: the whole reply.
        ttft_s: seconds from sending the request to the first piece of text.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that were not evaluated.
    """

    text: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


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
        body = {
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            with self._request("POST", "/v1/chat/completions", body, REPLY_TIMEOUT_S) as (response, sent_at):
                if response.status != 200:
                    raise self._failure(f"answered {response.status}: {_error_in(response.read())}")
                return self._read(response, sent_at)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._let_it_end()
            raise self._failure(f"broke off the reply ({type(error).__name__}: {error})") from error

    def _read(self, response: http.client.HTTPResponse, sent_at: float) -> Reply:
        pieces: list[str] = []
        ttft_s, usage = 0.0, None
        for event in _events(response):
            if "error" in event:
                raise self._failure(f"reported an error: {_message_of(event)}")
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                piece = (choice.get("delta") or {}).get("content") or ""
                if not piece:
                    continue
                if not pieces:
                    ttft_s = time.perf_counter() - sent_at
                pieces.append(piece)
        if not pieces or not usage:
            raise self._failure(f"sent no {'usage' if pieces else 'text'}")
        details = usage.get("prompt_tokens_details") or {}
        return Reply("".join(pieces), ttft_s, int(usage["prompt_tokens"]), int(details.get("cached_tokens") or 0))

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
            with self._request("GET", "/health", None, timeout_s=5.0) as (response, _):
                return response.status == 200
        except (OSError, http.client.HTTPException):
            return False  # not listening yet

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> Iterator[tuple[http.client.HTTPResponse, float]]:
        """The response, and when the request began to be sent."""
        connection = http.client.HTTPConnection(HOST, self._port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {self._secret}", "Content-Type": "application/json"}
        sent_at = time.perf_counter()
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            with connection.getresponse() as response:
                yield response, sent_at
        finally:
            connection.close()

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


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent stream, up to its `[DONE]`.

    Raises:
        http.client.HTTPException: the stream ended without it.
        ValueError: an event is no JSON object.
    """
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is no object: {data[:80]!r}")
        yield event
    raise http.client.HTTPException("the stream ended early")


def _error_in(body: bytes) -> str:
    try:
        return _message_of(json.loads(body))
    except ValueError:
        return body[:200].decode(errors="replace")


def _message_of(answer: Any) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message") if isinstance(error, dict) else error or answer)


def _free_port() -> int:
    """A port that was free a moment ago; a worker that finds it taken ends with a message of its own."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
