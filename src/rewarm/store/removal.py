"""How records go for other reasons than a save: on request, under a lowered limit, or because they are bad.

An intent is committed before the first file goes, so that a crash in the middle is finished by whoever
comes next. Used by one thread of a process at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rewarm.store.files import RecordName
from rewarm.store.index import Row
from rewarm.store.lock import ProcessLock
from rewarm.store.recovery import Recovery
from rewarm.store.room import Removal, Room
from rewarm.store.settings import Limits

log = logging.getLogger("rewarm.store")

QUARANTINE_FILES = 16


class Remover:
    """Removes records of one root."""

    def __init__(self, room: Room, recovery: Recovery, lock: ProcessLock) -> None:
        self.index, self.files, self.entries = room.index, room.files, room.entries
        self._room = room
        self._recovery = recovery
        self._lock = lock

    def erase(self, rows: Sequence[Row], entry_ids: Sequence[bytes] = ()) -> Removal:
        """Erase records and entries on request; nobody writes them again before every process has taken note."""
        with self.index.transaction():
            self._recovery.finish_left()
            intent = self.index.add_intent(self._lock.process, 0, [])
            for row in rows:
                self.index.condemn(row.name.key, intent)
            self.index.forget(row.name.key for row in rows)
            for entry_id in entry_ids:
                self.entries.delete(entry_id)
        return Removal().add(self.finish(intent, rows))

    def shrink(self, limits: Limits) -> Removal:
        """Evict until `limits` hold; what was removed."""
        with self.index.transaction():
            self._recovery.finish_left()
            victims = self._room.choose(self._room.need(limits, 0, 0), (), ())
            if not victims:
                return Removal()
            intent = self.index.add_intent(self._lock.process, 0, [])
            self._room.condemn(victims, intent)
        gone, _ = self._room.unlink(victims)
        with self.index.transaction():
            self._room.settle(victims, gone)
            self.index.end_intent(intent)
        return Removal().add(gone)

    def quarantine(self, name: RecordName, why: str) -> None:
        """Move a provably bad record away; its descendants wait for it, first to be evicted."""
        with self.index.transaction():
            nbytes = self.files.nbytes(name)
            try:
                target = self.files.quarantine(name, f"{self.index.tick()}")
            except FileNotFoundError:
                target = None
            if target is not None:
                self.index.add_quarantined(target.name, nbytes)
                self.index.count("quarantined_files", 1)
                log.warning(
                    "%s is damaged (%s) and was moved to %s. It will not be used; what it held is computed again.",
                    name.file_name,
                    why,
                    target.parent,
                )
            self.index.expose(name.key)
            self.entries.shorten(name.key)
            self.index.delete([name.key])
            surplus = self.index.quarantine()[:-QUARANTINE_FILES]
            for file_name, _ in surplus:
                if self.files.remove_quarantined(file_name):
                    self.index.delete_quarantined(file_name)

    def lost(self, name: RecordName) -> None:
        """A record's file is not there: take its row out, and those of descendants that are not there either."""
        if not self.files.is_there():
            return  # the whole root has gone, its disk unplugged perhaps: that proves nothing about its records
        with self.index.transaction():
            if self.files.exists(name):
                return
            self.index.expose(name.key)
            below = [row.name for row in self.index.below(name.key)]
            for each in (*(other for other in below if not self.files.exists(other)), name):
                self.entries.shorten(each.key)
                self.index.delete([each.key])

    def finish(self, intent: int, rows: Sequence[Row]) -> list[Row]:
        """Remove what an intent has condemned; what is gone. Files that cannot be removed are found again."""
        gone, stuck = self._room.unlink(rows)
        with self.index.transaction():
            self.index.delete(row.name.key for row in gone)
            for row in stuck:
                self.index.condemn(row.name.key, 0)
            self.index.end_intent(intent)
        return gone
