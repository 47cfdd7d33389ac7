"""Finishing what a process began and did not end, and taking in records that have no row.

An intent says what a process was about to write and remove. When its lock is free it is dead, and whoever
comes next removes what was condemned and enters what was written whole.
"""

from __future__ import annotations

from rewarm.errors import DamagedRecord, NewerFormat
from rewarm.format.layouts import encode_layout
from rewarm.format.record import Header
from rewarm.state.chain import Key, ordered
from rewarm.store.entries import End, Entries, EntryMove
from rewarm.store.files import Files, RecordName
from rewarm.store.index import Index, NewRow
from rewarm.store.lock import ProcessLock


class Recovery:
    """Settles the intents of one root."""

    def __init__(self, index: Index, files: Files, entries: Entries, lock: ProcessLock) -> None:
        self.index = index
        self.files = files
        self.entries = entries
        self._lock = lock

    def finish_left(self) -> None:
        """Inside a transaction: finish what dead processes, and this one when it failed, have left."""
        for intent, process in self.index.intents():
            if process == self._lock.process:
                self._finish(intent)
                continue
            with self._lock.burying(process) as dead:
                if dead:
                    self._finish(intent)
                    self.files.remove_temporaries(process)

    def settle_forgets(self) -> None:
        """Inside a transaction: forgotten keys go that every process has taken note of; the dead need not."""
        for process in self.index.processes():
            if self._lock.is_dead(process):
                self.index.remove_process(process)
        self.index.settle_forgets()

    def bury(self) -> None:
        """At open: finish the intents of dead processes and empty their temporaries."""
        with self.index.transaction():
            self.finish_left()
            self.settle_forgets()
        for process in self._lock.dead():
            with self._lock.burying(process) as dead:
                if dead:
                    self.files.remove_temporaries(process)

    def _finish(self, intent: int) -> None:
        erases, stuck = self.index.erases(intent), False
        for row in self.index.condemned(intent):
            if self.files.remove(row.name):
                self.index.delete([row.name.key])
            elif erases:
                stuck = True  # nobody finds it; tried again by the next commit
            else:
                self.index.condemn(row.name.key, 0)
        for name in self.index.intent_writes(intent):
            if self.files.exists(name) and self.index.row(name.key) is None and not self.adopt(name):
                self.files.remove(name)
        if not stuck:
            self.index.end_intent(intent)

    def adopt(self, name: RecordName) -> bool:
        """Enter a good record without a row; false when it is not good or hangs from nothing."""
        try:
            header = self.files.read_header(name)
        except (DamagedRecord, NewerFormat, OSError):
            return False
        if header.first and self.index.row(Key(header.parent)) is None:
            return False
        enter(self.index, name, header, self.files.nbytes(name))
        if name.is_point and header.entry:
            self.restore_entry(header)
        return True

    def restore_entry(self, header: Header) -> None:
        """Let the entry that a point's header names end there, unless it ends further on."""
        end = End(Key(header.key), Key(header.parent), ordered(header.token_ids), header.n)
        self.entries.restore(
            EntryMove(header.entry, None, header.label),
            end,
            (header.fingerprint, header.layout),
            header.boundary,
            header.created_s,
        )


def enter(index: Index, name: RecordName, header: Header, nbytes: int) -> None:
    """Put a record's row, and a point's layout, into the index, out of its header."""
    own = ordered(header.token_ids)
    after = Key(header.after) if header.after is not None else None
    row = NewRow(name, Key(header.parent), own, header.layout, header.n, after, nbytes)
    index.insert(row, 1)
    if name.is_point:
        index.add_layout(header.fingerprint, header.layout, encode_layout(header.read_layout()))
