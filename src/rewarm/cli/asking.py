"""One request to a server with OpenAI's API, over the standard library alone: what came, when, what was reused.

Knows no process and no cache; whoever calls says where the server is.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

REPLY_TIMEOUT_S = 600.0

Progress = Callable[[int, int], None]
"""Told prompt tokens that are processed, and prompt tokens in all."""

_PREFILL = re.compile(rb":\s*keepalive\s+(\d{1,9})/(\d{1,9})")


class NoReply(Exception):
    """The server refused, broke off, or sent no whole reply; says which."""


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


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go.

    Attributes:
        host, port: its address.
        secret: what every request bears, or None.
    """

    host: str
    port: int
    secret: str | None = None

    def get(self, path: str, timeout_s: float) -> tuple[int, Any]:
        """Status and JSON body of a GET; the body is None where it is no JSON.

        Raises:
            OSError, http.client.HTTPException: nobody answers.
        """
        with self._request("GET", path, None, {}, timeout_s) as (response, _):
            body = response.read(2**24)
        try:
            return response.status, json.loads(body)
        except ValueError:
            return response.status, None

    def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> Reply:
        """Ask for a streamed reply with its usage.

        Raises:
            NoReply: there is none, or not all of it; an empty text is one.
        """
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._request("POST", path, wanted, headers or {}, REPLY_TIMEOUT_S) as (response, sent_at):
                if response.status != 200:
                    raise NoReply(f"answered {response.status}: {_error_in(response.read())}")
                return _read(response, sent_at, progress)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoReply(f"broke off the reply ({type(error).__name__}: {error})") from error

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, more: Mapping[str, str], timeout_s: float
    ) -> Iterator[tuple[http.client.HTTPResponse, float]]:
        """The response, and when the request began to be sent."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        headers = {"Content-Type": "application/json", **more}
        if self.secret is not None:
            headers["Authorization"] = f"Bearer {self.secret}"
        sent_at = time.perf_counter()
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            with connection.getresponse() as response:
                yield response, sent_at
        finally:
            connection.close()


def _read(response: http.client.HTTPResponse, sent_at: float, progress: Progress | None) -> Reply:
    pieces: list[str] = []
    ttft_s, usage = 0.0, None
    for event in _events(response, progress):
        if "error" in event:
            raise NoReply(f"reported an error: {_message_of(event)}")
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            piece = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
            if not piece:
                continue
            if not pieces:
                ttft_s = time.perf_counter() - sent_at
            pieces.append(piece)
    if not usage:
        raise NoReply("sent no usage")
    details = usage.get("prompt_tokens_details") or {}
    return Reply("".join(pieces), ttft_s, int(usage["prompt_tokens"]), int(details.get("cached_tokens") or 0))


def _events(response: http.client.HTTPResponse, progress: Progress | None) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent stream, up to its `[DONE]`.

    Raises:
        http.client.HTTPException: the stream ended without it.
        ValueError: an event is no JSON object.
    """
    for line in response:
        found = _PREFILL.match(line)
        if found and progress is not None:
            progress(int(found[1]), int(found[2]))
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
