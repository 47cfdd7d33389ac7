"""One request to a worker and its answer: what the API passes on and the chat page reads.

Knows the worker's face and OpenAI's shapes. Texts pass through; none is logged.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from rewarm.errors import EngineError
from rewarm.gateway.asking import for_worker
from rewarm.gateway.problems import Problem, not_started, worker_lost
from rewarm.gateway.sse import DONE, Event, read_events, write_event
from rewarm.gateway.worker import Worker
from rewarm.gateway.worker_state import Running

log = logging.getLogger(__name__)

_JSON = {"Content-Type": "application/json"}

_OPENAI = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths whose streams end with `[DONE]`; those of the others end with an event of their own, and the body."""

_LAST_EVENTS = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})

_WORD = re.compile(r"[a-z_]{1,40}")
_KILLED = frozenset({-signal.SIGKILL, -signal.SIGTERM})
_AT_ONCE_S = 2.0
"""A connection that breaks so soon, of a process that was killed: it was so before the request came."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that was sent to a worker.

    Attributes:
        path: of the API.
        at: when, by `time.monotonic`.
        is_usage_asked: whether the client asked for a stream's usage, or it comes unasked.
    """

    path: str
    at: float
    is_usage_asked: bool


class Answer:
    """A worker's answer, its status line read and its body still to come.

    Attributes:
        ttft_s: seconds from sending the request to the first token of a stream; None until it came.
        report: the worker's object `rewarm`; None until it came.
        path: of the API that was asked.
        is_stream: whether the worker streams; not every part of the API can.
    """

    def __init__(self, worker: Worker, running: Running, response: httpx.Response, sent: Sent) -> None:
        self.ttft_s: float | None = None
        self.report: dict[str, Any] | None = None
        self._worker = worker
        self._name = worker.model.name
        self._running = running
        self._response = response
        self._sent_at = sent.at
        self._is_usage_asked = sent.is_usage_asked
        self.path = sent.path
        self.is_stream = response.headers.get("Content-Type", "").startswith("text/event-stream")
        self._is_closed = False

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
            await self.aclose()
        if not isinstance(body, dict):
            raise worker_lost(f"The worker of {self._name} sent an answer that is no object.")
        return self._public(body)

    async def events(self) -> AsyncGenerator[Event, None]:
        """The events of a streamed answer, under the model's public name, up to `[DONE]`.

        A worker that ends in the middle gives one last event with an `error` object, as OpenAI's clients
        expect it. Closing the iterator closes the connection, by which the worker sees that nobody listens.
        """
        is_over = False
        try:
            async for event in read_events(self._response.aiter_bytes()):
                if event.data is None:
                    yield event
                    if event.is_done:
                        return
                    continue
                self._note_first_token(event)
                data = self._public(event.data)
                is_over = is_over or event.data.get("type") in _LAST_EVENTS
                if self._is_usage_asked or data.get("choices") or "usage" not in data:
                    yield Event(write_event(data, event.name), data, name=event.name)
                if data.get("error"):
                    return  # the worker's own last word
            if is_over:
                return
            problem = await self._lost(None)
        except httpx.HTTPError as error:
            problem = await self._lost(error)
        finally:
            await self.aclose()
        log.warning("%s", problem.message)
        body, name = problem.body_at(self.path), "" if self.path in _OPENAI else "error"
        yield Event(write_event(body, name), body, name=name)

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
            "%s: %s of %s prompt tokens restored (%s from disk, %s from memory; %s), in %.3f s, saving %.2f s; %s "
            "after %.2f s",
            self._name,
            *(said.get(key) for key in ("cached_tokens", "prompt_tokens", "disk_tokens", "memory_tokens", "reason")),
            *(_seconds(said.get(key)) for key in ("restore_s", "saved_s")),
            "answered" if self.ttft_s is None else "first token",
            took_s if self.ttft_s is None else self.ttft_s,
        )

    def headers(self) -> dict[str, str]:
        """What the cache did, for the head of a reply that is not streamed."""
        said = self.report
        if said is None:
            return {}
        reason = str(said.get("reason") or "")
        told = {"X-Rewarm-Cached-Tokens": str(int(_seconds(said.get("cached_tokens"))))}
        return {**told, "X-Rewarm-Reason": reason} if _WORD.fullmatch(reason) else told

    async def aclose(self) -> None:
        """Close the connection to the worker; the request is over."""
        if not self._is_closed:
            self._is_closed = True
            self._worker.end()
        await self._response.aclose()

    def _note_first_token(self, event: Event) -> None:
        if self.ttft_s is None and event.data and (event.data.get("choices") or _is_delta(event.data)):
            self.ttft_s = time.monotonic() - self._sent_at

    def _public(self, body: dict[str, Any]) -> dict[str, Any]:
        # `/v1/responses` and `/v1/messages` say it one level down in some events.
        for part in (body, body.get("response"), body.get("message")):
            if isinstance(part, dict):
                if "model" in part:
                    part["model"] = self._name
                if isinstance(part.get("rewarm"), dict):
                    self.report = part["rewarm"]
        return body

    async def _lost(self, error: Exception | None) -> Problem:
        return _lost(self._name, await self._running.how_it_ended(), error)


