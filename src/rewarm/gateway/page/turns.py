"""Conversations that are open, and the replies being made in them. Knows models by `Models`, and no page.

A reply belongs to its conversation and to no page: it goes on while a page is reloaded, and two pages see
the same. Pages look at `version`, many times a second. All of it lives in the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from rewarm.gateway.page.engine import Ended, Event, Models, Reading, Trouble
from rewarm.gateway.page.history import Conversation, History, Message
from rewarm.gateway.page.words import progress, quiet_line, share

log = logging.getLogger(__name__)

STARTING = "Starting the model"
"""The stage in which the model's own state says more."""


class Chat:
    """One conversation, and the reply being made in it.

    Attributes:
        conversation: what has been said.
        version: grows with every change.
        stage: what is being done for the reply, for a person; "" while its text comes, and at rest.
        is_busy: whether a reply is being made.
        unsaved: why the conversation could not be saved last; or "".
    """

    def __init__(self, conversation: Conversation, models: Models, history: History) -> None:
        self.conversation = conversation
        self.version = 0
        self.stage = ""
        self.unsaved = ""
        self._models = models
        self._history = history
        self._task: asyncio.Task[None] | None = None
        self._saving = asyncio.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether a reply is being made."""
        return self._task is not None

    def send(self, text: str, model: str) -> None:
        """Add the user's message and have it answered; nothing happens while a reply is being made."""
        if not self.is_busy and text.strip():
            self.conversation.messages.append(Message("user", text.strip()))
            self._answer(model)

    def again(self, model: str) -> None:
        """Have the last message of the user answered anew."""
        messages = self.conversation.messages
        if self.is_busy or not messages:
            return
        if messages[-1].role == "assistant":
            messages.pop()
        self._answer(model)

    async def stop(self) -> None:
        """End the reply where it is, if one is being made, and wait until it is saved."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            await self.save()

    async def save(self) -> None:
        """Save the conversation as it is now; a failure is told on the page and changes nothing else."""
        async with self._saving:
            try:
                await asyncio.to_thread(self._history.save, self.conversation)
                self.unsaved = ""
            except OSError as error:
                log.warning("rewarm: a conversation cannot be saved: %s", error)
                self.unsaved = f"This conversation cannot be saved ({error.strerror or error})."
            self.version += 1

    def _answer(self, model: str) -> None:
        self.conversation.model = model
        reply = Message("assistant")
        prompt = prompt_of(self.conversation)
        self.conversation.messages.append(reply)
        self._task = asyncio.create_task(self._run(reply, model, prompt))
        # Not the task's own last act: one that is cancelled before it began does nothing at all.
        self._task.add_done_callback(self._ended)
        self._set_stage(STARTING)

    async def _run(self, reply: Message, model: str, prompt: list[dict[str, str]]) -> None:
        turn = Turn(reply)
        try:
            await self.save()
            await self._models.load(model)
            self._set_stage("Reading the prompt")
            turn.start()
            async with contextlib.aclosing(self._models.chat(model, prompt)) as events:  # type: ignore[type-var]
                async for event in events:
                    self._set_stage(turn.take(event))
            turn.end()
        except asyncio.CancelledError:
            turn.end("Stopped")
        except Trouble as trouble:
            reply.error = str(trouble)
        except Exception as error:  # a fault of ours is told in the chat too, and the server stays up
            log.exception("rewarm: a reply failed")
            reply.error = f"The gateway failed in this reply: {type(error).__name__}: {error}"
        finally:
            await self.save()

    def _ended(self, _task: asyncio.Task[None]) -> None:
        self._task = None
        self._set_stage("")

    def _set_stage(self, stage: str) -> None:
        self.stage = stage
        self.version += 1


class Turn:
    """One reply as it comes: its text, its time to first token, and what the cache did.

    Args:
        reply: filled in.
        clock: monotonic seconds.
    """

    def __init__(self, reply: Message, clock: Any = time.monotonic) -> None:
        self._reply = reply
        self._clock = clock
        self._asked_at = 0.0
        self._ttft_s: float | None = None
        self._ended: Ended | None = None

    def start(self) -> None:
        """The request is being sent."""
        self._asked_at = self._clock()

    def take(self, event: Event) -> str:
        """Note an event; gives the stage that the reply is in."""
        if isinstance(event, Reading):
            return progress(event.n_done, event.n_tokens)
        if isinstance(event, Ended):
            self._ended = event
            return ""
        if self._ttft_s is None:
            self._ttft_s = self._clock() - self._asked_at
        if event.is_thought:
            return "Thinking"
        self._reply.content += event.text
        return ""

    def end(self, last_word: str = "") -> None:
        """Write the quiet line; `last_word` says why the reply ended early, if it did."""
        report: Mapping[str, Any] | None = self._ended.report if self._ended else None
        if self._ended and self._ended.finish_reason == "length":
            last_word = "Ended at the longest reply allowed"
        line = quiet_line(report, self._ttft_s)
        self._reply.note = " · ".join(part for part in (line, last_word) if part)
        if report is not None:
            self._reply.detail = str(report.get("detail") or "")
            self._reply.share = share(report)


class Chats:
    """All conversations of a gateway; read from disk when the first page asks."""

    def __init__(self, models: Models, history: History) -> None:
        self._models = models
        self._history = history
        self._chats: dict[str, Chat] | None = None

    def all(self) -> list[Chat]:
        """The conversations that have begun, latest first."""
        begun = [chat for chat in self._loaded().values() if chat.conversation.messages]
        return sorted(begun, key=lambda chat: chat.conversation.updated_s, reverse=True)

    def latest(self) -> Chat:
        """The conversation that changed last; a new one when there is none."""
        return next(iter(self.all()), None) or self.new()

    def get(self, conversation_id: str) -> Chat | None:
        """The conversation of that id, if there is one."""
        return self._loaded().get(conversation_id)

    def new(self) -> Chat:
        """The conversation that has not begun; it is saved when it does."""
        chats = self._loaded()
        for chat in chats.values():
            if not chat.conversation.messages:
                return chat
        chat = Chat(self._history.new(), self._models, self._history)
        chats[chat.conversation.id] = chat
        return chat

    async def delete(self, chat: Chat) -> None:
        """Stop its reply, if any, and remove the conversation and its file.

        Raises:
            OSError: the file cannot be removed; the conversation stays.
        """
        await chat.stop()
        await asyncio.to_thread(self._history.delete, chat.conversation.id)
        self._loaded().pop(chat.conversation.id, None)

    async def close(self) -> None:
        """Stop all replies; each is saved as far as it came."""
        await asyncio.gather(*(chat.stop() for chat in self._loaded().values()))

    def _loaded(self) -> dict[str, Chat]:
        if self._chats is None:
            found = self._history.load()
            self._chats = {one.id: Chat(one, self._models, self._history) for one in found}
        return self._chats


def prompt_of(conversation: Conversation) -> list[dict[str, str]]:
    """The messages to send.

    A message that failed without a reply is left out: one that is too long would make all that follow fail.
    One whose reply was stopped before its first word is joined with the next, since many chat templates
    demand that roles alternate.
    """
    prompt = [{"role": "system", "content": conversation.system}] if conversation.system.strip() else []
    messages = conversation.messages
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        has_failed = following is not None and bool(following.error) and not following.content
        if not message.content or has_failed:
            continue
        if prompt and prompt[-1]["role"] == message.role:
            prompt[-1]["content"] += "\n\n" + message.content
        else:
            prompt.append({"role": message.role, "content": message.content})
    return prompt
