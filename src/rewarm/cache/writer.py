"""The writer: one thread that writes what was saved, from a queue bounded in bytes, and stores what was used.

Callers wait for nothing: a save that the queue cannot take is dropped and counted. The thread belongs to
the `PrefixCache` that made it, ends with it, and is the only one that commits saves.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rewarm.cache.admission import admit
from rewarm.cache.expiry import Expiry
from rewarm.cache.policy import Policy, read_policy
from rewarm.cache.stats import Stats
from rewarm.errors import IndexFault, RewarmError
from rewarm.format.record import finite
from rewarm.state.chain import Key
from rewarm.state.reason import Boundary, Dropped
from rewarm.store.files import RecordName
from rewarm.store.saves import Save
from rewarm.store.store import Store

log = logging.getLogger("rewarm.cache")

NOTE_INTERVAL_S = 1.0
HEED_DEADLINE_S = 10.0
WANTED_S = 60.0
MAX_BAD = 1000
"""Bad records that wait to be dealt with, while the index cannot be used."""


class SaveReport:
    """What became of a save.

    Attributes:
        n_tokens: tokens of the state that was saved.
        nbytes: bytes that were copied into the queue.
        queued: whether the writer has it, or had nothing left to write.
        reason: why it was dropped, wholly or in part, or None.
    """

    def __init__(self, n_tokens: int, nbytes: int = 0, reason: Dropped | None = None) -> None:
        self.n_tokens = n_tokens
        self.nbytes = nbytes
        self.reason = reason
        self.queued = reason is None
        self._done = threading.Event()
        if reason is not None:
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
    """

    prepare: Callable[[Save | None], Save | None]
    nbytes: int
    report: SaveReport
    save: Save | None = None


@dataclass(slots=True)
class _Notes:
    """What was used since the last time that it was stored."""

    paths: list[tuple[Key, ...]] = field(default_factory=list)
    ends: list[Key] = field(default_factory=list)
    bad: list[tuple[RecordName, str, bool]] = field(default_factory=list)
    forgets: int | None = None
    index_is_broken: bool = False


