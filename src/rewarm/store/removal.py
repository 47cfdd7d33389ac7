"""How records go for other reasons than a save: on request, under a lowered limit, or because they are bad.

An intent is committed before the first file goes, so that a crash in the middle is finished by whoever
comes next. Used by one thread of a process at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from rewarm.state.chain import Key
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

    def erase(self, collect: Callable[[], Sequence[Row]]) -> Removal:
        """Erase records on request; nobody writes them again before every process has taken note.

        Args:
            collect: the records; takes entries out too. Called inside the transaction that condemns them, so that
                nothing can come to hang from them in between.
        """
        with self.index.transaction():
            self._recovery.finish_left()
            rows = collect()
            intent = self.index.add_intent(self._lock.process, erases=True)
            for row in rows:
                self.index.condemn(row.name.key, intent)
            self.index.forget(rows)
            # Bad records that were set aside may be the conversation's, and are of no use to anybody.
            for file_name, _ in self.index.quarantine():
                if self.files.remove_quarantined(file_name):
                    self.index.delete_quarantined(file_name)
        gone, stuck = self._room.unlink(rows)
        if stuck:
            log.warning(
                "%d files of what was forgotten cannot be removed now. They are not used, and removing them is tried "
                "again with every save and every start.",
                len(stuck),
            )
        with self.index.transaction():
            self.index.delete(row.name.key for row in gone)
            self.index.prune_holes()
            if not stuck:
                self.index.end_intent(intent)
        return Removal().add(gone)

    def shrink(self, limits: Callable[[], Limits], wanted: Collection[Key] = ()) -> Removal:
        """Evict until the limits hold, which are read inside the transaction; what was removed."""
        with self.index.transaction():
            self._recovery.finish_left()
            victims = self._room.choose(self._room.need(limits(), 0, 0), (), wanted)
            if not victims:
                return Removal()
            intent = self.index.add_intent(self._lock.process)
            self._room.condemn(victims, intent)
        gone, _ = self._room.unlink(victims)
        with self.index.transaction():
            self._room.settle(victims, gone)
            self.index.end_intent(intent)
        return Removal().add(gone)

    def quarantine(self, name: RecordName, why: str) -> None:
        """Move a provably bad record away; its descendants wait for it, first to be evicted."""
        with self.index.transaction():
            row = self.index.row(name.key)
            if row is not None and row.name != name:
                return  # somebody asked with another model's name
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
            self.index.leave_hole(name.key)
            self.index.prune_holes()
            surplus = self.index.quarantine()[:-QUARANTINE_FILES]
            for file_name, _ in surplus:
                if self.files.remove_quarantined(file_name):
                    self.index.delete_quarantined(file_name)

    def lost(self, name: RecordName) -> None:
        """A record's file is not there: take its row out, and those of descendants that are not there either."""
        if not self.files.is_there():
            return  # the whole root has gone, its disk unplugged perhaps: that proves nothing about its records
        with self.index.transaction():
            row = self.index.row(name.key)
            if self.files.exists(name) or row is None or row.name != name:
                return
            self.index.expose(name.key)
            below = [row.name for row in self.index.below(name.key)]
            for each in (*(other for other in below if not self.files.exists(other)), name):
                self.entries.shorten(each.key)
                self.index.leave_hole(each.key)
            self.index.prune_holes()

    def finish(self, intent: int, rows: Sequence[Row]) -> list[Row]:
        """Remove what an intent has condemned; what is gone. Files that cannot be removed are found again."""
        gone, stuck = self._room.unlink(rows)
        with self.index.transaction():
            self.index.delete(row.name.key for row in gone)
            for row in stuck:
                self.index.condemn(row.name.key, 0)
            self.index.end_intent(intent)
        return gone
