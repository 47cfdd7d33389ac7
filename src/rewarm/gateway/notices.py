"""Telling open pages that something changed; they look for themselves what. Knows neither."""

from __future__ import annotations

import asyncio


class Notices:
    """A bell that wakes every listener; rung on the event loop."""

    def __init__(self) -> None:
        self._bells: set[asyncio.Event] = set()

    def tell(self) -> None:
        """Something changed."""
        for bell in self._bells:
            bell.set()

    def listen(self) -> asyncio.Event:
        """An event that is set whenever something changed; its owner clears it."""
        bell = asyncio.Event()
        self._bells.add(bell)
        return bell

    def leave(self, bell: asyncio.Event) -> None:
        """Ring it no more."""
        self._bells.discard(bell)
