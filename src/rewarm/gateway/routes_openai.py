"""`/v1`: OpenAI's API, passed on to the workers. Knows requests and responses; `relay` knows the worker."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from rewarm.gateway import relay
from rewarm.gateway.guard import too_large
from rewarm.gateway.problems import Problem
from rewarm.gateway.workers import Workers

T = TypeVar("T")

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]

_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGone(Exception):
    """Nobody listens any more."""


def openai_routes(workers: Workers, max_body_bytes: int) -> APIRouter:
    """The routes under `/v1`."""
    router = APIRouter(prefix="/v1", tags=["OpenAI"])
    created = int(time.time())

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created, "owned_by": "rewarm"}

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        """The models that can be asked, loaded or not."""
        return {"object": "list", "data": [described(name) for name in workers.names]}

    @router.get("/models/{name}")
    async def get_model(name: str) -> dict[str, Any]:
        """One model."""
        workers.get(name)
        return described(name)

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        """Complete a text; the model is loaded if it is not."""
        return await _complete(request, workers, "/v1/completions", max_body_bytes)

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answer in a conversation; the model is loaded if it is not."""
        return await _complete(request, workers, "/v1/chat/completions", max_body_bytes)

    @router.api_route("/{rest:path}", methods=METHODS, include_in_schema=False)
    async def others(request: Request, rest: str) -> Response:
        raise Problem(404, f"There is no {request.method} /v1/{rest[:200]} here.", "unknown_url")

    return router


async def _complete(request: Request, workers: Workers, path: str, max_body_bytes: int) -> Response:
    payload = _parsed(await _read(request, max_body_bytes))
    name = payload.get("model")
    if not isinstance(name, str) or not name:
        raise Problem(400, "The request must name its model, as a string: 'model'.", "missing_model", "model")
    if not isinstance(payload.get("stream", False), bool | None):
        raise Problem(400, "'stream' must be true or false.", param="stream")
    worker = workers.get(name)
    try:
        answer = await _while_connected(request, relay.ask(worker, path, payload))
        if payload.get("stream"):
            return _Stream(answer)
        body = await _while_connected(request, answer.whole())
    except ClientGone:
        return Response(status_code=499)
    answer.note()
    # As the worker wrote it: a log probability may be -Infinity, which stricter writers refuse.
    return Response(json.dumps(body), media_type="application/json")


class _Stream(StreamingResponse):
    """A streamed answer; its connection to the worker is closed whatever happens, begun or not."""

    def __init__(self, answer: relay.Answer) -> None:
        self._answer = answer
        super().__init__(_pieces(answer), media_type="text/event-stream", headers=_STREAM_HEADERS)

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            await self._answer.aclose()


async def _pieces(answer: relay.Answer) -> AsyncIterator[bytes]:
    async for piece in answer.stream():
        yield piece


async def _read(request: Request, max_body_bytes: int) -> bytes:
    """The body.

    Raises:
        Problem: 413, it is too large and bears no length.
    """
    pieces, n_bytes = [], 0
    async for piece in request.stream():
        n_bytes += len(piece)
        if n_bytes > max_body_bytes:
            raise too_large(max_body_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):
        # Without the parser's words: they may quote the text.
        raise Problem(400, "The request's body is not JSON.", "invalid_json") from None
    if not isinstance(payload, dict):
        raise Problem(400, "The request's body must be a JSON object.", "invalid_json")
    return payload


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientGone: it went away.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
