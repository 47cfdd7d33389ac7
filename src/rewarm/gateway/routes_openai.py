"""`/v1`: OpenAI's API, passed on to the workers. Knows requests and responses; `relay` knows the worker."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from rewarm.gateway import relay
from rewarm.gateway.asking import cache_headers
from rewarm.gateway.guard import CLIENT
from rewarm.gateway.keys import NOBODY_ELSE, Client
from rewarm.gateway.problems import Problem, not_offered
from rewarm.gateway.workers import Workers

T = TypeVar("T")

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]

_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGone(Exception):
    """Nobody listens any more."""


PASSED_ON = {
    "/chat/completions": ("Answer in a conversation", "OpenAI"),
    "/completions": ("Complete a text", "OpenAI"),
    "/responses": ("Answer, where the model's engine has this API", "OpenAI"),
    "/embeddings": ("Embed texts, where the model's engine does", "OpenAI"),
    "/messages": ("Answer, where the model's engine has this API", "Anthropic"),
    "/messages/count_tokens": ("Count a request's tokens, where the model's engine does", "Anthropic"),
}
"""Paths under `/v1` that a model answers, which is loaded if it is not: what they do, and whose API they are of."""


def openai_routes(workers: Workers) -> APIRouter:
    """The routes under `/v1`."""
    router = APIRouter(prefix="/v1")
    created = int(time.time())

    def described(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created, "owned_by": "rewarm"}

    @router.get("/models", tags=["OpenAI"])
    async def list_models() -> dict[str, Any]:
        """The models that can be asked, loaded or not."""
        return {"object": "list", "data": [described(name) for name in workers.names]}

    @router.get("/models/{name:path}", tags=["OpenAI"])
    async def get_model(name: str) -> dict[str, Any]:
        """One model."""
        workers.get(name)
        return described(name)

    for path, (summary, tag) in PASSED_ON.items():
        router.add_api_route(path, _passing(workers, f"/v1{path}"), methods=["POST"], summary=summary, tags=[tag])

    @router.api_route("/{rest:path}", methods=METHODS, include_in_schema=False)
    async def others(request: Request, rest: str) -> Response:
        raise Problem(404, f"There is no {request.method} /v1/{rest[:200]} here.", "unknown_url")

    return router


def _passing(workers: Workers, path: str) -> Callable[[Request], Awaitable[Response]]:
    async def passing(request: Request) -> Response:
        return await passed_on(request, workers, path)

    return passing


async def passed_on(request: Request, workers: Workers, path: str) -> Response:
    """The answer of a model's worker to a request to `path` of the API."""
    try:
        return await _answer(request, workers, path)
    except ClientGone:
        return Response(status_code=499)
    except Problem as problem:
        return problem.response(path)


async def _answer(request: Request, workers: Workers, path: str) -> Response:
    payload = _parsed(await request.body())
    name = payload.get("model")
    if not isinstance(name, str) or not name:
        raise Problem(400, "The request must name its model, as a string: 'model'.", "missing_model", "model")
    if not isinstance(payload.get("stream", False), bool | None):
        raise Problem(400, "'stream' must be true or false.", param="stream")
    client: Client = request.scope.get(CLIENT, NOBODY_ELSE)
    headers = cache_headers(request.headers, client.tenant)
    worker = workers.get(name)
    if path not in worker.model.apis:
        raise not_offered(path, worker.model.engine)
    answer = await _while_connected(request, relay.ask(worker, path, payload, headers))
    if answer.is_stream:
        return _Stream(answer)
    body = await _while_connected(request, answer.whole())
    answer.note()
    # As the worker wrote it: a log probability may be -Infinity, which stricter writers refuse.
    return Response(json.dumps(body), media_type="application/json", headers=answer.headers())


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
