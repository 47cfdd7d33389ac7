"""The titles of the chat page's conversations, by id. Reads the history's files again only when one has changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path

from rewarm.gateway.page.history import History

Stamp = tuple[tuple[str, int], ...]


class Titles:
    """The titles in one folder of conversations.

    Args:
        folder: of the chat history.
    """

    def __init__(self, folder: Path) -> None:
        self._history = History(folder, time.time)
        self._lock = threading.Lock()
        self._stamp: Stamp | None = None
        self._titles: dict[str, str] = {}

    def __call__(self) -> Mapping[str, str]:
        """Titles by the conversation's id; none of conversations that nothing has been said in."""
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp:
                self._titles = {each.id: each.title for each in self._history.load() if each.title}
                self._stamp = stamp
            return self._titles

    def _look(self) -> Stamp:
        try:
            return tuple(sorted((path.name, path.stat().st_mtime_ns) for path in self._history.folder.glob("*.json")))
        except OSError:
            return ()
