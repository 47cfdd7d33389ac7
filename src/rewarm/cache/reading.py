"""Reading records ahead, on threads of their own, so that nobody waits for a disk beyond a deadline.

A few daemon threads read and verify records while the caller copies the one before. A thread that a disk
holds up is given up by its caller, not ended: as long as all of them are held up, nothing more is read.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from rewarm.cache.assemble import Record, Step
from rewarm.errors import DamagedRecord
from rewarm.state.chain import Key
from rewarm.state.reason import Reason
from rewarm.store.files import RecordName
from rewarm.store.store import Store

THREADS = 2
AHEAD = 3
"""Records that are read, or wait as arrays, before the caller asks for them: bounds the memory beyond the state."""

HELD_UP_S = 0.25


class UnreadableRecord(OSError):
    """A record that the system gave up on reading."""


T = TypeVar("T")


class ReadPool:
    """Threads that read for one cache; started when they are first needed.

    Args:
        n_threads: at most.
        name: of the threads.
    """

    def __init__(self, n_threads: int = THREADS, name: str = "rewarm-reader") -> None:
        self._most, self._name = n_threads, name
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._n_threads = 0
        self._closed = False
        self._given_up: dict[Future[Any], float] = {}

    @property
    def is_held_up(self) -> bool:
        """Whether every thread hangs in a read that its caller has given up, for longer than a read takes."""
        before = time.monotonic() - HELD_UP_S
        with self._lock:
            return sum(since < before for since in self._given_up.values()) >= self._most

    def within(self, task: Callable[[], T], seconds: float) -> T:
        """What `task` gives, which runs on one of the threads; not to be called from one of them.

        Raises:
            TimeoutError: it took longer than `seconds`, or every thread hangs already.
            Exception: what it raises.
        """
        if self.is_held_up:
            raise TimeoutError("the disk does not answer")
        future = self.submit(task)
        try:
            return future.result(max(0.0, seconds))
        except TimeoutError:
            if future.done():
                return future.result()
            self.give_up(future)
            raise

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Have a task run; its future."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(OSError("the cache is closed"))
                return future
            if self._n_threads < self._most:
                self._n_threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._tasks.put((future, task))
        return future

    def close(self) -> None:
        """End the threads when they have read what was asked for; one that a disk holds up ends with its read."""
        with self._lock:
            self._closed = True
            for _ in range(self._n_threads):
                self._tasks.put(None)
            self._n_threads = 0

    def give_up(self, future: Future[Any]) -> None:
        """Nobody waits for this future any more."""
        if future.cancel() or future.done():
            return
        with self._lock:
            self._given_up[future] = time.monotonic()
        future.add_done_callback(self._ended)

    def _ended(self, future: Future[Any]) -> None:
        with self._lock:
            self._given_up.pop(future, None)

    def _run(self) -> None:
        while True:
            found = self._tasks.get()
            if found is None:
                return
            future, task = found
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task())
                except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
                    future.set_exception(error)
            del found, future, task


class RecordReader:
    """Reads the records of one restore.

    Args:
        pool: the threads.
        store: where the records are.
        fingerprint: the namespace.
        end: when to give up, by `time.monotonic`.

    Attributes:
        fingerprint: the namespace.
        last: the record that was asked for last.
        unreadable: records that could not be read in this restore.
        nbytes: bytes of tensors that were read.
    """

    def __init__(self, pool: ReadPool, store: Store, fingerprint: bytes, end: float) -> None:
        self._pool = pool
        self._store = store
        self.fingerprint = fingerprint
        self._end = end
        self._order: list[Step] = []
        self._coming: dict[Step, Future[Record]] = {}
        self.last = RecordName(fingerprint, Key(b""), is_point=False)
        self.unreadable: dict[Key, Reason] = {}
        self.nbytes = 0

    def follow(self, steps: list[Step]) -> None:
        """Read these records ahead, in this order.

        Raises:
            TimeoutError: a record that was being read before is not done in time; it may still be written into its
                place, so that nothing else may be put there.
        """
        self._settle()
        self._order = steps[::-1]

    def read(self, step: Step) -> Record:
        """A record, every byte checked, its tensors where the step says.

        Raises:
            TimeoutError: the time is over, or the disk holds every reading thread up.
            RecordError, OSError: as `Store.read`.
        """
        self.last = self._name(step)
        if self._pool.is_held_up:
            raise TimeoutError("the disk does not answer")
        while self._order and len(self._coming) < AHEAD:
            self._begin(self._order.pop())
        future = self._coming.pop(step)
        try:
            header, arrays = future.result(max(0.0, self._end - time.monotonic()))
        except TimeoutError as error:
            if future.done():
                raise UnreadableRecord(str(error)) from None  # the system's own word for one read that failed
            self._pool.give_up(future)
            raise TimeoutError("the disk took too long") from None
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise DamagedRecord(f"cannot be taken apart: {error}") from None
        self.nbytes += sum(entry.length for entry in header.tensors)
        return header, arrays

    def _begin(self, step: Step) -> None:
        self._coming[step] = self._pool.submit(lambda: self._store.read(self._name(step), step.place))

    def _name(self, step: Step) -> RecordName:
        return RecordName(self.fingerprint, step.key, step.is_point)

    def _settle(self) -> None:
        """Wait for the records that are being read; the others are read no more."""
        self._order.clear()
        running = [future for future in self._coming.values() if not future.cancel()]
        self._coming.clear()
        _, late = wait(running, max(0.0, self._end - time.monotonic()))
        for future in late:
            self._pool.give_up(future)
        if late:
            raise TimeoutError("the disk took too long")

    def drop(self) -> None:
        """Nothing more is read ahead."""
        for future in self._coming.values():
            self._pool.give_up(future)
        self._coming.clear()
        self._order.clear()
