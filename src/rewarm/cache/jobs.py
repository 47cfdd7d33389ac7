"""What waits for the writer: saves, and notes of what was used. Plain data; owned by the writer's queue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rewarm.cache.drafts import private
from rewarm.state.chain import Key
from rewarm.state.reason import Boundary, Dropped
from rewarm.store.files import RecordName
from rewarm.store.forgotten import Forgotten
from rewarm.store.saves import Save

MAX_BAD = 1000
"""Bad records that wait to be dealt with, while the index cannot be used."""

MAX_PATHS = 1000
"""Uses that wait to be noted, while the index cannot be used."""


class SaveReport:
    """What became of a save.

    Attributes:
        n_tokens: tokens of the state that was saved.
        nbytes: bytes that were copied into the queue.
        queued: whether the writer has it, or had nothing left to write.
        reason: why it was dropped, wholly or in part, or None.
        refused_tokens: of a state that the queue could not take as a whole: the last tokens whose rows it has not
            taken; 0 when only what else the state consists of is missing. Save the same state again, with room in
            the queue: it goes on there.
    """

    def __init__(self, n_tokens: int, nbytes: int = 0, reason: Dropped | None = None, *, waits: bool = False) -> None:
        self.n_tokens = n_tokens
        self.nbytes = nbytes
        self.reason = reason
        self.refused_tokens = 0
        self.queued = reason is None
        self._done = threading.Event()
        # Of what the queue cannot hold as a whole, a part may wait.
        if reason is not None and not waits:
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether nothing of it waits any more."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing of it waits any more."""
        return self._done.wait(timeout)

    def settle(self, reason: Dropped | None) -> None:
        """The writer is through with it."""
        self.reason = self.reason or reason
        self._done.set()


@dataclass(slots=True, eq=False)
class Job:
    """A save in the queue.

    Attributes:
        prepare: gives the save that is to be written, out of `save`; None while the model's identity is not known;
            raises `RewarmError` when it never will be.
        nbytes: what it holds in memory.
        report: for the caller.
        save: what waits, where it is known already which records that is.
        given: its arrays are the caller's own, left alone until the report is settled.
        absorbed: points of earlier saves that this one makes superfluous, if it is written.
        forgotten: what was forgotten while it waited.
    """

    prepare: Callable[[Save | None], Save | None]
    nbytes: int
    report: SaveReport
    save: Save | None = None
    given: bool = False
    absorbed: list[Save] = field(default_factory=list)
    forgotten: Forgotten = field(default_factory=Forgotten)

    def is_forgotten(self, save: Save) -> bool:
        """Whether `save`, which it has become, goes through something that was forgotten meanwhile."""
        return self.forgotten.covers(save.chain)

    def absorb(self, other: Job) -> None:
        """Take the point out of a waiting save whose entry this one moves on, and keep it until this one is written."""
        if self.save is None or other.save is None or not _goes_on(other.save, self.save):
            return
        points = tuple(draft for draft in other.save.drafts if draft.name.is_point)
        if points:
            nbytes = sum(draft.nbytes for draft in points)
            if other.given:
                # The other save is done, and its arrays used for something else, before this one is written.
                points = tuple(private(draft) for draft in points)
            self.absorbed.append(replace(other.save, drafts=points))
            other.save = replace(other.save, drafts=other.save.drafts[: len(other.save.drafts) - len(points)])
            other.nbytes -= nbytes
            self.nbytes += nbytes


def _goes_on(earlier: Save, later: Save) -> bool:
    """Whether `later` moves on the entry of `earlier`, whose end nobody will ask for then."""
    n = earlier.n
    return (
        earlier.layout.rows_only
        and earlier.boundary is not Boundary.SYSTEM
        and earlier.label in (None, later.label)
        and earlier.chain.root == later.chain.root
        and n < later.n
        and bool((earlier.chain.tokens == later.chain.tokens[:n]).all())
    )


@dataclass(slots=True)
class Notes:
    """What was used since the last time that it was stored."""

    paths: list[tuple[Key, ...]] = field(default_factory=list)
    ends: list[Key] = field(default_factory=list)
    bad: list[tuple[RecordName, str, bool]] = field(default_factory=list)
    tasks: list[Callable[[], None]] = field(default_factory=list)
    forgets: int | None = None
    index_is_broken: bool = False
    n_attached: int = 0

    def merge(self, other: Notes) -> None:
        """Put back what could not be stored, before what has come since."""
        self.paths[:0] = other.paths
        self.ends[:0] = other.ends
        self.tasks[:0] = other.tasks
        self.bad = [*other.bad, *self.bad][-MAX_BAD:]
        self.forgets = other.forgets if self.forgets is None else self.forgets
        self.index_is_broken = self.index_is_broken or other.index_is_broken
        self.n_attached = max(self.n_attached, other.n_attached)
        del self.paths[:-MAX_PATHS], self.ends[:-MAX_PATHS], self.tasks[:-MAX_PATHS]
