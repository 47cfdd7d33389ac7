"""The slots of a llama-server: what each one holds, who uses it, and which one a prompt gets.

Bookkeeping only: it asks no server and reads no file. What is known of a slot is what we last saw; the
server's own token list decides, and a slot file has it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

NO_TOKENS: Tokens = np.empty(0, np.int64)

_MIN_GAIN_TOKENS = 16
"""For fewer no other conversation gives up its slot: what all prompts of a template begin with is shorter."""


class Point(NamedTuple):
    """One of the restore points that the server keeps of a slot.

    Attributes:
        n_tokens: its length.
        n_shared: how many tokens a prompt must share with the slot, its own last not counted, before the server
            goes on there: with a window it may be more than the length.
    """

    n_tokens: int
    n_shared: int


@dataclass(slots=True, eq=False)
class Slot:
    """One of the server's slots. Changed by whoever holds it, only.

    Attributes:
        id: the server's number of it.
        live: the tokens whose state it holds, as far as we know.
        points: where a state that cannot be cut may be taken up again.
        dirty: whether it holds something that is not saved.
        tainted: why its cells may not be what its token list says; "" when they are.
        n_system: where the system prompt of its tokens ends, if that is known.
        label: the conversation's name, for what is saved of it; or None.
        tenant: whose it is; None where that is not known: it is erased before anybody uses it.
        held: in use by a request.
        saving: in use by a save, which ends soon.
        last_used: rises with every use.
        version: rises with every change of what it may hold.
    """

    id: int
    live: Tokens = field(default_factory=lambda: NO_TOKENS)
    points: tuple[Point, ...] = ()
    dirty: bool = False
    tainted: str = ""
    n_system: int = 0
    label: str | None = None
    tenant: bytes | None = b""
    held: bool = False
    saving: bool = False
    last_used: int = 0
    version: int = 0

    def forget(self) -> None:
        """It holds nothing, as far as we know."""
        self.version += 1
        self.live, self.points, self.dirty, self.tainted, self.n_system = NO_TOKENS, (), False, "", 0
        self.label = None

    def usable(self, tokens: Tokens, cut_anywhere: bool) -> int:  # noqa: FBT001 - a property of the model
        """How many of `tokens` the server can reuse from what the slot holds."""
        # The server evaluates one token at least.
        n = n_common(self.live, tokens[:-1])
        if cut_anywhere or n == len(self.live):
            return n
        return max((point.n_tokens for point in self.points if point.n_shared <= n), default=0)


def n_common(left: Tokens, right: Tokens) -> int:
    """The length of the longest common prefix."""
    n = min(len(left), len(right))
    differ = np.flatnonzero(left[:n] != right[:n])
    return int(differ[0]) if len(differ) else n


class SlotPool:
    """Hands slots to requests, one request at a time. Safe to use from several threads.

    Args:
        n_slots: how many the server has.
        cut_anywhere: whether the model's states may be cut at any token.

    Attributes:
        last_release: rises whenever a request gives a slot back.
    """

    def __init__(self, n_slots: int, *, cut_anywhere: bool = True) -> None:
        self.cut_anywhere = cut_anywhere
        self._slots = [Slot(number) for number in range(n_slots)]
        self._changed = threading.Condition()
        self._clock = 0
        self._n_waiting = 0
        self.last_release = 0

    def __len__(self) -> int:
        return len(self._slots)

    def forget_all(self, *, taint: str = "") -> None:
        """The server is a new one, or something else used its slots: nothing is known of what they hold."""
        with self._changed:
            for slot in self._slots:
                slot.forget()
                slot.tainted = taint

    def forget_idle(self, taint: str, tenant: bytes = b"") -> None:
        """Nothing is known of what idle slots hold: a request of `tenant`, not followed here, may have used them."""
        with self._changed:
            for slot in self._slots:
                if not slot.held:
                    slot.forget()
                if slot.tenant != tenant:
                    slot.tenant = None
                if taint:
                    slot.tainted = taint

    @property
    def n_held(self) -> int:
        """How many slots requests use now."""
        return sum(slot.held for slot in self._slots)

    @property
    def n_waiting(self) -> int:
        """How many requests wait for one."""
        return self._n_waiting

    def take(
        self,
        tokens: Tokens,
        n_stored: int,
        wanted: int | None = None,
        timeout_s: float | None = None,
        tenant: bytes = b"",
    ) -> Slot:
        """The slot that fits `tokens` best, held for the caller until `release`.

        The one that holds most of the prompt, unless that would lose another conversation for something that
        the store has as well: then the least recently used one.

        Args:
            tokens: the prompt.
            n_stored: how many of its tokens could be restored.
            wanted: the only slot that will do, as the client asks.
            timeout_s: how long to wait for one.
            tenant: whose the prompt is: what a slot holds of others is nothing to it.

        Raises:
            TimeoutError: all were in use for that long.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            self._n_waiting += 1
            try:
                while True:
                    slot = self._best(tokens, n_stored, wanted, tenant)
                    if slot is not None and not slot.saving:
                        return self._hold(slot)
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError("all slots are in use")
                    self._changed.wait(left)
            finally:
                self._n_waiting -= 1

    def _hold(self, slot: Slot) -> Slot:
        slot.held = True
        self._clock += 1
        slot.last_used = self._clock
        slot.version += 1
        return slot

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        with self._changed:
            slot.held = False
            self.last_release += 1
            self._changed.notify_all()

    def learn(self, slot: Slot, version: int, live: Tokens, points: tuple[Point, ...]) -> None:
        """Note what an idle slot holds, as its file tells, unless it has been used since `version`."""
        with self._changed:
            if slot.version == version and not slot.held and not slot.tainted:
                slot.live, slot.points = live, points

    def taint(self, slot: Slot, version: int, why: str) -> None:
        """What a slot holds must not be reused nor saved, unless it has been used since `version`.

        A request that holds the slot goes on; what it leaves is tainted all the same.
        """
        with self._changed:
            if slot.version == version:
                slot.tainted, slot.dirty = why, False

    def all(self) -> list[Slot]:
        """Every slot."""
        return list(self._slots)

    def dirty(self) -> list[Slot]:
        """Slots that hold something unsaved, least recently used first."""
        with self._changed:
            return sorted((s for s in self._slots if s.dirty), key=lambda s: s.last_used)

    def wait_for_pause(self, timeout_s: float) -> bool:
        """Wait until no request uses a slot; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(slot.held for slot in self._slots), timeout_s)

    def wait_for_saves(self, timeout_s: float) -> bool:
        """Wait until no slot is being saved; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(slot.saving for slot in self._slots), timeout_s)

    @contextmanager
    def saving(self, slot: Slot) -> Iterator[bool]:
        """Keep requests off an idle slot while it is saved; False when one uses it, or it is being saved."""
        with self._changed:
            free = not slot.held and not slot.saving
            slot.saving = slot.saving or free
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    slot.saving = False
                    self._changed.notify_all()

    def _best(self, tokens: Tokens, n_stored: int, wanted: int | None, tenant: bytes) -> Slot | None:
        if wanted is not None:
            slot = self._slots[wanted % len(self._slots)]
            return None if slot.held else slot
        idle = [slot for slot in self._slots if not slot.held]
        if not idle:
            return None
        fits = {
            slot.id: 0 if slot.tainted or slot.tenant != tenant else slot.usable(tokens, self.cut_anywhere)
            for slot in idle
        }
        # Going on with what a slot holds loses little of it.
        going_on = [slot for slot in idle if fits[slot.id] * 2 >= len(slot.live) and fits[slot.id]]
        best = max(going_on or idle, key=lambda slot: (fits[slot.id], -slot.last_used))
        if going_on or fits[best.id] >= n_stored + _MIN_GAIN_TOKENS:
            return best
        return min(idle, key=lambda slot: (slot.saving, len(slot.live) > 0, slot.last_used))
