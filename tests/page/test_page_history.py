"""Conversations on disk: they come back, belong to their owner, and no damage or odd name does harm."""

from __future__ import annotations

import os
import stat
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("nicegui", reason="needs the gateway's packages")

from rewarm.gateway.page.history import TITLE_CHARS, History, Message


@pytest.fixture
def history(tmp_path: Path) -> History:
    clock = count(1.0)
    return History(tmp_path / "data" / "chats", lambda: next(clock))


def begun(history: History, words: str = "Hello there") -> str:
    conversation = history.new()
    conversation.add(Message("user", words))
    conversation.add(Message("assistant", "Hi", note="Nothing stored", share=0.5))
    history.save(conversation)
    return conversation.id


def test_what_was_saved_comes_back_latest_first(history: History) -> None:
    first, second = begun(history, "one"), begun(history, "two")
    conversations = history.load()
    assert [one.id for one in conversations] == [second, first]
    assert conversations[1].messages == [
        Message("user", "one", id=1),
        Message("assistant", "Hi", "Nothing stored", "", 0.5, id=2, parent=1),
    ]
    conversations[1].updated_s = history.now()
    history.save(conversations[1])
    assert [one.id for one in history.load()] == [first, second]


def test_nothing_is_there_before_the_first_save(history: History) -> None:
    history.new()
    assert history.load() == []
    assert not history.folder.exists()


@pytest.mark.skipif(os.name == "nt", reason="POSIX modes")
def test_only_the_owner_can_read_it(history: History) -> None:
    old = os.umask(0)
    try:
        chat = begun(history)
    finally:
        os.umask(old)
    assert stat.S_IMODE((history.folder / f"{chat}.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(history.folder.stat().st_mode) == 0o700


def test_a_failed_save_leaves_the_old_file_and_no_litter(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(history)
    conversation = history.load()[0]
    before = (history.folder / f"{conversation.id}.json").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    conversation.messages.append(Message("user", "more"))
    with pytest.raises(OSError, match="No space left"):
        history.save(conversation)
    assert [path.name for path in history.folder.iterdir()] == [f"{conversation.id}.json"]
    assert (history.folder / f"{conversation.id}.json").read_bytes() == before


@pytest.mark.parametrize("damage", [b"", b"{", b'{"id": "x"}', b"\xff\xfe", b"[]", b"[" * 100_000, b'{"id":' * 100_000])
def test_a_damaged_file_is_left_alone_and_not_listed(history: History, damage: bytes) -> None:
    kept, broken = begun(history), begun(history)
    (history.folder / f"{broken}.json").write_bytes(damage)
    assert [one.id for one in history.load()] == [kept]
    assert (history.folder / f"{broken}.json").read_bytes() == damage


def test_files_of_others_are_not_read(history: History) -> None:
    chat = begun(history)
    (history.folder / "notes.json").write_text("{}")
    (history.folder / f"{'0' * 32}.json").write_bytes((history.folder / f"{chat}.json").read_bytes())
    assert [one.id for one in history.load()] == [chat]


@pytest.mark.parametrize("name", ["../../x", "", "a", "A" * 32, "0" * 31 + "/", "0" * 33])
def test_an_id_names_no_other_file(history: History, name: str) -> None:
    with pytest.raises(ValueError, match="not the id"):
        history.delete(name)


def test_deleting_removes_the_file_and_twice_is_no_error(history: History) -> None:
    chat = begun(history)
    history.delete(chat)
    history.delete(chat)
    assert list(history.folder.iterdir()) == []


def test_the_title_is_the_first_words_on_one_line(history: History) -> None:
    conversation = history.new()
    assert conversation.title == ""
    conversation.add(Message("user", "  What is\n\na block? " + "x" * 100))
    assert conversation.title.startswith("What is a block? xxx")
    assert len(conversation.title) <= TITLE_CHARS
    assert conversation.title.endswith("…")


def test_a_file_without_branches_is_read_as_one(history: History) -> None:
    name = "a" * 32
    history.folder.mkdir(parents=True)
    said = '[{"role":"user","content":"one"},{"role":"assistant","content":"two"}]'
    raw = f'{{"id":"{name}","updated_s":5,"messages":{said}}}'
    (history.folder / f"{name}.json").write_text(raw)
    assert [each.content for each in history.load()[0].branch()] == ["one", "two"]


@pytest.mark.parametrize("parent", [2, 7, -1])
def test_a_message_that_follows_none_before_it_makes_the_file_unreadable(history: History, parent: int) -> None:
    chat = begun(history)
    path = history.folder / f"{chat}.json"
    path.write_text(path.read_text().replace('"parent": 1', f'"parent": {parent}'))
    assert history.load() == []


def test_halves_of_characters_are_saved_as_something_that_can_be_read(history: History) -> None:
    conversation = history.new()
    conversation.add(Message("user", "a\ud800b"))
    conversation.system = "\udfff"
    history.save(conversation)
    assert history.load()[0].messages[0].content == "a\ufffdb"
