"""An HTTP handler's plain parts: reading a body, answering with JSON, keys.

Knows HTTP and keys; not the engine, not the cache.
"""

from __future__ import annotations

import hmac
import http.client
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from rewarm.adapters.llama import replies

log = logging.getLogger(__name__)

PUBLIC = frozenset({"/", "/health", "/v1/health", "/models", "/v1/models", "/index.html"})
"""Paths for which llama-server asks for no key."""

_MAX_BODY_NBYTES = 1 << 30
_DRAIN_NBYTES = 1 << 20
_PIECE_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask.

    Attributes:
        secret: of the gateway that started this worker; then nobody else may, and browsers are told nothing.
        keys: the user's `--api-key`s; empty when none is asked for.
        prefix: before every path (`--api-prefix`).
    """

    secret: str | None = None
    keys: frozenset[str] = frozenset()
    prefix: str = ""


class Face(BaseHTTPRequestHandler):
    """One connection's requests, read; and answers of our own.

    Args:
        access: who may ask.
    """

    protocol_version = "HTTP/1.1"

    def __init__(self, access: Access, *args: Any) -> None:
        self._access = access
        self._answered = False
        # The base class answers the request inside its constructor.
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class' name
        """Log a request's line, but not the health checks that come several times a second."""
        if self.path != "/health":
            log.debug("%s", format % args)

    @property
    def _route(self) -> str:
        """The path without the user's prefix and the query."""
        return self.path.partition("?")[0].removeprefix(self._access.prefix)

    @property
    def _is_gateway(self) -> bool:
        """Whether the request bears the secret of the gateway that started this worker."""
        secret = self._access.secret
        return secret is not None and _same(self.headers.get("Authorization", "").removeprefix("Bearer "), secret)

    def _may_ask(self, route: str) -> bool:
        access = self._access
        if access.secret is not None:
            return self._is_gateway
        if not access.keys or route in PUBLIC or self.command == "OPTIONS":
            return True
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        others = (given, self.headers.get("X-Api-Key", ""))
        return any(_same(key, one) for key in access.keys for one in others)

    def _refuse(self) -> None:
        if self._access.secret is not None:
            message = "This worker answers the rewarm gateway only: the Authorization header is missing or wrong."
        else:
            message = "Invalid API Key"
        self._send_json(HTTPStatus.UNAUTHORIZED, replies.error(message, "authentication_error", 401))

    def _read_body(self) -> bytes | None:
        """The request's body; None, with the answer sent, when it cannot be read."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = self._read_chunks()
        else:
            length = self.headers.get("Content-Length", "0")
            body = self._read_length(int(length)) if length.isdecimal() else None
        if body is None:
            self.close_connection = True
            message = "The request's body cannot be read: it has no valid length, or more than 1 GiB."
            self._send_json(HTTPStatus.BAD_REQUEST, replies.error(message, "invalid_request_error", 400))
        return body

    def _read_length(self, length: int) -> bytes | None:
        if length > _MAX_BODY_NBYTES:
            return None
        if not self._may_ask(self._route):
            # Read a part of it, so that the client sees the answer and not a broken connection.
            self.close_connection = self.close_connection or length > _DRAIN_NBYTES
            length = min(_DRAIN_NBYTES, length)
        return self.rfile.read(length)

    def _read_chunks(self) -> bytes | None:
        limit = _MAX_BODY_NBYTES if self._may_ask(self._route) else _DRAIN_NBYTES
        pieces: list[bytes] = []
        try:
            while size := int(self.rfile.readline(64).partition(b";")[0], 16):
                limit -= size
                if size < 0 or limit < 0:
                    return None
                pieces.append(self.rfile.read(size))
                self.rfile.readline(4)
            while self.rfile.readline(1024).strip():
                pass  # trailers
        except ValueError:
            return None
        return b"".join(pieces)

    def _send_json(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        raw = json.dumps(body, ensure_ascii=False).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(raw)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.log_request(status)
        self.end_headers()
        self._answered = True
        self._write(raw)

    def _write(self, raw: bytes) -> None:
        if self.command != "HEAD":
            self.wfile.write(raw)


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode("utf-8", "replace"))


def pieces(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """A body as it arrives; an engine that breaks it off is told from its end.

    Raises:
        HTTPException: it was broken off.
    """
    while piece := response.read1(_PIECE_NBYTES):
        yield piece
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)


def lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """A stream by its lines, ends included."""
    rest = b""
    for piece in pieces(response):
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest
