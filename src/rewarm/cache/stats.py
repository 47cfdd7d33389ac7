"""Counters: what the cache did, in numbers. In memory until the writer stores them, within a second or so."""

from __future__ import annotations

import threading

from rewarm.state.reason import Dropped, Reason


class Stats:
    """Counters of one process, safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, int] = {}
        self._taken: dict[str, int] = {}

    def add(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._pending[name] = self._pending.get(name, 0) + by

    def add_if(self, name: str, by: int) -> None:
        """Add to a counter, if there is something to add."""
        if by:
            self.add(name, by)

    def miss(self, reason: Reason) -> None:
        """A look-up or a restore gave nothing."""
        self.add(f"miss:{reason}")

    def dropped(self, reason: Dropped) -> None:
        """A save, or a part of it, was not written."""
        self.add(f"dropped:{reason}")

    def take(self) -> dict[str, int]:
        """The additions since the last call, to be stored; `settle` says what became of them."""
        with self._lock:
            self._taken, self._pending = self._pending, {}
            return dict(self._taken)

    def settle(self, *, stored: bool) -> None:
        """What was taken has been stored, or waits for the next time."""
        with self._lock:
            if not stored:
                for name, by in self._taken.items():
                    self._pending[name] = self._pending.get(name, 0) + by
            self._taken = {}

    def peek(self) -> dict[str, int]:
        """The additions that are not stored yet."""
        with self._lock:
            names = {*self._pending, *self._taken}
            return {name: self._pending.get(name, 0) + self._taken.get(name, 0) for name in names}


PLAIN = (
    "bytes_written",
    "bytes_written_today",
    "bytes_read",
    "tokens_restored",
    "hits",
    "saved_ms",
    "evicted_files",
    "expired_entries",
    "quarantined_files",
)


def report(usage: dict[str, int], pending: dict[str, int], queue_bytes: int) -> dict[str, int | dict[str, int]]:
    """All counters by name, `misses` and `dropped_saves` by reason."""
    counts = dict(usage)
    for name, by in pending.items():
        counts[name] = counts.get(name, 0) + by
    found: dict[str, int | dict[str, int]] = {name: counts.get(name, 0) for name in PLAIN}
    for name in ("bytes_used", "files_used", "index_bytes"):
        found[name] = counts.get(name, 0)
    found["queue_bytes"] = queue_bytes
    found["misses"] = _by_reason(counts, "miss:")
    found["dropped_saves"] = _by_reason(counts, "dropped:")
    return found


def _by_reason(counts: dict[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): by for name, by in sorted(counts.items()) if name.startswith(prefix)}
