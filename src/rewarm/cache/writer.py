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
from dataclasses import replace

from rewarm.cache.admission import admit
from rewarm.cache.arena import Arena
from rewarm.cache.expiry import Expiry
from rewarm.cache.jobs import Job, Notes
from rewarm.cache.policy import Policy, read_policy
from rewarm.cache.stats import Stats
from rewarm.errors import IndexFault, RewarmError
from rewarm.state.chain import Key
from rewarm.state.reason import Dropped
from rewarm.store.files import RecordName
from rewarm.store.forgotten import Forgotten
from rewarm.store.saves import Save
from rewarm.store.store import Store

log = logging.getLogger("rewarm.cache")

NOTE_INTERVAL_S = 1.0
HEED_DEADLINE_S = 10.0
WANTED_S = 60.0
MAX_UNWRITTEN = 8
"""Saves that were not written of which it is remembered why."""

MAX_UNSYNCED = 10_000
"""Names of records kept for a durable flush; past these it pushes everything."""


class Writer:
    """The queue and its thread.

    Args:
        store: where to write.
        stats: what to count in.
        max_bytes: that waiting saves may take.
        clock: seconds since 1970.
        arena: the memory of waiting saves; trimmed when there are none.
    """

    def __init__(self, store: Store, stats: Stats, max_bytes: int, clock: Callable[[], float], arena: Arena) -> None:
        self._arena = arena
        self._store = store
        self._stats = stats
        self._max_bytes = max_bytes
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._held: list[Job] = []
        self._current: Job | None = None
        self._notes = Notes()
        self._wanted: dict[tuple[Key, ...], float] = {}
        self._synced: list[RecordName] = []
        self._nbytes = 0
        self._closing = False
        self._storing = self._notes_failed = False
        self._ended = False
        self._at_end: Callable[[], None] | None = None
        self._passing = 0
        self._policy = read_policy(store.settings().policy)
        self._sync_all = False
        self._n_forgets = store.n_forgets()
        self._expiry = Expiry(store, clock)
        self._heeding = threading.Lock()
        self._on_forget: list[Callable[[Forgotten], None]] = []
        self._unwritten: deque[tuple[Save, Dropped]] = deque(maxlen=MAX_UNWRITTEN)
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
                for other in self._queue:
                    if other is not job:
                        job.absorb(other)
        if reason is not None:
            self._stats.dropped(reason)
            job.report.queued = False
            job.report.settle(reason)
        return reason is None

    def unwritten(self) -> list[tuple[Save, Dropped]]:
        """The last saves that were not written, and why, without their tensors; the latest first."""
        with self._changed:
            return list(reversed(self._unwritten))

    def policy(self) -> Policy:
        """The rules in force; read anew by the writer's thread every second, and before each save."""
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

    def later(self, task: Callable[[], None]) -> None:
        """Have `task` done on this thread within a second or so, when the root can be used."""
        with self._changed:
            self._notes.tasks.append(task)

    def on_forget(self, callback: Callable[[Forgotten], None]) -> None:
        """Have `callback(forgotten)` called when a conversation is forgotten, by whichever process."""
        self._on_forget.append(callback)

    def heed(self, deadline_s: float = HEED_DEADLINE_S) -> None:
        """Take note of what was forgotten since the last time: drop queued saves of it, and tell who holds it.

        Raises:
            IndexFault: the index cannot be used now.
            TimeoutError: it took longer than `deadline_s`.
        """
        end = time.monotonic() + deadline_s
        if not self._heeding.acquire(timeout=deadline_s):
            raise TimeoutError("what was forgotten is being looked up")
        try:
            number = self._store.n_forgets(max(0.0, end - time.monotonic()))
            if number == self._n_forgets:
                return
            forgotten = self._store.forgotten_since(self._n_forgets)
            self._drop(forgotten)
            for callback in self._on_forget:
                self._tell(callback, forgotten)
            self._n_forgets = number
        finally:
            self._heeding.release()
        with self._changed:
            self._notes.forgets = number
            self._changed.notify_all()

    def _tell(self, callback: Callable[[Forgotten], None], forgotten: Forgotten) -> None:
        try:
            callback(forgotten)
        except Exception:
            # An adapter's fault must neither end this thread nor become a request's error.
            log.exception("an adapter failed when it was told what was forgotten")

    def _drop(self, forgotten: Forgotten) -> None:
        """Drop queued saves that go through what was forgotten; saves that are not known yet remember it."""
        with self._changed:
            waiting = [*self._queue, *self._held, *([self._current] if self._current else [])]
            for job in waiting:
                job.forgotten |= forgotten
                job.absorbed = [save for save in job.absorbed if not forgotten.covers(save.chain)]
            unwritten = [each for each in self._unwritten if not forgotten.covers(each[0].chain)]
            self._unwritten.clear()
            self._unwritten.extend(unwritten)
            dropped = [job for job in self._queue if job.save is not None and forgotten.covers(job.save.chain)]
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
                self._notes.n_attached = self._store.n_attached
                self._changed.notify_all()

    def wake(self) -> None:
        """An identity is known: saves that waited for it can go on."""
        with self._changed:
            self._queue.extend(self._held)
            self._held.clear()
            self._changed.notify_all()

    def flush(self, timeout: float | None, *, durable: bool = False, held: bool = True) -> bool:
        """Wait until everything queued so far is written and every note stored; whether it is.

        Args:
            timeout: seconds, or None.
            durable: push what was written to the medium too.
            held: wait also for saves whose model is not identified yet.
        """
        with contextlib.suppress(IndexFault, TimeoutError):
            self.heed()
        names: list[RecordName] = []
        with self._changed:
            self._passing += 1
            self._changed.notify_all()
            idle = self._changed.wait_for(lambda: self._ended or self._idle(held=held), timeout)
            idle = idle and self._idle(held=held)
            self._passing -= 1
            if durable and idle:
                names, self._synced = self._synced, []
        return idle and (not durable or self._push(names))

    def _push(self, names: list[RecordName]) -> bool:
        try:
            self._store.sync(None if self._sync_all else names)
        except (OSError, IndexFault) as error:
            log.warning("what was saved is written, but could not be pushed to the medium: %s", error)
            with self._changed:
                self._synced = [*names, *self._synced]
            return False
        self._sync_all = False
        return True

    def _idle(self, *, held: bool = True) -> bool:
        waiting = self._queue or self._current or self._storing or (held and self._held)
        return not (waiting or self._has_notes())

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
            # What is being written may still be read from the caller's own arrays: it is done when it is done.
            if not (job.given and job is self._current):
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
                    self._arena.trim()
                job = self._queue.popleft() if self._queue else None
                self._current = job
                stop = self._closing and job is None
            # What was used before this save must not count as more recent than it, nor be evicted for it.
            if job is None or self._has_notes():
                self._store_notes()
            if job is not None:
                self._write(job)
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
            self._nbytes -= job.nbytes
            job.report.settle(reason)
            self._changed.notify_all()

    def _remember(self, save: Save, reason: Dropped | None) -> None:
        """A save was not written, or was: then what is known of earlier ones on its path is out of date."""
        with self._changed:
            others = [each for each in self._unwritten if not save.goes_through(each[0].chain)]
            self._unwritten.clear()
            self._unwritten.extend(others)
            if reason is not None:
                self._unwritten.append((replace(save, drafts=()), reason))

    def _write(self, job: Job) -> None:
        save: Save | None = None
        try:
            save = self._prepared(job)
            if save is None and self._hold(job):
                return
            reason = Dropped.CLOSED if save is None else self._try_to_write(job, save)
        except _Refused as refused:
            reason = refused.reason
        except Exception:
            # The last line of defence: whatever is wrong with one save, the thread goes on with the next.
            log.exception("a save was dropped. What is stored is untouched, and saving goes on.")
            reason = Dropped.UNAVAILABLE
        if save is not None:
            self._remember(save, reason)
        if reason is not None:
            # What it would have made superfluous is needed after all.
            for absorbed in job.absorbed:
                self._commit(absorbed)
        self._finish(job, reason)

    def _hold(self, job: Job) -> bool:
        """Set a save aside whose model is not identified yet; not when the cache is being closed."""
        with self._changed:
            if not self._closing:
                self._held.append(job)
                self._current = None
                self._changed.notify_all()
                return True
        return False

    def _prepared(self, job: Job) -> Save | None:
        try:
            return job.prepare(job.save)
        except IndexFault as error:
            log.warning("a save was dropped: %s. What is stored is untouched, and saving goes on.", error)
            raise _Refused(Dropped.UNAVAILABLE) from None
        except RewarmError as error:
            log.warning("a save was dropped: %s", error)
            raise _Refused(Dropped.IDENTITY_FAILED) from None

    def _try_to_write(self, job: Job, save: Save) -> Dropped | None:
        with contextlib.suppress(IndexFault, TimeoutError):
            self.heed()
        if job.is_forgotten(save):
            return Dropped.FORGOTTEN
        return self._commit(save)

    def _commit(self, save: Save) -> Dropped | None:
        now_s = self._clock()
        day = int(now_s // 86_400)
        try:
            self._refresh_policy()
            save, dropped = admit(save, self._policy, self._store, day)
            if dropped is not None and not save.drafts:
                return dropped
            outcome = self._store.commit(save, self._spared(), now_s)
        except (RewarmError, OSError) as error:
            if isinstance(error, IndexFault):
                self.met(error)
            log.warning("a save was dropped: %s. What is stored is untouched, and saving goes on.", error)
            return Dropped.UNAVAILABLE
        with self._changed:
            self._synced += [draft.name for draft in save.drafts]
            if len(self._synced) > MAX_UNSYNCED:
                self._synced, self._sync_all = [], True
        if outcome.nbytes:
            with contextlib.suppress(IndexFault):
                self._store.count_written(outcome.nbytes, day)
        return outcome.dropped or dropped

    def _refresh_policy(self) -> None:
        with contextlib.suppress(RewarmError):
            self._policy = read_policy(self._store.settings().policy)

    def _spared(self) -> set[Key]:
        """What goes only when nothing else is left: what was just found, and what waiting saves build on."""
        now = time.monotonic()
        with self._changed:
            self._wanted = {path: until for path, until in self._wanted.items() if until > now}
            waiting = [job.save.path for job in self._queue if job.save is not None]
        return {key for path in (*self._wanted, *waiting) for key in path}

    def _store_notes(self) -> None:
        with self._changed:
            notes, self._notes = self._notes, Notes()
            self._storing = True
            now = time.monotonic()
            self._wanted = {path: until for path, until in self._wanted.items() if until > now}
        try:
            self._note(notes)
            self._refresh_policy()
            self.heed()
            self._stats.add_if("expired_entries", self._expiry.sweep(self._policy.keep_days))
        except (RewarmError, OSError) as error:
            log.debug("what was used is noted later: %s", error)
        except Exception:
            # The last line of defence, as for saves: the thread goes on.
            log.exception("noting what was used failed; it is tried again")
        with self._changed:
            self._storing = False
            self._changed.notify_all()

    def _note(self, notes: Notes) -> None:
        """Store notes; what cannot be stored now is put back."""
        counts = self._stats.take()
        stored = False
        try:
            self._store.look_after()
            if notes.index_is_broken and notes.n_attached == self._store.n_attached:
                self._store.renew_index()
            notes.index_is_broken = False
            if notes.forgets is not None:
                self._store.note_forgets(notes.forgets)
                notes.forgets = None
            if notes.paths or notes.ends or counts:
                self._store.note_use(_latest(notes.paths), notes.ends, counts, self._clock())
                notes.paths, notes.ends = [], []
            self._store.erase_log()
            stored = True
            while notes.tasks:
                notes.tasks.pop(0)()
            while notes.bad:
                self._settle(*notes.bad[0])
                notes.bad.pop(0)
        except IndexFault as fault:
            self.met(fault)
            raise
        finally:
            self._stats.settle(stored=stored)
            self._notes_failed = not stored or bool(notes.bad)
            with self._changed:
                self._notes.merge(notes)
            if self._notes_failed:
                time.sleep(0 if self._closing else 0.05)

    def _settle(self, name: RecordName, why: str, missing: bool) -> None:  # noqa: FBT001
        """Deal with one bad record; one that cannot be moved is left where it is, unused by this process."""
        try:
            self._store.settle_bad(name, why, missing=missing)
        except IndexFault:
            raise
        except OSError as error:
            log.warning("%s is damaged and cannot be moved (%s); it is not used", name.file_name, error)
        except Exception:
            log.exception("%s cannot be dealt with; it is not used", name.file_name)


class _Refused(Exception):
    """A save that is not written, and why."""

    def __init__(self, reason: Dropped) -> None:
        super().__init__(reason)
        self.reason = reason


def _latest(paths: Sequence[tuple[Key, ...]]) -> list[tuple[Key, ...]]:
    """Each path once, in the order of its last use."""
    return list(reversed(dict.fromkeys(reversed(paths))))
