"""The worker's HTTP face: llama-server's own API, at its own port, with the cache in front of completions.

Everything else is passed on as it is, streams included. Knows routes, headers and keys; what is restored and
saved is the seam's.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import json
import logging
import select
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from rewarm.adapters.llama import replies
from rewarm.adapters.llama.engine import EngineGone
from rewarm.adapters.llama.prompts import CHAT, NOT_READ, TEXT, what_taints
from rewarm.adapters.llama.runner import Runner
from rewarm.adapters.llama.seam import Tier, Turn
from rewarm.errors import EngineError

log = logging.getLogger(__name__)

HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "content-length", "proxy-connection"),
    }
)
"""Headers that belong to one connection, not to the message."""

NOT_PASSED_ON = HOP_BY_HOP | {"host", "authorization", "x-api-key", "expect"}
"""Of the client's headers: the engine has a key of its own."""

PUBLIC = frozenset({"/", "/health", "/v1/health", "/models", "/v1/models", "/index.html"})
"""Paths for which llama-server asks for no key."""

HARMLESS = frozenset(
    {
        *("/tokenize", "/detokenize", "/apply-template", "/props", "/tools", "/v1/messages/count_tokens"),
        *("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens", "/responses/input_tokens"),
        *("/v1/responses/input_tokens", "/v1/chat/completions/control", "/v1/streams/lookup"),
    }
)
"""Requests with a body that use no slot."""

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


