"""The page that asks for an API key once, and what takes it: a cookie that no script can read."""

from __future__ import annotations

from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from rewarm.gateway.keys import COOKIE, Keys

_MAX_BYTES = 4096
_KEPT_S = 90 * 86_400

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>rewarm</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<style>body {{ font: 16px system-ui, sans-serif; max-width: 24rem; margin: 20vh auto; padding: 0 1rem }}
input, button {{ font: inherit; width: 100%; box-sizing: border-box; padding: .6rem; margin-top: .6rem }}</style></head>
<body><h1>rewarm</h1><form method="post" action="/login"><label for="key">This gateway asks for an API key.</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<button type="submit">Go on</button></form><p role="alert">{said}</p></body></html>
"""

LOGIN_PAGE = _PAGE.format(said="")


def login_routes(keys: Keys) -> APIRouter:
    """`/login`."""
    router = APIRouter(include_in_schema=False)

    @router.get("/login")
    async def ask() -> Response:
        return HTMLResponse(LOGIN_PAGE)

    @router.post("/login")
    async def take(request: Request) -> Response:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MAX_BYTES:
                return HTMLResponse(_PAGE.format(said="That is no key."), 413)
        (given,) = parse_qs(body.decode(errors="replace")).get("key", [""])[:1]
        client = keys.of_key(given)
        if client is None or not client.is_admin:
            return HTMLResponse(_PAGE.format(said="That key does not open the pages."), 401)
        answer = RedirectResponse("/", 303)
        is_https = request.url.scheme == "https"
        answer.set_cookie(
            COOKIE, keys.cookie(given), max_age=_KEPT_S, httponly=True, samesite="strict", secure=is_https
        )
        return answer

    return router
