"""What is known of a worker's process: where it is in its life, and the process that runs. Starts nothing."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from dataclasses import dataclass, field

import httpx

from rewarm.gateway.child_process import Child


class State(enum.StrEnum):
    """Where a worker is in its life."""

    STOPPED = "stopped"
    PREPARING = "preparing"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Status:
    """What a worker is doing, for people and programs.

    Attributes:
        state: where it is in its life.
        message: what it is doing, or why it failed; "" when there is nothing to say.
        progress: the part done, 0 to 1, where that is known.
    """

    state: State
    message: str = ""
    progress: float | None = None


@dataclass(slots=True)
class Running:
    """A process that runs, or ran, and what looks after it.

    Attributes:
        client: sends requests to it, with its secret.
        process: the process.
        watcher: waits for its end; None until it does.
        has_ended: set when it ended, or is being ended.
        ending: how, in a sentence.
    """

    client: httpx.AsyncClient
    process: Child
    watcher: asyncio.Task[None] | None = None
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    ending: str = ""

    async def how_it_ended(self, timeout_s: float = 1.0) -> str | None:
        """How it ended; None if it did not within `timeout_s`.

        A connection breaks a moment before its process is gone: that moment is waited for.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.has_ended.wait()
        return self.ending if self.has_ended.is_set() else None

    def note_end(self, ending: str) -> None:
        """It ended, or is being ended; the first note counts."""
        if not self.has_ended.is_set():
            self.ending = ending
            self.has_ended.set()
