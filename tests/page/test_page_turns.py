"""Replies as they come: kept, stopped, failed, tried again; what is sent to the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nicegui", reason="needs the gateway's packages")

from rewarm.gateway.page.engine import Ask, Ended, Event, Kept, ModelView, Reading, State, Text, Trouble
from rewarm.gateway.page.history import Conversation, History, Message
from rewarm.gateway.page.turns import STARTING, Chat, Chats, Turn, prompt_of

REPORT = {"cached_tokens": 8, "disk_tokens": 8, "memory_tokens": 0, "prompt_tokens": 10, "reason": "nothing_stored"}


class Scripted:
    """Models that do what `script` says; an exception in it is raised, an asyncio.Event waited for."""

    def __init__(self, *script: Any) -> None:
        self.script = script
        self.asked: list[list[dict[str, str]]] = []
        self.asks: list[Ask] = []
        self.forgotten: list[str] = []
        self.load_trouble: Exception | None = None
        self.closed = 0

    def views(self) -> Sequence[ModelView]:
        return [ModelView("m", State.READY)]

    async def load(self, _name: str) -> None:
        if self.load_trouble:
            raise self.load_trouble

    async def unload(self, _name: str) -> None:
        pass

    async def kept(self, label: str) -> Kept:
        return Kept(1, 2, 8192) if label not in self.forgotten else Kept(0, 0, 0)

    async def forget(self, label: str) -> Kept:
        self.forgotten.append(label)
        return Kept(1, 2, 8192)

    async def chat(self, _name: str, ask: Ask) -> AsyncIterator[Event]:
        self.asked.append([dict(message) for message in ask.messages])
        self.asks.append(ask)
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            self.closed += 1


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def history(tmp_path: Path) -> History:
    clock = count(1.0)
    return History(tmp_path / "chats", lambda: next(clock))


async def rest(chat: Chat) -> None:
    async with asyncio.timeout(5):
        while chat.is_busy:
            await asyncio.sleep(0.001)


def test_a_reply_comes_in_pieces_and_is_saved(tmp_path: Path) -> None:
    async def test() -> None:
        models = Scripted(Reading(4, 10), Text("Par"), Text("is"), Ended(REPORT, "stop"))
        chats = Chats(models, history(tmp_path))
        chat = chats.new()
        chat.send("  The capital? ", "m")
        assert (chat.is_busy, chat.stage) == (True, STARTING)
        chat.send("ignored while busy", "m")
        await rest(chat)
        saved = history(tmp_path).load()[0]
        assert [message.content for message in saved.messages] == ["The capital?", "Paris"]
        assert saved.messages[1].note.startswith("Restored 8 of 10 tokens from disk · first token after")
        assert saved.messages[1].share == 0.8
        assert (saved.model, chat.stage) == ("m", "")

    run(test)


@pytest.mark.parametrize("trouble", [Trouble("The worker ended."), RuntimeError("a fault")], ids=["trouble", "fault"])
def test_a_failed_reply_says_why_and_can_be_tried_again(tmp_path: Path, trouble: Exception) -> None:
    async def test() -> None:
        models = Scripted(Text("Par"), trouble)
        chat = Chats(models, history(tmp_path)).new()
        chat.send("The capital?", "m")
        await rest(chat)
        assert str(trouble) in chat.conversation.messages[-1].error
        models.script = (Text("Paris"), Ended(None, "stop"))
        chat.again("m")
        await rest(chat)
        assert [(message.content, message.error) for message in chat.conversation.branch()] == [
            ("The capital?", ""),
            ("Paris", ""),
        ]
        assert models.asked[0] == models.asked[1] == [{"role": "user", "content": "The capital?"}]

    run(test)


def test_a_model_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        models = Scripted()
        models.load_trouble = Trouble("No weights.")
        chat = Chats(models, history(tmp_path)).new()
        chat.send("Hello", "m")
        await rest(chat)
        assert chat.conversation.messages[-1].error == "No weights."
        assert models.asked == []

    run(test)


def test_stopping_keeps_what_came_and_closes_the_stream(tmp_path: Path) -> None:
    async def test() -> None:
        models = Scripted(Text("Once upon"), asyncio.Event())
        chat = Chats(models, history(tmp_path)).new()
        chat.send("A story", "m")
        async with asyncio.timeout(5):
            while not chat.conversation.messages[-1].content:
                await asyncio.sleep(0.001)
        await chat.stop()
        assert not chat.is_busy
        assert models.closed == 1
        saved = history(tmp_path).load()[0].messages[-1]
        assert saved.content == "Once upon"
        assert saved.note.endswith("Stopped")

    run(test)


def test_stopping_at_once_leaves_the_question_and_no_task(tmp_path: Path) -> None:
    async def test() -> None:
        chat = Chats(Scripted(Text("x")), history(tmp_path)).new()
        chat.send("A story", "m")
        await chat.stop()
        assert not chat.is_busy
        assert [message.content for message in chat.conversation.messages] == ["A story", ""]

    run(test)


def test_closing_saves_every_reply_as_far_as_it_came(tmp_path: Path) -> None:
    async def test() -> None:
        chats = Chats(Scripted(Text("half"), asyncio.Event()), history(tmp_path))
        chat = chats.new()
        chat.send("A story", "m")
        async with asyncio.timeout(5):
            while not chat.conversation.messages[-1].content:
                await asyncio.sleep(0.001)
        await chats.close()
        again = Chats(Scripted(), history(tmp_path)).latest()
        assert [message.content for message in again.conversation.messages] == ["A story", "half"]

    run(test)


def test_a_folder_that_cannot_be_written_is_told_and_the_reply_comes(tmp_path: Path) -> None:
    async def test() -> None:
        (tmp_path / "chats").write_text("a file in the way")
        chat = Chats(Scripted(Text("Paris"), Ended(None, "stop")), history(tmp_path)).new()
        chat.send("The capital?", "m")
        await rest(chat)
        assert "cannot be saved" in chat.unsaved
        assert chat.conversation.messages[-1].content == "Paris"

    run(test)


def test_deleting_takes_it_from_disk_and_list(tmp_path: Path) -> None:
    async def test() -> None:
        chats = Chats(Scripted(Text("x"), Ended(None, "stop")), history(tmp_path))
        first = chats.new()
        first.send("one", "m")
        await rest(first)
        second = chats.new()
        assert second is not first
        assert chats.new() is second, "one that has not begun is enough"
        second.send("two", "m")
        await rest(second)
        assert chats.all() == [second, first]
        await chats.delete(second)
        assert chats.all() == [first]
        assert [one.id for one in history(tmp_path).load()] == [first.conversation.id]

    run(test)


def test_thinking_counts_as_the_first_token_and_is_not_shown() -> None:
    times = iter([10.0, 10.5, 12.0])
    reply = Message("assistant")
    turn = Turn(reply, lambda: next(times))
    turn.start()
    assert turn.take(Text("hm", is_thought=True)) == "Thinking"
    assert turn.take(Text("Paris")) == ""
    turn.take(Ended(None, "length"))
    turn.end()
    assert reply.content == "Paris"
    assert reply.note == "First token after 500 ms · Ended at the longest reply allowed"


def test_roles_alternate_in_what_is_sent() -> None:
    conversation = Conversation("0" * 32, 0.0, system="Be brief.")
    for message in (
        Message("user", "too long"),
        Message("assistant", "", error="failed"),
        Message("user", "one"),
        Message("assistant", "", note="Stopped"),
        Message("user", "two"),
        Message("assistant", "half", note="Stopped"),
        Message("user", "three"),
    ):
        conversation.add(message)
    assert prompt_of(conversation) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\n\ntwo"},
        {"role": "assistant", "content": "half"},
        {"role": "user", "content": "three"},
    ]
    conversation.system = " \n"
    assert prompt_of(conversation)[0]["role"] == "user"


def test_an_edited_message_and_a_reply_made_anew_stand_beside_the_old_ones(tmp_path: Path) -> None:
    async def test() -> None:
        models = Scripted(Text("Paris"), Ended(None, "stop"))
        chat = Chats(models, history(tmp_path)).new()
        for words in ("one", "two"):
            chat.send(words, "m")
            await rest(chat)
        first, reply, second, _ = chat.conversation.branch()
        chat.edit(second, "two, otherwise", "m")
        await rest(chat)
        assert models.asked[-1] == [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "Paris"},
            {"role": "user", "content": "two, otherwise"},
        ]
        assert [each.content for each in chat.conversation.versions(second)] == ["two", "two, otherwise"]
        chat.again("m", reply)
        await rest(chat)
        assert [each.content for each in chat.conversation.branch()] == ["one", "Paris"]
        assert len(chat.conversation.versions(reply)) == 2
        await chat.show(reply)
        assert [each.content for each in chat.conversation.branch()] == ["one", "Paris", "two, otherwise", "Paris"]
        loaded = history(tmp_path).load()[0]
        assert loaded.branch() == chat.conversation.branch()
        assert len(loaded.messages) == len(chat.conversation.messages) == 7
        assert first.id == 1

    run(test)


def test_a_private_chat_reaches_neither_the_history_nor_the_cache(tmp_path: Path) -> None:
    async def test() -> None:
        models = Scripted(Text("Paris"), Ended(None, "stop"))
        chats = Chats(models, history(tmp_path))
        private, plain = chats.new(is_private=True), chats.new()
        assert private is not plain
        private.send("secret", "m")
        await rest(private)
        await private.set(name="Secret", system="Hush.")
        assert models.asks[-1].is_private and models.asks[-1].label == ""
        assert not (tmp_path / "chats").exists()
        plain.send("hello", "m")
        await rest(plain)
        assert not models.asks[-1].is_private and models.asks[-1].label == plain.conversation.id
        assert len(history(tmp_path).load()) == 1

    run(test)


def test_deleting_erases_what_the_cache_keeps_only_when_asked(tmp_path: Path) -> None:
    async def test() -> None:
        models = Scripted(Text("x"), Ended(None, "stop"))
        chats = Chats(models, history(tmp_path))
        for erase in (False, True):
            chat = chats.new()
            chat.send("hello", "m")
            await rest(chat)
            assert (await chats.kept(chat)).nbytes == 8192
            await chats.delete(chat, erase=erase)
            assert (chat.conversation.id in models.forgotten) is erase

    run(test)


def test_the_time_left_is_told_from_the_speed_so_far() -> None:
    times = iter([0.0, 0.1, 1.1, 2.1])
    turn = Turn(Message("assistant"), lambda: next(times))
    turn.start()
    assert turn.take(Reading(500, 2500)) == "Reading the prompt: 500 of 2,500 tokens"
    assert turn.take(Reading(1000, 2500)) == "Reading the prompt: 1,000 of 2,500 tokens · about 3 s left"
    assert turn.part == 0.4
    turn.take(Text("x"))
    assert turn.part is None


def test_half_a_character_is_replaced_before_it_is_kept_or_sent(tmp_path: Path) -> None:
    async def test() -> None:
        models = Scripted(Text("a\udfffb"), Ended(None, "stop"))
        chat = Chats(models, history(tmp_path)).new()
        chat.send("x\ud800y", "m")
        await rest(chat)
        await chat.set(system="\udc00")
        assert chat.unsaved == ""
        assert models.asked[0] == [{"role": "user", "content": "x\ufffdy"}]
        assert [each.content for each in history(tmp_path).load()[0].messages] == ["x\ufffdy", "a\ufffdb"]

    run(test)


def test_conversations_are_found_by_what_was_said(tmp_path: Path) -> None:
    async def test() -> None:
        chats = Chats(Scripted(Text("Paris"), Ended(None, "stop")), history(tmp_path))
        for words in ("About France", "About tea"):
            chat = chats.new()
            chat.send(words, "m")
            await rest(chat)
        assert [each.conversation.title for each in chats.find("FRANCE par")] == ["About France"]
        assert len(chats.find("")) == 2

    run(test)
