"""One request to a worker and its answer: what the API passes on and the chat page reads.

Knows the worker's face and OpenAI's shapes. Texts pass through; none is logged.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

import httpx

from rewarm.errors import EngineError
from rewarm.gateway.problems import Problem, not_started, worker_lost
from rewarm.gateway.sse import DONE, Event, read_events, write_event
from rewarm.gateway.worker import Running, Worker

log = logging.getLogger(__name__)

_LOADS = ("adapters", "draft_model")
"""Fields by which a request would have mlx-lm load files that it names."""

_LOADED = "default_model"
"""What mlx-lm calls the model of its command line."""

_JSON = {"Content-Type": "application/json"}


class Answer:
    """A worker's answer, its status line read and its body still to come.

    Attributes:
        ttft_s: seconds from sending the request to the first token of a stream; None until it came.
        report: the worker's object `rewarm`; None until it came.
    """

    def __init__(
        self, worker: Worker, running: Running, response: httpx.Response, sent_at: float, *, is_usage_asked: bool
    ) -> None:
        self.ttft_s: float | None = None
        self.report: dict[str, Any] | None = None
        self._worker = worker
        self._name = worker.model.name
        self._running = running
        self._response = response
        self._sent_at = sent_at
        self._is_usage_asked = is_usage_asked

    async def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed, under the model's public name.

        Raises:
            Problem: the worker ended, or said no.
        """
        try:
            raw = await self._response.aread()
            body = json.loads(raw)
        except (httpx.HTTPError, ValueError) as error:
            raise await self._lost(error) from error
        finally:
            await self._response.aclose()
        if not isinstance(body, dict):
            raise worker_lost(f"The worker of {self._name} sent an answer that is no object.")
        return self._public(body)

    async def events(self) -> AsyncGenerator[Event, None]:
        """The events of a streamed answer, under the model's public name, up to `[DONE]`.

        A worker that ends in the middle gives one last event with an `error` object, as OpenAI's clients
        expect it. Closing the iterator closes the connection, by which the worker sees that nobody listens.
        """
        try:
            async for event in read_events(self._response.aiter_bytes()):
                if event.data is None:
                    yield event
                    if event.is_done:
                        return
                    continue
                self._note_first_token(event.data)
                data = self._public(event.data)
                if self._is_usage_asked or data.get("choices") or "usage" not in data:
                    yield Event(write_event(data), data)
                if "error" in data:
                    return  # the worker's own last word
            problem = await self._lost(None)
        except httpx.HTTPError as error:
            problem = await self._lost(error)
        finally:
            await self._response.aclose()
        log.warning("%s", problem.message)
        yield Event(write_event(problem.body()), problem.body())

    async def stream(self) -> AsyncIterator[bytes]:
        """The bytes of `events`; ends without `[DONE]` when the worker did."""
        async for event in self.events():
            yield DONE if event.is_done else event.raw
        self.note()

    def note(self) -> None:
        """Log what the cache did, and tell those who listen."""
        said = self.report
        if said is None:
            return
        self._worker.note_reply(said, self.ttft_s)
        # An answer that is not streamed comes as a whole: nobody knows when its first token was there.
        took_s = time.monotonic() - self._sent_at
        log.info(
            "%s: %s of %s prompt tokens restored (%s from disk, %s from memory; %s), %s after %.2f s",
            self._name,
            *(said.get(key) for key in ("cached_tokens", "prompt_tokens", "disk_tokens", "memory_tokens", "reason")),
            "answered" if self.ttft_s is None else "first token",
            took_s if self.ttft_s is None else self.ttft_s,
        )

    async def aclose(self) -> None:
        """Close the connection to the worker."""
        await self._response.aclose()

    def _note_first_token(self, data: Mapping[str, Any]) -> None:
        if self.ttft_s is None and data.get("choices"):
            self.ttft_s = time.monotonic() - self._sent_at

    def _public(self, body: dict[str, Any]) -> dict[str, Any]:
        if "model" in body:
            body["model"] = self._name
        if isinstance(body.get("rewarm"), dict):
            self.report = body["rewarm"]
        return body

    async def _lost(self, error: Exception | None) -> Problem:
        return _lost(self._name, await self._running.how_it_ended(), error)