class Writer:
    """The queue and its thread.

    Args:
        store: where to write.
        stats: what to count in.
        max_bytes: that waiting saves may take.
        clock: seconds since 1970.
    """

    def __init__(self, store: Store, stats: Stats, max_bytes: int, clock: Callable[[], float]) -> None:
        self._store = store
        self._stats = stats
        self._max_bytes = max_bytes
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._held: list[Job] = []
        self._current: Job | None = None
        self._notes = _Notes()
        self._wanted: dict[tuple[Key, ...], float] = {}
        self._synced: list[RecordName] = []
        self._nbytes = 0
        self._closing = False
        self._storing = self._notes_failed = False
        self._ended = False
        self._at_end: Callable[[], None] | None = None
        self._passing = 0
        self._policy, self._policy_s = read_policy(store.settings().policy), time.monotonic()
        self._n_forgets = store.n_forgets()
        self._expiry = Expiry(store, clock)
        self._heeding = threading.Lock()
        self._on_forget: list[Callable[[frozenset[Key]], None]] = []
        self._thread = threading.Thread(target=self._run, name="rewarm-writer", daemon=True)
        self._thread.start()

    @property
    def queue_bytes(self) -> int:
        """Bytes that waiting saves hold."""
        return self._nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes that the queue can still take."""
        return self._max_bytes - self._nbytes

    def pending_keys(self) -> set[Key]:
        """Keys of records that wait to be written."""
        with self._changed:
            jobs = [*self._queue, *self._held, *([self._current] if self._current else [])]
            return {draft.name.key for job in jobs if job.save for draft in job.save.drafts}

    def put(self, job: Job) -> bool:
        """Queue a save; false when it is dropped."""
        with self._changed:
            reason = Dropped.CLOSED if self._closing else None
            if reason is None and job.nbytes > self.free_bytes:
                reason = Dropped.QUEUE_FULL
            if reason is None:
                self._queue.append(job)
                self._nbytes += job.nbytes
                self._changed.notify_all()
                self._absorb(job)
        if reason is not None:
            self._stats.dropped(reason)
            job.report.queued = False
            job.report.settle(reason)
        return reason is None

    def _absorb(self, job: Job) -> None:
        """Take the points out of waiting saves whose entry `job` moves on; their blocks are still needed."""
        for other in self._queue:
            if other is not job and other.save is not None and job.save is not None and _goes_on(other.save, job.save):
                blocks = tuple(draft for draft in other.save.drafts if not draft.name.is_point)
                point_nbytes = sum(draft.nbytes for draft in other.save.drafts if draft.name.is_point)
                other.save = replace(other.save, drafts=blocks)
                other.nbytes -= point_nbytes
                self._nbytes -= point_nbytes

    def policy(self) -> Policy:
        """The rules in force; read anew after a second, or when a save is written."""
        now = time.monotonic()
        if now > self._policy_s + NOTE_INTERVAL_S:
            with contextlib.suppress(RewarmError):
                self._policy, self._policy_s = read_policy(self._store.settings().policy), now
        return self._policy

    def note(self, path: tuple[Key, ...], end: Key | None = None) -> None:
        """A path was used now; `end` when it was restored."""
        with self._changed:
            self._notes.paths.append(path)
            if end is not None:
                self._notes.ends.append(end)

    def want(self, path: tuple[Key, ...]) -> None:
        """Spare a path for a minute while anything else can go: it was found and is about to be restored."""
        with self._changed:
            self._wanted[path] = time.monotonic() + WANTED_S

    def had(self, path: tuple[Key, ...]) -> None:
        """A path that was found has been restored."""
        with self._changed:
            self._wanted.pop(path, None)

    def settle_bad(self, name: RecordName, why: str, *, missing: bool) -> None:
        """Have a bad or missing record dealt with."""
        with self._changed:
            self._notes.bad.append((name, why, missing))
            self._changed.notify_all()

    def on_forget(self, callback: Callable[[frozenset[Key]], None]) -> None:
        """Have `callback(keys)` called when a conversation is forgotten, by whichever process."""
        self._on_forget.append(callback)

    def heed(self, deadline_s: float = HEED_DEADLINE_S) -> None:
        """Take note of what was forgotten since the last time: drop queued saves of it, and tell who holds it.

        Raises:
            TimeoutError: others hold the index longer than `deadline_s`.
            IndexFault: the index cannot be used now.
        """
        with self._heeding:
            number = self._store.n_forgets(deadline_s)
            if number == self._n_forgets:
                return
            keys = frozenset(self._store.forgotten_since(self._n_forgets))
            self._drop(keys)
            for callback in self._on_forget:
                callback(keys)
            self._n_forgets = number
        with self._changed:
            self._notes.forgets = number
            self._changed.notify_all()

    def _drop(self, keys: frozenset[Key]) -> None:
        """Drop queued saves that would write a forgotten record, or one that hangs from it."""
        with self._changed:
            dropped = [job for job in self._queue if job.save is not None and not keys.isdisjoint(_all_keys(job.save))]
            for job in dropped:
                self._queue.remove(job)
                self._nbytes -= job.nbytes
        for job in dropped:
            job.report.settle(Dropped.FORGOTTEN)
            self._stats.dropped(Dropped.FORGOTTEN)

    def met(self, fault: IndexFault) -> None:
        """The index could not be used; when it is broken it is built anew."""
        if fault.broken:
            with self._changed:
                self._notes.index_is_broken = True
                self._changed.notify_all()

    def wake(self) -> None:
        """An identity is known: saves that waited for it can go on."""
        with self._changed:
            self._queue.extend(self._held)
            self._held.clear()
            self._changed.notify_all()

    def flush(self, timeout: float | None, *, durable: bool = False) -> bool:
        """Wait until everything queued so far is written and every note stored; whether it is."""
        with contextlib.suppress(IndexFault, TimeoutError):
            self.heed()
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._passing += 1
            self._changed.notify_all()
            idle = self._changed.wait_for(lambda: self._idle() or not self._thread.is_alive(), timeout)
            self._passing -= 1
            names, self._synced = (self._synced, []) if durable else ([], self._synced)
        if durable and idle:
            try:
                self._store.sync(names)
            except (OSError, IndexFault) as error:
                log.warning("what was saved is written, but could not be pushed to the medium: %s", error)
                return False
        return idle and (end is None or time.monotonic() <= end + 1.0)

    def _idle(self) -> bool:
        return not (self._queue or self._held or self._current or self._storing or self._has_notes())

    def _has_notes(self) -> bool:
        notes = self._notes
        urgent = notes.bad or notes.forgets or notes.index_is_broken
        return bool(urgent or notes.paths or notes.ends or self._stats.peek())

    def close(self, timeout: float | None) -> int:
        """Stop taking saves, write what waits; how many saves were left unwritten at the deadline."""
        with self._changed:
            self._closing = True
            self._queue.extend(self._held)
            self._held.clear()
            self._changed.notify_all()
        self._thread.join(timeout)
        with self._changed:
            left = [*self._queue, *([self._current] if self._current else [])]
            self._queue.clear()
        for job in left:
            job.report.settle(Dropped.CLOSED)
        return len(left)

    def when_ended(self, callback: Callable[[], None]) -> None:
        """After `close`: call `callback` when the thread has ended; now, if it has, else on that thread."""
        with self._changed:
            if not self._ended:
                self._at_end = callback
                return
        callback()

    # The thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(self._due, NOTE_INTERVAL_S):
                    self._queue.extend(self._held)
                    self._held.clear()
                job = self._queue.popleft() if self._queue else None
                self._current = job
                stop = self._closing and job is None
            # What was used before this save must not count as more recent than it, nor be evicted for it.
            if job is None or self._has_notes():
                self._store_notes()
            if job is not None:
                self._finish(job, self._write(job))
            if stop:
                break
        with self._changed:
            self._ended = True
            at_end = self._at_end
        if at_end is not None:
            at_end()

    def _due(self) -> bool:
        urgent = self._notes.bad and not self._notes_failed
        return bool(self._queue or urgent or self._closing or (self._passing and self._has_notes()))

    def _finish(self, job: Job, reason: Dropped | None) -> None:
        if reason is not None:
            self._stats.dropped(reason)
        with self._changed:
            self._current = None
            if job in self._held:
                return
            self._nbytes -= job.nbytes
            job.report.settle(reason)
            self._changed.notify_all()

    def _write(self, job: Job) -> Dropped | None:
        try:
            return self._try_to_write(job)
        except Exception:
            # The last line of defence: whatever is wrong with one save, the thread goes on with the next.
            log.exception("a save was dropped. What is stored is untouched, and saving goes on.")
            return Dropped.UNAVAILABLE

    def _try_to_write(self, job: Job) -> Dropped | None:
        try:
            save = job.prepare(job.save)
        except IndexFault as error:
            log.warning("a save was dropped: %s. What is stored is untouched, and saving goes on.", error)
            return Dropped.UNAVAILABLE
        except RewarmError as error:
            log.warning("a save was dropped: %s", error)
            return Dropped.IDENTITY_FAILED
        if save is None:
            with self._changed:
                if self._closing:
                    return Dropped.CLOSED
                self._held.append(job)
            return None
        for draft in save.drafts:
            if not all(finite(part) for part in draft.parts):
                log.warning("a state with NaN or infinity was not saved")
                return Dropped.NOT_FINITE
        return self._commit(save)

    def _commit(self, save: Save) -> Dropped | None:
        now_s = self._clock()
        day = int(now_s // 86_400)
        try:
            self.heed()
            save, dropped = admit(save, self.policy(), self._store, day)
            if dropped is not None and not save.drafts:
                return dropped
            outcome = self._store.commit(save, self._spared(), now_s)
            if outcome.nbytes:
                self._store.count_written(outcome.nbytes, day)
        except (RewarmError, OSError) as error:
            if isinstance(error, IndexFault):
                self.met(error)
            log.warning("a save was dropped: %s. What is stored is untouched, and saving goes on.", error)
            return Dropped.UNAVAILABLE
        with self._changed:
            self._synced += [draft.name for draft in save.drafts]
        return outcome.dropped or dropped

    def _spared(self) -> set[Key]:
        """What goes only when nothing else is left: what was just found, and what waiting saves build on."""
        now = time.monotonic()
        with self._changed:
            self._wanted = {path: until for path, until in self._wanted.items() if until > now}
            waiting = [job.save.path for job in self._queue if job.save is not None]
        return {key for path in (*self._wanted, *waiting) for key in path}

    def _store_notes(self) -> None:
        with self._changed:
            notes, self._notes = self._notes, _Notes()
            self._storing = True
        counts = self._stats.take()
        try:
            self._store.look_after()
            if notes.index_is_broken:
                self._store.renew_index()
            if notes.forgets is not None:
                self._store.note_forgets(notes.forgets)
            for name, why, missing in notes.bad:
                self._store.settle_bad(name, why, missing=missing)
            if notes.paths or notes.ends or counts:
                self._store.note_use(_latest(notes.paths), notes.ends, counts, self._clock())
        except (IndexFault, OSError) as error:
            if isinstance(error, IndexFault):
                self.met(error)
            log.debug("recency and counters wait: %s", error)
            self._stats.settle(stored=False)
            self._notes_failed = True
            with self._changed:
                self._notes.bad = [*notes.bad, *self._notes.bad][-MAX_BAD:]
            time.sleep(0 if self._closing else 0.05)
        else:
            self._stats.settle(stored=True)
            self._notes_failed = False
        with self._changed:
            self._storing = False
            self._changed.notify_all()
        with contextlib.suppress(RewarmError, OSError):
            self.heed()
            self._stats.add_if("expired_entries", self._expiry.sweep(self.policy().keep_days))


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


def _all_keys(save: Save) -> list[Key]:
    return [*save.chain.blocks(), save.chain.point(save.n)]


def _latest(paths: Sequence[tuple[Key, ...]]) -> list[tuple[Key, ...]]:
    """Each path once, in the order of its last use."""
    return list(reversed(dict.fromkeys(reversed(paths))))
