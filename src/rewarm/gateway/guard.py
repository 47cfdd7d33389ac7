"""Who may talk to the gateway: this machine's own programs and pages, and no site that a browser has open.

A browser sends requests to loopback addresses for any site. So the Host header must be a loopback name (a
site whose name was rebound to 127.0.0.1 bears its own), and an Origin must be the gateway's own. Bodies are
bounded, and pages may load nothing from elsewhere. Knows nothing of what is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rewarm.gateway.problems import Problem
from rewarm.gateway.settings import is_loopback

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@]+)(?::(\d{1,5}))?")

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
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """ASGI middleware around everything else.

    Args:
        app: what is guarded.
        max_body_bytes: the largest request body; a larger one is refused by its Content-Length, and one
            without a length by whoever reads it.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        problem = self._refusal(headers)
        if problem is None:
            await self._app(scope, receive, _with_headers(send) if scope["type"] == "http" else send)
        elif scope["type"] == "http":
            if problem.status == 413:
                await _drain(receive, 2 * self._max_body_bytes)
            await problem.response()(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, headers: Headers) -> Problem | None:
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not _is_own_name(hosts[0]):
            return Problem(
                403,
                "This gateway answers at loopback names only: use http://127.0.0.1 or http://localhost with its port.",
                "host_not_allowed",
            )
        if any(not _is_same_origin(origin, hosts[0]) for origin in origins):
            return Problem(403, "Pages of other sites may not talk to this gateway.", "origin_not_allowed")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return too_large(self._max_body_bytes)
        return None


def too_large(max_body_bytes: int) -> Problem:
    """413: the request's body is larger than the gateway takes."""
    return Problem(413, f"The request's body is larger than {max_body_bytes:,} bytes.", "body_too_large")


def _is_own_name(host: str) -> bool:
    match = _HOST.fullmatch(host)
    return match is not None and is_loopback(match[1])


def _is_same_origin(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower() and _is_own_name(parts.netloc)


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
