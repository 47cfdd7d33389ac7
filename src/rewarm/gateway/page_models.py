"""The gateway's workers as the chat page sees them: fills in `page.engine.Models`. Knows no page."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from rewarm.errors import EngineError
from rewarm.gateway import relay
from rewarm.gateway.app import Gateway
from rewarm.gateway.page.engine import Ended, Event, ModelView, Reading, State, Text, Trouble
from rewarm.gateway.problems import Problem

MAX_TOKENS = 1024
"""The most tokens of one reply: a small model seldom ends by itself before it repeats itself."""

TEMPERATURE = 0.2
"""What the bundled model's makers advise; 0 makes a small model repeat itself."""

_PROGRESS = re.compile(r"keepalive (\d+)/(\d+)")


class PageModels:
    """The models of `gateway`."""

    def __init__(self, gateway: Gateway) -> None:
        self._workers = gateway.workers

    def views(self) -> Sequence[ModelView]:
        """All models, in the order to offer them."""
        return [
            ModelView(
                worker.model.name, State(worker.status.state.value), worker.status.message, worker.status.progress
            )
            for worker in self._workers
        ]

    async def load(self, name: str) -> None:
        """Return when the model can answer.

        Raises:
            Trouble: it cannot be loaded.
        """
        try:
            await self._workers.get(name).running()
        except EngineError as error:
            raise Trouble(str(error)) from error
        except Problem as problem:
            raise Trouble(problem.message) from problem

    async def unload(self, name: str) -> None:
        """Stop the model and free its memory; what it holds is written first."""
        if name in self._workers:
            await self._workers.get(name).stop()

    async def chat(self, name: str, messages: Sequence[Mapping[str, str]]) -> AsyncGenerator[Event, None]:
        """Ask for a reply; events as they come. Closing the iterator stops the model.

        Raises:
            Trouble: there will be no more of the reply.
        """
        payload: dict[str, Any] = {
            "model": name,
            "messages": [dict(message) for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": MAX_TOKENS,
            "temperature": TEMPERATURE,
        }
        try:
            answer = await relay.ask(self._workers.get(name), "/v1/chat/completions", payload)
        except Problem as problem:
            raise Trouble(problem.message) from problem
        finish_reason = ""
        async with contextlib.aclosing(answer), contextlib.aclosing(answer.events()) as events:
            async for event in events:
                if event.data is None:
                    if match := _PROGRESS.search(event.comment):
                        yield Reading(int(match[1]), int(match[2]))
                    continue
                if "error" in event.data:
                    raise Trouble(_message(event.data["error"]))
                finish_reason = _finish_reason(event.data) or finish_reason
                for piece in _texts(event.data):
                    yield piece
        answer.note()
        yield Ended(answer.report, finish_reason)


def _texts(data: Mapping[str, Any]) -> Iterator[Text]:
    for choice in data.get("choices") or ():
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning") or delta.get("reasoning_content")
        if thought:
            yield Text(thought, is_thought=True)
        if delta.get("content"):
            yield Text(delta["content"])


def _finish_reason(data: Mapping[str, Any]) -> str:
    return next((choice["finish_reason"] for choice in data.get("choices") or () if choice.get("finish_reason")), "")


def _message(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
