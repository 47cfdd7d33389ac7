"""Conversations on disk: one small JSON file each, readable by their owner only.

Knows files and nothing of models, pages or tokens. A file is replaced whole, so a crash leaves the old one
or the new one; a file that cannot be read is left alone and not listed.
"""

from __future__ import annotations

import contextlib
import logging
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
    """

    role: Literal["user", "assistant"]
    content: str = ""
    note: str = ""
    detail: str = ""
    share: float | None = None
    error: str = ""


class Conversation(msgspec.Struct):
    """A conversation.

    Attributes:
        id: 32 hex characters; names the file.
        updated_s: seconds since the epoch when it last changed.
        model: the model chosen for it, by its name on the API; "" when none was.
        system: the system prompt, or "".
        messages: oldest first.
    """

    id: str
    updated_s: float
    model: str = ""
    system: str = ""
    messages: list[Message] = []

    @property
    def title(self) -> str:
        """The first words of the first message."""
        words = " ".join(self.messages[0].content.split()) if self.messages else ""
        return words if len(words) <= TITLE_CHARS else words[: TITLE_CHARS - 1].rstrip() + "…"


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

    def save(self, conversation: Conversation) -> None:
        """Write `conversation` in place of what was saved of it.

        Raises:
            OSError: it cannot be written; what was saved before is still there.
        """
        path = self._path(conversation.id)
        conversation.updated_s = self._now()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkstemp makes it 0600.
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=f".{conversation.id}-", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(conversation), indent=1))
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
        except (OSError, msgspec.DecodeError) as error:
            log.warning("rewarm: the conversation %s cannot be read and is not shown: %s", path.name, error)
            return None
        return conversation if conversation.id == path.stem else None

    def _path(self, conversation_id: str) -> Path:
        if not _ID.fullmatch(conversation_id):
            raise ValueError(f"{conversation_id!r} is not the id of a conversation")
        return self.folder / f"{conversation_id}.json"
