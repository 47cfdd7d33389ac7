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

from rewarm.gateway.page.engine import Ask, Ended, Event, Kept, Models, Reading, Trouble
from rewarm.gateway.page.history import Conversation, History, Message, sound
from rewarm.gateway.page.words import progress, quiet_line, share

log = logging.getLogger(__name__)

STARTING = "Starting the model"
"""The stage in which the model's own state says more."""

MAX_TEMPERATURE = 2.0
MAX_REPLY_TOKENS = 1_000_000
"""More is taken for a slip."""

_RATE_S = 0.5
"""The speed of reading is not told from less time than this."""


class Chat:
    """One conversation, and the reply being made in it.

    Attributes:
        conversation: what has been said.
        is_private: neither the history nor the cache keeps anything of it.
        version: grows with every change.
        stage: what is being done for the reply, for a person; "" while its text comes, and at rest.
        part: of the prompt that has been read, 0 to 1, while that is known; else None.
        is_busy: whether a reply is being made.
        unsaved: why the conversation could not be saved last; or "".
    """

    def __init__(
        self, conversation: Conversation, models: Models, history: History, *, is_private: bool = False
    ) -> None:
        self.conversation = conversation
        self.is_private = is_private
        self.version = 0
        self.stage = ""
        self.part: float | None = None
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
            self.conversation.add(Message("user", sound(text.strip())))
            self._answer(model)

    def edit(self, message: Message, text: str, model: str) -> None:
        """Say `text` in place of a message of the user, in a branch of its own, and have it answered."""
        if not self.is_busy and text.strip() and message in self.conversation.versions(message):
            self.conversation.add(Message("user", sound(text.strip())), message.parent)
            self._answer(model)

    def again(self, model: str, reply: Message | None = None) -> None:
        """Have a reply (None: the last) made anew, beside the old one; one that failed without a word goes."""
        branch = self.conversation.branch()
        if self.is_busy or not branch:
            return
        reply = reply or branch[-1]
        if reply.role == "assistant" and any(each is reply for each in branch):
            if reply is branch[-1] and not reply.content:
                self.conversation.drop_last()
            else:
                self.conversation.leaf = reply.parent
        self._answer(model)

    async def show(self, message: Message) -> None:
        """Show the branch through `message`."""
        if not self.is_busy:
            self.conversation.show(message)
            await self.save()

    async def set(
        self,
        *,
        name: str | None = None,
        system: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """Change what is given of the conversation; a number that makes no sense (0 tokens) is the default again."""
        kept = self.conversation
        if name is not None:
            kept.name = sound(" ".join(name.split()))
        if system is not None:
            kept.system = sound(system)
        if temperature is not None:
            kept.temperature = temperature if 0 <= temperature <= MAX_TEMPERATURE else None
        if max_tokens is not None:
            kept.max_tokens = max_tokens if 0 < max_tokens <= MAX_REPLY_TOKENS else None
        self.version += 1
        if kept.messages:
            await self.save()

    async def stop(self) -> None:
        """End the reply where it is, if one is being made, and wait until it is saved."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            await self.save()

    async def save(self) -> None:
        """Save the conversation as it is now; a failure is told on the page and changes nothing else."""
        if self.is_private:
            self.version += 1
            return
        async with self._saving:
            try:
                await asyncio.to_thread(self._history.save, self.conversation)
                self.unsaved = ""
            except OSError as error:
                log.warning("rewarm: a conversation cannot be saved: %s", error)
                self.unsaved = f"This conversation cannot be saved ({error.strerror or error})."
            self.version += 1

    def _answer(self, model: str) -> None:
        kept = self.conversation
        kept.model, kept.updated_s = model, self._history.now()
        ask = Ask(
            prompt_of(kept),
            label="" if self.is_private else kept.id,
            is_private=self.is_private,
            temperature=kept.temperature,
            max_tokens=kept.max_tokens,
        )
        reply = kept.add(Message("assistant"))
        self._task = asyncio.create_task(self._run(reply, model, ask))
        # Not the task's own last act: one that is cancelled before it began does nothing at all.
        self._task.add_done_callback(self._ended)
        self._set_stage(STARTING)

    async def _run(self, reply: Message, model: str, ask: Ask) -> None:
        turn = Turn(reply)
        try:
            await self.save()
            await self._models.load(model)
            self._set_stage("Reading the prompt")
            turn.start()
            async with contextlib.aclosing(self._models.chat(model, ask)) as events:  # type: ignore[type-var]
                async for event in events:
                    self._set_stage(turn.take(event), turn.part)
            turn.end()
        except asyncio.CancelledError:
            turn.end("Stopped")
        except Trouble as trouble:
            reply.error = sound(str(trouble))
        except Exception as error:  # a fault of ours is told in the chat too, and the server stays up
            log.exception("rewarm: a reply failed")
            reply.error = f"The gateway failed in this reply: {type(error).__name__}: {error}"
        finally:
            self.conversation.updated_s = self._history.now()
            await self.save()

    def _ended(self, _task: asyncio.Task[None]) -> None:
        self._task = None
        self._set_stage("")

    def _set_stage(self, stage: str, part: float | None = None) -> None:
        self.stage, self.part = stage, part
        self.version += 1


class Turn:
    """One reply as it comes: its text, its time to first token, and what the cache did.

    Args:
        reply: filled in.
        clock: monotonic seconds.

    Attributes:
        part: of the prompt that has been read, 0 to 1, while it is being read; else None.
    """

    def __init__(self, reply: Message, clock: Any = time.monotonic) -> None:
        self._reply = reply
        self._clock = clock
        self._asked_at = 0.0
        self._ttft_s: float | None = None
        self._ended: Ended | None = None
        self._first_read: tuple[float, int] | None = None
        self.part: float | None = None

    def start(self) -> None:
        """The request is being sent."""
        self._asked_at = self._clock()

    def take(self, event: Event) -> str:
        """Note an event; gives the stage that the reply is in."""
        if isinstance(event, Reading):
            self.part = min(1.0, event.n_done / event.n_tokens) if event.n_tokens > 0 else None
            return progress(event.n_done, event.n_tokens, self._left_s(event))
        self.part = None
        if isinstance(event, Ended):
            self._ended = event
            return ""
        if self._ttft_s is None:
            self._ttft_s = self._clock() - self._asked_at
        if event.is_thought:
            return "Thinking"
        self._reply.content += sound(event.text)
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

    def _left_s(self, now: Reading) -> float | None:
        """Seconds that the rest of the prompt takes, at the speed since the first that was heard of it."""
        at = self._clock()
        if self._first_read is None or now.n_done < self._first_read[1]:
            self._first_read = (at, now.n_done)
        since, n_before = self._first_read
        if at - since < _RATE_S or now.n_done <= n_before:
            return None
        return (now.n_tokens - now.n_done) * (at - since) / (now.n_done - n_before)


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

    def new(self, *, is_private: bool = False) -> Chat:
        """The conversation that has not begun; it is saved when it does, unless it is private."""
        chats = self._loaded()
        for chat in chats.values():
            if not chat.conversation.messages and chat.is_private == is_private:
                return chat
        chat = Chat(self._history.new(), self._models, self._history, is_private=is_private)
        chats[chat.conversation.id] = chat
        return chat

    def find(self, words: str) -> list[Chat]:
        """The conversations in which all of `words` are found, in the title or in what is said; latest first."""
        wanted = words.casefold().split()
        return [chat for chat in self.all() if not wanted or _has(chat.conversation, wanted)]

    async def kept(self, chat: Chat) -> Kept:
        """What the cache keeps of it.

        Raises:
            Trouble: the cache cannot be used now.
        """
        return Kept(0, 0, 0) if chat.is_private else await self._models.kept(chat.conversation.id)

    async def delete(self, chat: Chat, *, erase: bool = False) -> None:
        """Stop its reply, if any, and remove the conversation and its file; `erase`: first what the cache keeps.

        Raises:
            OSError: the file cannot be removed; the conversation stays.
            Trouble: the cache cannot be used now; the conversation stays.
        """
        await chat.stop()
        if erase and not chat.is_private:
            await self._models.forget(chat.conversation.id)
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


def _has(conversation: Conversation, wanted: list[str]) -> bool:
    said = "\n".join((conversation.title, *(message.content for message in conversation.messages))).casefold()
    return all(word in said for word in wanted)


def prompt_of(conversation: Conversation) -> list[dict[str, str]]:
    """The messages to send.

    A message that failed without a reply is left out: one that is too long would make all that follow fail.
    One whose reply was stopped before its first word is joined with the next, since many chat templates
    demand that roles alternate.
    """
    prompt = [{"role": "system", "content": conversation.system}] if conversation.system.strip() else []
    messages = conversation.branch()
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        has_failed = following is not None and bool(following.error) and not following.content
        if not message.content or has_failed:
            continue
        if prompt and prompt[-1]["role"] == message.role:
            prompt[-1]["content"] += "\n\n" + message.content
        else:
            prompt.append({"role": message.role, "content": message.content})
    return prompt