class Handler(BaseHTTPRequestHandler):
    """Answers one connection.

    Args:
        runner: the engine and its cache.
        access: who may ask.
    """

    protocol_version = "HTTP/1.1"

    def __init__(self, runner: Runner, access: Access, *args: Any) -> None:
        self._runner = runner
        self._access = access
        self._answered = self._chunked = False
        # The base class answers the request inside its constructor.
        super().__init__(*args)

    def do_GET(self) -> None:
        """Answer any request; the other methods are the same function."""
        self._answered = self._chunked = False
        try:
            self._answer()
        except (BrokenPipeError, ConnectionResetError):
            log.debug("the client went away")
            self.close_connection = True
        except (EngineGone, EngineError, http.client.HTTPException, TimeoutError) as error:
            self._fail(error)

    do_POST = do_PUT = do_DELETE = do_OPTIONS = do_HEAD = do_PATCH = do_GET  # noqa: N815 - the base class' names

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class' name
        """Log a request's line, but not the health checks that come several times a second."""
        if self.path != "/health":
            log.debug("%s", format % args)

    @property
    def _route(self) -> str:
        """The path without the user's prefix and the query."""
        return self.path.partition("?")[0].removeprefix(self._access.prefix)

    def _answer(self) -> None:
        body = self._read_body()
        if body is None:
            return
        route = self._route
        if not self._may_ask(route):
            self._refuse()
        elif route in ("/health", "/v1/health") and self.command in ("GET", "HEAD"):
            self._tell_health()
        elif route.startswith("/slots/") and self.command == "POST" and self._runner.caches:
            message = "The slots of this server are saved and restored by rewarm (--rewarm-off gives them back)."
            self._send_json(HTTPStatus.NOT_IMPLEMENTED, replies.error(message, "not_supported_error", 501))
        else:
            tier = self._runner.ensure()
            asked = _as_object(body) if self.command == "POST" and route in CHAT | TEXT else None
            if asked is not None and tier.is_cached:
                self._complete(tier, route, asked)
            elif self.command == "POST" and route not in HARMLESS:
                self._pass_unpinned(tier, route, body)
            else:
                self._pass(body, None)

    def _complete(self, tier: Tier, route: str, asked: dict[str, Any]) -> None:
        """A completion: restore, ask, tell what the cache did, have the slot saved."""
        prompt = self._runner.prompts.read(route, asked)
        several = any(_is_several(asked.get(name)) for name in ("n", "n_cmpl"))
        if several:
            tier.before_unpinned()
        wanted = asked.get("id_slot")
        turn = tier.begin(prompt, wanted if type(wanted) is int and wanted >= 0 else None)
        try:
            if turn.slot is not None:
                asked["id_slot"] = turn.slot.id
                asked.setdefault("cache_prompt", True)
            turn.sent = True
            self._pass(json.dumps(asked, ensure_ascii=False).encode(), turn)
        finally:
            tier.end(turn)
            if several:
                tier.after_unpinned(prompt.taint)
            self._runner.served()

    def _pass_unpinned(self, tier: Tier, route: str, body: bytes) -> None:
        """A request that uses a slot which the server chooses, or that changes how it computes."""
        if route in CHAT | TEXT:
            # Without a cache only the report is added.
            turn = Turn(NOT_READ, reason=tier.why_not[0], detail=tier.why_not[1])
            self._pass(body, turn)
            return
        if route == "/lora-adapters":
            tier.identity_changed()
            self._pass(body, None)
            return
        taint = what_taints(_as_object(body) or {})
        tier.before_unpinned()
        try:
            self._pass(body, None)
        finally:
            tier.after_unpinned(taint)

    # To the engine and back.

    def _pass(self, body: bytes, turn: Turn | None) -> None:
        """Send the request to the engine and its answer to the client, through `replies` where there is a turn."""
        engine = self._runner.engine
        # What is read on the way must not be compressed.
        left_out = NOT_PASSED_ON if turn is None else NOT_PASSED_ON | {"accept-encoding"}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        path = self.path.removeprefix(self._access.prefix)
        has_body = bool(body) or self.command in ("POST", "PUT", "PATCH")
        connection = engine.connect()
        try:
            connection.connect()
            with _watching(self.connection, connection.sock):
                engine.send(connection, self.command, path, body if has_body else None, headers)
                response = connection.getresponse()
                if turn is not None:
                    turn.status = response.status
                self._send(response, turn if response.status == HTTPStatus.OK else None)
        except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError, http.client.HTTPException) as error:
            if _is_gone(self.connection):
                raise BrokenPipeError from error
            raise EngineGone(f"The engine ended in the middle of the request ({type(error).__name__}).") from error
        finally:
            connection.close()

    def _send(self, response: http.client.HTTPResponse, turn: Turn | None) -> None:
        kind = response.getheader("Content-Type", "")
        if turn is not None and kind.startswith("application/json"):
            raw = replies.whole(turn, response.read())
            self._head(response, len(raw))
            self._write(raw)
        elif turn is not None and kind.startswith("text/event-stream"):
            self._stream(response, replies.events(turn, _lines(response)))
        elif response.length is not None or self.command == "HEAD":
            length = response.getheader("Content-Length")
            self._head(response, int(length) if length else 0)
            for piece in _pieces(response):
                self._write(piece)
        else:
            self._stream(response, _pieces(response))

    def _stream(self, response: http.client.HTTPResponse, pieces: Iterable[bytes]) -> None:
        """An answer of unknown length, each piece as soon as it is there."""
        chunked = self.request_version != "HTTP/1.0"
        self._head(response, None, chunked=chunked)
        for piece in pieces:
            self._write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            self._write(b"0\r\n\r\n")

    def _head(self, response: http.client.HTTPResponse, length: int | None, *, chunked: bool = False) -> None:
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            lower = name.lower()
            if lower in HOP_BY_HOP or (self._access.secret and lower.startswith("access-control-")):
                continue
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        elif chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.close_connection = True
            self.send_header("Connection", "close")
        self._chunked = length is None and chunked
        self.log_request(response.status)
        self.end_headers()
        self._answered = True

    def _fail(self, error: Exception) -> None:
        """Tell the client that the engine failed, in the form that its answer has taken so far."""
        log.warning("rewarm: %s", error)
        self._runner.engine.settle()
        unavailable = isinstance(error, EngineError)
        status = HTTPStatus.SERVICE_UNAVAILABLE if unavailable else HTTPStatus.BAD_GATEWAY
        body = replies.error(f"{error} Ask again: a fresh engine is started.", "server_error", int(status))
        try:
            if not self._answered:
                self._send_json(status, body)
                return
            self.close_connection = True
            event = replies.DATA + json.dumps(body).encode() + b"\n\n"
            # Of a stream only: any other answer is broken off, which its length tells.
            if self._chunked:
                self._write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
        except OSError:
            self.close_connection = True

    def _write(self, raw: bytes) -> None:
        if self.command != "HEAD":
            self.wfile.write(raw)

    # Who asks, and what is told without the engine.

    def _may_ask(self, route: str) -> bool:
        access = self._access
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if access.secret is not None:
            return _same(given, access.secret)
        if not access.keys or route in PUBLIC or self.command == "OPTIONS":
            return True
        others = (given, self.headers.get("X-Api-Key", ""))
        return any(_same(key, one) for key in access.keys for one in others)

    def _refuse(self) -> None:
        if self._access.secret is not None:
            message = "This worker answers the rewarm gateway only: the Authorization header is missing or wrong."
        else:
            message = "Invalid API Key"
        self._send_json(HTTPStatus.UNAUTHORIZED, replies.error(message, "authentication_error", 401))

    def _tell_health(self) -> None:
        if self._runner.is_ready:
            self._send_json(HTTPStatus.OK, {"status": "ok"})
            return
        self._runner.ensure_soon()
        message = self._runner.failure or "Loading model"
        self._send_json(HTTPStatus.SERVICE_UNAVAILABLE, replies.error(message, "unavailable_error", 503))

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


def _as_object(body: bytes) -> dict[str, Any] | None:
    """A body that is a JSON object; None for any other, which the engine will refuse in its own words."""
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _is_several(n: Any) -> bool:
    return isinstance(n, int) and n > 1


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode("utf-8", "replace"))


def _pieces(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """A body as it arrives; an engine that breaks it off is told from its end.

    Raises:
        HTTPException: it was broken off.
    """
    while piece := response.read1(_PIECE_NBYTES):
        yield piece
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """A stream by its lines, ends included."""
    rest = b""
    for piece in _pieces(response):
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if rest:
        yield rest


def _is_gone(client: socket.socket) -> bool:
    """Whether a client has closed its side."""
    try:
        ready, _, _ = select.select([client], [], [], 0)
        return bool(ready) and client.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True


@contextlib.contextmanager
def _watching(client: socket.socket, engine: socket.socket) -> Iterator[None]:
    """Hang up on the engine when the client goes away, so that it stops computing for nobody."""
    over, done = socket.socketpair()

    def watch() -> None:
        with contextlib.suppress(OSError, ValueError):
            ready, _, _ = select.select([client, over], [], [])
            if over not in ready and client.recv(1, socket.MSG_PEEK) == b"":
                engine.shutdown(socket.SHUT_RDWR)

    watcher = threading.Thread(target=watch, name="rewarm-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.close()
        watcher.join()
        over.close()