async def ask(
    worker: Worker, path: str, payload: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Answer:
    """Send a request to a model's worker, which is started if it does not run.

    Args:
        worker: of the model that is asked.
        path: of the API, such as `/v1/chat/completions`.
        payload: the request's body, as the client sent it.
        headers: further ones for the worker; see `asking.cache_headers`.

    Raises:
        Problem: the request names files or addresses (400), the worker did not start (503), ended (502), or said no.
    """
    body, is_usage_asked = for_worker(payload, is_openai=path in _OPENAI)
    try:
        raw = json.dumps(body).encode()
    except RecursionError:
        raise Problem(400, "The request's body is nested too deeply.", "invalid_json") from None
    worker.begin()
    try:
        return await _sent(worker, path, raw, headers or {}, is_usage_asked=is_usage_asked)
    except BaseException:
        worker.end()
        raise


async def _sent(worker: Worker, path: str, raw: bytes, headers: Mapping[str, str], *, is_usage_asked: bool) -> Answer:
    # A process that ended before the request reached it is started again; one that ends under it is not.
    for may_start_again in (True, False):
        running = await _started(worker)
        sent = Sent(path, time.monotonic(), is_usage_asked)
        try:
            request = running.client.build_request("POST", path, content=raw, headers={**_JSON, **headers})
            response = await running.client.send(request, stream=True)
        except (httpx.HTTPError, RuntimeError) as error:
            took_s = time.monotonic() - sent.at
            ended = await running.how_it_ended()
            if may_start_again and ended is not None and _had_ended_before(running, error, took_s):
                continue
            raise _lost(worker.model.name, ended, error) from error
        if response.status_code != 200:
            raise await _refusal(worker.model.name, running, response)
        return Answer(worker, running, response, sent)
    raise AssertionError("unreachable")


def _had_ended_before(running: Running, error: Exception, took_s: float) -> bool:
    """Whether the worker was gone when the request came, as far as that can be told.

    A connection may be taken by a process that is being killed. One that ends by itself may do so for the request's
    sake, and would again: it is not asked twice.
    """
    if isinstance(error, httpx.ConnectError | RuntimeError):
        # httpx raises RuntimeError where the client was closed already.
        return True
    return took_s < _AT_ONCE_S and running.process.returncode in _KILLED


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


def _seconds(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else 0.0


def _is_delta(data: Mapping[str, Any]) -> bool:
    """Whether an event of `/v1/messages` or `/v1/responses` carries a part of the reply."""
    return str(data.get("type", "")).endswith((".delta", "_delta")) and data.get("type") != "message_delta"
