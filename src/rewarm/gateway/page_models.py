"""The gateway's workers as the chat page sees them: fills in `page.engine.Models`. Knows no page."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from rewarm.errors import EngineError
from rewarm.gateway import relay
from rewarm.gateway.app import Gateway
from rewarm.gateway.models import find_models
from rewarm.gateway.page.engine import Ask, Effect, Ended, Event, Kept, ModelView, Reading, State, Text, Trouble
from rewarm.gateway.problems import Problem
from rewarm.gateway.routes_models import ModelReport, change_options, report
from rewarm.store.room import Removal

MAX_TOKENS = 1024
"""The most tokens of one reply: a small model seldom ends by itself before it repeats itself."""

TEMPERATURE = 0.2
"""What the bundled model's makers advise; 0 makes a small model repeat itself."""

_PROGRESS = re.compile(r"keepalive (\d+)/(\d+)")


class PageModels:
    """The models of `gateway`."""

    def __init__(self, gateway: Gateway) -> None:
        self._workers = gateway.workers
        self._disk_cache = gateway.disk_cache
        self._settings = gateway.settings

    def views(self) -> Sequence[ModelView]:
        """All models, in the order to offer them."""
        return [
            ModelView(
                worker.model.name, State(worker.status.state.value), worker.status.message, worker.status.progress
            )
            for worker in self._workers
        ]

    def details(self) -> Sequence[ModelView]:
        """As `views`, with all that the Models page tells."""
        return [_detailed(report(worker, self._workers)) for worker in self._workers]

    async def scan(self) -> None:
        """Look for models again."""
        await self._workers.offer(await asyncio.to_thread(find_models, self._settings))

    async def change(self, name: str, changes: Mapping[str, Any], *, dry_run: bool) -> Effect:
        """Run a model otherwise, from when it is loaded next; with `dry_run`, only say what that does.

        Raises:
            Trouble: the options make no sense, or cannot be kept. Nothing was changed.
        """
        try:
            worker = self._workers.get(name)
            done = await change_options(worker, self._workers, self._disk_cache, dict(changes), dry_run=dry_run)
        except Problem as problem:
            raise Trouble(problem.message) from problem
        return Effect(done.new_cache, done.left_bytes)

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

    async def kept(self, label: str) -> Kept:
        """What forgetting the entries of that label would erase.

        Raises:
            Trouble: the cache cannot be used now.
        """
        return await self._labelled(label, dry_run=True)

    async def forget(self, label: str) -> Kept:
        """Erase the entries of that label, and all that only they need; what was erased.

        Raises:
            Trouble: the cache cannot be used now; nothing, or a part, was erased.
        """
        return await self._labelled(label, dry_run=False)

    async def _labelled(self, label: str, *, dry_run: bool) -> Kept:
        def look() -> Kept:
            with self._disk_cache.use() as cache:
                found = [entry for entry in cache.entries() if entry.label == label]
                removal = cache.forget(*found, dry_run=dry_run) if found else Removal()
            return Kept(len(found), removal.n_files, removal.nbytes)

        try:
            return await asyncio.to_thread(look)
        except Problem as problem:
            raise Trouble(problem.message) from problem

    async def chat(self, name: str, ask: Ask) -> AsyncGenerator[Event, None]:
        """Ask for a reply; events as they come. Closing the iterator stops the model.

        Raises:
            Trouble: there will be no more of the reply.
        """
        payload: dict[str, Any] = {
            "model": name,
            "messages": [dict(message) for message in ask.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": MAX_TOKENS if ask.max_tokens is None else ask.max_tokens,
            "temperature": TEMPERATURE if ask.temperature is None else ask.temperature,
        }
        try:
            answer = await relay.ask(self._workers.get(name), "/v1/chat/completions", payload, _headers(ask))
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


def _detailed(said: ModelReport) -> ModelView:
    return ModelView(
        said.name,
        State(said.state.value),
        said.message,
        said.progress,
        source=said.source,
        engine=said.engine,
        nbytes=said.nbytes,
        memory_bytes=said.memory_bytes,
        why_not=said.why_not,
        options=said.options.model_dump(),
        reload_needed=said.reload_needed,
        log=said.log,
    )


def _headers(ask: Ask) -> dict[str, str]:
    if ask.is_private:
        return {"X-Rewarm-Cache": "off"}
    return {"X-Rewarm-Conversation": ask.label} if ask.label else {}


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