async def ask(worker: Worker, path: str, payload: Mapping[str, Any]) -> Answer:
    """Send a completion request to a model's worker, which is started if it does not run.

    Args:
        worker: of the model that is asked.
        path: `/v1/chat/completions` or `/v1/completions`.
        payload: the request's body, as the client sent it.

    Raises:
        Problem: the request names files to load (400), the worker did not start (503), ended (502), or said no.
    """
    name = worker.model.name
    body, is_usage_asked = _for_worker(payload)
    # A process that ended before the request reached it is started again; one that ends under it is not.
    for may_start_again in (True, False):
        running = await _started(worker)
        sent_at = time.monotonic()
        try:
            request = running.client.build_request("POST", path, content=body, headers=_JSON)
            response = await running.client.send(request, stream=True)
        except (httpx.HTTPError, RuntimeError) as error:
            ended = await running.how_it_ended()
            # httpx raises RuntimeError where the client was closed already.
            if may_start_again and ended is not None and isinstance(error, httpx.ConnectError | RuntimeError):
                continue
            raise _lost(name, ended, error) from error
        if response.status_code != 200:
            raise await _refusal(name, running, response)
        return Answer(worker, running, response, sent_at, is_usage_asked=is_usage_asked)
    raise AssertionError("unreachable")


def _for_worker(payload: Mapping[str, Any]) -> tuple[bytes, bool]:
    """The body for the worker, and whether the client asked for a stream's usage.

    Raises:
        Problem: 400, it names files to load.
    """
    for name in _LOADS:
        if payload.get(name) is not None:
            raise Problem(400, f"{name!r} cannot be chosen by a request: it belongs to the model.", param=name)
    body = {name: value for name, value in payload.items() if name not in _LOADS}
    # Not the path: mlx-lm takes that for another model when its own was loaded with an adapter.
    body["model"] = _LOADED
    given = body.pop("stream_options", None)
    options = given if isinstance(given, dict) else {}
    if payload.get("stream") is True:
        # Asked for in any case: the report of what the cache did comes with it.
        body["stream_options"] = {**options, "include_usage": True}
    return json.dumps(body).encode(), options.get("include_usage") is True


async def _started(worker: Worker) -> Running:
    try:
        return await worker.running()
    except EngineError as error:
        raise not_started(str(error)) from error


def _lost(name: str, ended: str | None, error: Exception | None) -> Problem:
    """502: the worker ended in an answer (`ended` says how), or broke it off."""
    if ended is not None:
        return worker_lost(f"The answer was broken off; the next request starts the model again. {ended}")
    told = f" ({type(error).__name__})" if error else ""
    return worker_lost(f"The worker of {name} broke off the answer{told}. It still runs: ask again.")


async def _refusal(name: str, running: Running, response: httpx.Response) -> Problem:
    """What the worker said instead of an answer, in OpenAI's shape."""
    try:
        said = json.loads(await response.aread())
    except (httpx.HTTPError, ValueError) as error:
        return _lost(name, await running.how_it_ended(), error)
    finally:
        await response.aclose()
    refusal = said.get("error") if isinstance(said, dict) else None
    told = refusal if isinstance(refusal, dict) else {"message": refusal or f"status {response.status_code}"}
    status = response.status_code
    if status in (401, 403) or status < 400:
        return worker_lost(f"The worker of {name} did not take the gateway's request (status {status}).")
    message, code, param = (told.get(key) for key in ("message", "code", "param"))
    return Problem(status, str(message), str(code) if code else None, str(param) if param else None)
