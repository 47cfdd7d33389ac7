"""Conversations on disk: one small JSON file each, readable by their owner only.

Knows files and nothing of models, pages or tokens. A file is replaced whole, so a crash leaves the old one
or the new one; a file that cannot be read is left alone and not listed.

Messages form a tree: one that is edited, and a reply that is made anew, stand beside what was there before.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

log = logging.getLogger(__name__)

TITLE_CHARS = 60
_ID = re.compile(r"[0-9a-f]{32}")


class Message(msgspec.Struct):
    """One message of a conversation.

    Attributes:
        role: who wrote it.
        content: its text; a reply's is Markdown.
        note: the quiet line under a reply: what the cache did.
        detail: more about the note, for who asks; or "".
        share: the part of the prompt that was not computed, 0 to 1; None where that is not known.
        error: what went wrong, when the reply failed; or "".
        id: its number in the conversation, from 1.
        parent: the number of the message that it follows; 0 where it is a first one.
    """

    role: Literal["user", "assistant"]
    content: str = ""
    note: str = ""
    detail: str = ""
    share: float | None = None
    error: str = ""
    id: int = 0
    parent: int = 0


class Conversation(msgspec.Struct):
    """A conversation.

    Attributes:
        id: 32 hex characters; names the file.
        updated_s: seconds since the epoch when something was last said in it.
        model: the model chosen for it, by its name on the API; "" when none was.
        system: the system prompt, or "".
        messages: all of all branches; one comes after the one that it follows.
        name: what the user calls it; "" for its first words.
        leaf: the number of the last message of the branch that is shown; 0 where nothing has been said.
        temperature: of the replies; None for the default.
        max_tokens: of a reply; None for the default.
    """

    id: str
    updated_s: float
    model: str = ""
    system: str = ""
    messages: list[Message] = []
    name: str = ""
    leaf: int = 0
    temperature: float | None = None
    max_tokens: int | None = None

    @property
    def title(self) -> str:
        """Its name, else the first words of the first message that is shown."""
        words = " ".join((self.name or self._first_words()).split())
        return words if len(words) <= TITLE_CHARS else words[: TITLE_CHARS - 1].rstrip() + "…"

    def _first_words(self) -> str:
        first = [message.content for message in self.messages if message.parent == 0]
        return first[0] if len(first) == 1 else next((message.content for message in self.branch()), "")

    def branch(self) -> list[Message]:
        """The messages that are shown, oldest first."""
        by_id = {message.id: message for message in self.messages}
        found: list[Message] = []
        at = by_id.get(self.leaf)
        while at is not None:
            found.append(at)
            at = by_id.get(at.parent)
        return found[::-1]

    def add(self, message: Message, parent: int | None = None) -> Message:
        """Add `message` after the one numbered `parent` (None: after the last that is shown), and show it."""
        message.id = max((each.id for each in self.messages), default=0) + 1
        message.parent = self.leaf if parent is None else parent
        self.messages.append(message)
        self.leaf = message.id
        return message

    def versions(self, message: Message) -> list[Message]:
        """The messages that stand at its place, itself among them; oldest first."""
        return [each for each in self.messages if each.parent == message.parent]

    def show(self, message: Message) -> None:
        """Show the branch through `message`, on to what was said last in it."""
        last = {each.parent: each.id for each in self.messages}
        self.leaf = message.id
        while self.leaf in last:
            self.leaf = last[self.leaf]

    def drop_last(self) -> None:
        """Take the last message that is shown away; nothing follows it."""
        gone = next(each for each in self.messages if each.id == self.leaf)
        self.messages.remove(gone)
        self.leaf = gone.parent


def sound(text: str) -> str:
    """`text` as something that can be written: halves of characters, which a browser may send, are replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class History:
    """The conversations in one folder.

    Args:
        folder: made at the first save.
        now: seconds since the epoch.
    """

    def __init__(self, folder: Path, now: Callable[[], float]) -> None:
        self.folder = folder
        self._now = now

    def new(self) -> Conversation:
        """An empty conversation, which is not saved yet."""
        return Conversation(uuid.uuid4().hex, self._now())

    def load(self) -> list[Conversation]:
        """All conversations that can be read, latest first."""
        found = [loaded for path in self._files() if (loaded := self._read(path)) is not None]
        return sorted(found, key=lambda conversation: conversation.updated_s, reverse=True)

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._now()

    def save(self, conversation: Conversation) -> None:
        """Write `conversation` in place of what was saved of it.

        Raises:
            OSError: it cannot be written; what was saved before is still there.
        """
        path = self._path(conversation.id)
        raw = _encoded(conversation)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkstemp makes it 0600.
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=f".{conversation.id}-", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise

    def delete(self, conversation_id: str) -> None:
        """Remove a conversation's file, if there is one.

        Raises:
            OSError: it cannot be removed.
        """
        self._path(conversation_id).unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        try:
            return [path for path in self.folder.glob("*.json") if _ID.fullmatch(path.stem)]
        except OSError as error:
            log.warning("rewarm: the conversations in %s cannot be listed: %s", self.folder, error)
            return []

    def _read(self, path: Path) -> Conversation | None:
        try:
            conversation = msgspec.json.decode(path.read_bytes(), type=Conversation)
            is_whole = conversation.id == path.stem and _mended(conversation)
        # A file that nests too deep is a RecursionError, a number too large for its field may be an OverflowError.
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
            log.warning("rewarm: the conversation %s cannot be read and is not shown: %s", path.name, error)
            return None
        return conversation if is_whole else None

    def _path(self, conversation_id: str) -> Path:
        if not _ID.fullmatch(conversation_id):
            raise ValueError(f"{conversation_id!r} is not the id of a conversation")
        return self.folder / f"{conversation_id}.json"


def _encoded(conversation: Conversation) -> bytes:
    try:
        raw = msgspec.json.encode(conversation)
    except UnicodeEncodeError:
        for each in (conversation, *conversation.messages):
            for field in each.__struct_fields__:
                if isinstance(value := getattr(each, field), str):
                    setattr(each, field, sound(value))
        raw = msgspec.json.encode(conversation)
    return msgspec.json.format(raw, indent=1)


def _mended(conversation: Conversation) -> bool:
    """Number the messages of a file that has no branches yet; whether every message follows one before it."""
    messages = conversation.messages
    if all(message.id == 0 for message in messages):
        for number, message in enumerate(messages, 1):
            message.id, message.parent = number, number - 1
        conversation.leaf = len(messages)
    known = {0}
    for message in messages:
        if message.id in known or message.parent not in known:
            return False
        known.add(message.id)
    if messages and conversation.leaf not in known - {0}:
        conversation.leaf = messages[-1].id
    return math.isfinite(conversation.updated_s)
