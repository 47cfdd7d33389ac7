"""Who may talk to the gateway: this machine's own programs and pages, and no site that a browser has open.

A browser sends requests to loopback addresses for any site. So the Host header must be a loopback name (a
site whose name was rebound to 127.0.0.1 bears its own), and an Origin must be the gateway's own. Where API keys
are set, every request must bear one. Bodies are bounded, and pages may load nothing from elsewhere. Knows nothing
of what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rewarm.gateway.keys import COOKIE, NOBODY_ELSE, Client, Keys
from rewarm.gateway.login import LOGIN_PAGE
from rewarm.gateway.problems import Problem, no_key
from rewarm.gateway.settings import is_loopback

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?")

_POLICY = "; ".join(
    (
        "default-src 'self'",
        # The page's framework compiles its templates in the browser and writes inline styles.
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        # An image in a reply would tell its host that it was read; 'self' covers the page's own socket.
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


CLIENT = "rewarm.client"
"""Where a request's scope says who asks: a `keys.Client`."""

_OPEN = frozenset({"/login", "/favicon.ico"})
_FOR_ADMINS = ("/api", "/metrics", "/openapi.json")

DRAIN_S = 2.0
"""How long a refused body is read, so that a client that still sends it sees the answer."""


class Guard:
    """ASGI middleware around everything else.

    Args:
        app: what is guarded.
        max_body_bytes: the largest request body.
        keys: one of which every request must bear, if there are any.
        is_loopback_only: whether the gateway listens at a loopback address: then the Host must be such a name.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, keys: Keys, *, is_loopback_only: bool = True) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._keys = keys
        self._is_loopback_only = is_loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), str(scope["path"])
        client = NOBODY_ELSE if not self._keys else self._client(headers)
        problem = self._refusal(headers) or self._refusal_of_client(client, path)
        if problem is None:
            # A server sends no body after HEAD; whatever answers GET answers it.
            as_get = {"method": "GET"} if scope.get("method") == "HEAD" else {}
            inner = {**scope, **as_get, CLIENT: client or NOBODY_ELSE}
            if scope["type"] == "http":
                await self._app(inner, _bounded(receive, self._max_body_bytes), _with_headers(send))
            else:
                await self._app(inner, receive, send)
        elif scope["type"] == "http":
            if problem.status == 413:
                # A client that announces a body and does not send it is answered all the same.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_S):
                        await _drain(receive, 2 * self._max_body_bytes)
            await self._answer(problem, headers, path)(scope, receive, _with_headers(send))
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _client(self, headers: Headers) -> Client | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if given:
            return self._keys.of_key(given)
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        return self._keys.of_cookie(cookie) if cookie else None

    def _refusal_of_client(self, client: Client | None, path: str) -> Problem | None:
        if path in _OPEN or (client is not None and (client.is_admin or path.startswith("/v1/"))):
            return None
        if client is None:
            return no_key()
        return Problem(403, "This API key opens /v1 only.", "not_an_admin")

    def _answer(self, problem: Problem, headers: Headers, path: str) -> Response:
        is_for_programs = path.startswith(("/v1/", *_FOR_ADMINS))
        if problem.status == 401 and not is_for_programs and "text/html" in headers.get("accept", ""):
            return HTMLResponse(LOGIN_PAGE, 401)
        return problem.response(path)

    def _refusal(self, headers: Headers) -> Problem | None:
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self._is_our_name(hosts[0]):
            return Problem(
                403,
                "This gateway answers at loopback names only: use http://127.0.0.1 or http://localhost with its port.",
                "host_not_allowed",
            )
        if any(not self._is_same_origin(origin, hosts[0]) for origin in origins):
            return Problem(403, "Pages of other sites may not talk to this gateway.", "origin_not_allowed")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return too_large(self._max_body_bytes)
        return None

    def _is_our_name(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        # At another address any name may be this machine's; a site that was rebound to it has no key.
        return match is not None and (not self._is_loopback_only or is_loopback(match[1]))

    def _is_same_origin(self, origin: str, host: str) -> bool:
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower() and self._is_our_name(host)


def too_large(max_body_bytes: int) -> Problem:
    """413: the request's body is larger than the gateway takes."""
    return Problem(413, f"The request's body is larger than {max_body_bytes:,} bytes.", "body_too_large")


def _bounded(receive: Receive, max_bytes: int) -> Receive:
    """`receive`, that gives no more of a body than is allowed.

    Raises:
        Problem: 413, from `receive`: there is more, and no length told so before.
    """
    n_bytes = 0

    async def receiving() -> Message:
        nonlocal n_bytes
        message = await receive()
        n_bytes += len(message.get("body", b""))
        if n_bytes > max_bytes:
            raise too_large(max_bytes)
        return message

    return receiving


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            _set(MutableHeaders(scope=message), _HEADERS.items())
        await send(message)

    return sending


def _set(headers: MutableHeaders, wanted: Iterable[tuple[str, str]]) -> None:
    for name, value in wanted:
        headers[name] = value


async def _drain(receive: Receive, max_bytes: int) -> None:
    """Read what still comes, within reason, so that the client sees the answer and not a broken connection."""
    n_bytes = 0
    while n_bytes < max_bytes:
        message = await receive()
        n_bytes += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
