"""The worker's HTTP face: llama-server's own API, at its own port, with the cache in front of completions.

Everything else is passed on as it is, streams included. Knows routes and headers; what is restored and saved
is the seam's.
"""

from __future__ import annotations

import functools
import http.client
import json
import logging
import socket
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from rewarm.adapters import control, leaving
from rewarm.adapters.asked import Asked, Mode, read_headers
from rewarm.adapters.llama import replies
from rewarm.adapters.llama.engine import EngineGone
from rewarm.adapters.llama.face import Access, Face, lines, pieces
from rewarm.adapters.llama.prompts import CHAT, CONVERTED, NOT_READ, READ, TEXT, what_taints
from rewarm.adapters.llama.runner import Runner
from rewarm.adapters.llama.seam import Tier
from rewarm.adapters.llama.turns import Turn
from rewarm.errors import EngineError

__all__ = ["Access", "Handler"]

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

HARMLESS = frozenset(
    {
        *("/tokenize", "/detokenize", "/apply-template", "/props", "/tools", "/v1/messages/count_tokens"),
        *("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens", "/responses/input_tokens"),
        *("/v1/responses/input_tokens", "/v1/chat/completions/control", "/v1/streams/lookup"),
        *("/embedding", "/embeddings", "/v1/embeddings"),
        *("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"),
    }
)
"""Requests with a body that use no slot. A server that embeds or ranks is served uncached; others refuse to."""

_FLUSH_S = 30.0


class Handler(Face):
    """Answers one connection.

    Args:
        runner: the engine and its cache.
        access: who may ask.
    """

    def __init__(self, runner: Runner, access: Access, *args: Any) -> None:
        self._runner = runner
        self._chunked = False
        super().__init__(access, *args)

    def do_GET(self) -> None:  # noqa: N802 - the base class' name
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

    def _answer(self) -> None:
        body = self._read_body()
        if body is None:
            return
        route = self._route
        if not self._may_ask(route):
            self._refuse()
        elif route in ("/health", "/v1/health") and self.command in ("GET", "HEAD"):
            self._tell_health()
        elif route.startswith(control.PREFIX):
            self._control(route, body)
        elif route.startswith("/slots/") and self.command == "POST" and self._runner.caches:
            message = "The slots of this server are saved and restored by rewarm (--rewarm-off gives them back)."
            self._send_json(HTTPStatus.NOT_IMPLEMENTED, replies.error(message, "not_supported_error", 501))
        else:
            self._ask_engine(route, body)

    def _ask_engine(self, route: str, body: bytes) -> None:
        try:
            asked = read_headers(self.headers.get, trusted=self._is_gateway)
        except ValueError as error:
            self._send_json(HTTPStatus.BAD_REQUEST, replies.error(str(error), "invalid_request_error", 400))
            return
        tier = self._runner.ensure()
        wanted = _as_object(body) if self.command == "POST" and route in READ else None
        if wanted is not None and tier.is_cached and (route not in CONVERTED or self._is_ours_to_choose(tier, route)):
            self._complete(tier, route, wanted, asked)
        elif self.command == "POST" and route not in HARMLESS:
            self._pass_unpinned(tier, route, body, asked)
        else:
            self._pass(body, None)

    def _is_ours_to_choose(self, tier: Tier, route: str) -> bool:
        """Whether a request that the server converts inside runs in a slot that we know."""
        return CONVERTED[route].keeps_slot or len(tier.pool) == 1

    def _complete(self, tier: Tier, route: str, wanted: dict[str, Any], asked: Asked) -> None:
        """A completion: restore, ask, tell what the cache did, have the slot saved."""
        prompt = self._runner.prompts.read(route, wanted)
        several = any(_is_several(wanted.get(name)) for name in ("n", "n_cmpl"))
        if several:
            tier.before_unpinned(asked)
        number = wanted.get("id_slot")
        turn = tier.begin(prompt, number if type(number) is int and number >= 0 else None, asked)
        try:
            if turn.slot is not None:
                wanted["id_slot"] = turn.slot.id
                wanted.setdefault("cache_prompt", True)
            if turn.from_scratch:
                wanted["cache_prompt"] = False
            turn.sent = True
            self._send_on(wanted, turn, route)
        finally:
            tier.end(turn)
            if several:
                tier.after_unpinned(asked, prompt.taint)
            self._runner.served()

    def _send_on(self, wanted: dict[str, Any], turn: Turn, route: str) -> None:
        """Send a completion; of a stream, the build tells how far the prompt's evaluation has come."""
        asks_itself = wanted.get("return_progress") is True
        if wanted.get("stream") is True and route in CHAT | TEXT:
            wanted["return_progress"] = True
        with self._runner.following(turn):
            self._pass(json.dumps(wanted, ensure_ascii=False).encode(), turn, shows_progress=asks_itself)

    def _pass_unpinned(self, tier: Tier, route: str, body: bytes, asked: Asked) -> None:
        """A request that uses a slot which the server chooses, or that changes how it computes."""
        if route == "/lora-adapters":
            tier.identity_changed()
            self._pass(body, None)
            return
        wanted = _as_object(body)
        if not tier.is_cached:
            self._pass_uncached(tier, route, body, asked)
            return
        taint = what_taints(wanted or {})
        tier.before_unpinned(asked)
        # What the server converts inside tells its usage all the same.
        turn = (
            Turn(NOT_READ, asked, reason=CONVERTED[route].reason, detail=CONVERTED[route].why_not)
            if (route in CONVERTED)
            else None
        )
        try:
            self._pass(body, turn)
        finally:
            tier.after_unpinned(asked, taint)
            self._runner.served()

    def _pass_uncached(self, tier: Tier, route: str, body: bytes, asked: Asked) -> None:
        """Without a cache only the report is added; and what is nobody else's is kept apart from others."""
        turn = Turn(NOT_READ, asked, reason=tier.why_not[0], detail=tier.why_not[1])
        is_off, wanted = asked.mode is Mode.OFF, _as_object(body)
        used = [slot.id for slot in tier.pool.all()]
        if is_off or asked.tenant:
            if wanted is not None and (route in CHAT | TEXT or (route in CONVERTED and CONVERTED[route].keeps_slot)):
                used = used[:1]
                wanted |= {"cache_prompt": False, **({"id_slot": used[0]} if is_off else {})}
                body = json.dumps(wanted, ensure_ascii=False).encode()
            else:
                tier.wipe(used)
        try:
            with self._runner.following(turn):
                self._pass(body, turn if route in READ else None)
        finally:
            if is_off:
                tier.wipe(used)

    # To the engine and back.

    def _pass(self, body: bytes, turn: Turn | None, *, shows_progress: bool = True) -> None:
        """Send the request to the engine and its answer to the client, through `replies` where there is a turn."""
        engine = self._runner.engine
        # What is read on the way must not be compressed.
        left_out = NOT_PASSED_ON if turn is None else NOT_PASSED_ON | {"accept-encoding"}
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() not in left_out and not name.lower().startswith("x-rewarm-")
        }
        path = self.path.removeprefix(self._access.prefix)
        has_body = bool(body) or self.command in ("POST", "PUT", "PATCH")
        connection = engine.connect()
        try:
            connection.connect()
            with leaving.watched(self.connection, functools.partial(connection.sock.shutdown, socket.SHUT_RDWR)):
                engine.send(connection, self.command, path, body if has_body else None, headers)
                response = connection.getresponse()
                if turn is not None:
                    turn.status = response.status
                ours = turn if response.status == HTTPStatus.OK else None
                self._send(response, ours, shows_progress=shows_progress)
        except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError, http.client.HTTPException) as error:
            if leaving.is_gone(self.connection):
                raise BrokenPipeError from error
            raise EngineGone(f"The engine ended in the middle of the request ({type(error).__name__}).") from error
        finally:
            connection.close()

    def _send(self, response: http.client.HTTPResponse, turn: Turn | None, *, shows_progress: bool) -> None:
        kind = response.getheader("Content-Type", "")
        if turn is not None and kind.startswith("application/json"):
            raw = replies.whole(turn, response.read())
            self._head(response, len(raw))
            self._write(raw)
        elif turn is not None and kind.startswith("text/event-stream"):
            self._stream(response, replies.events(turn, lines(response), shows_progress=shows_progress))
        elif response.length is not None or self.command == "HEAD":
            length = response.getheader("Content-Length")
            self._head(response, int(length) if length else 0)
            for piece in pieces(response):
                self._write(piece)
        else:
            self._stream(response, pieces(response))

    def _stream(self, response: http.client.HTTPResponse, found: Iterable[bytes]) -> None:
        """An answer of unknown length, each piece as soon as it is there."""
        chunked = self.request_version != "HTTP/1.0"
        self._head(response, None, chunked=chunked)
        for piece in found:
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

    # What is told without the engine.

    def _control(self, route: str, body: bytes) -> None:
        """What the gateway orders; nobody else may."""
        if not self._is_gateway:
            self._refuse()
            return
        self._send_json(*control.answer(self.command, route, body, self._runner))

    def _tell_health(self) -> None:
        if self._runner.is_ready:
            self._send_json(HTTPStatus.OK, {"status": "ok"})
            return
        self._runner.ensure_soon()
        message = self._runner.failure or "Loading model"
        self._send_json(HTTPStatus.SERVICE_UNAVAILABLE, replies.error(message, "unavailable_error", 503))


def _as_object(body: bytes) -> dict[str, Any] | None:
    """A body that is a JSON object; None for any other, which the engine will refuse in its own words."""
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _is_several(n: Any) -> bool:
    return isinstance(n, int) and n > 1
