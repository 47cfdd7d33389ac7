"""How a save gets in: reserve and condemn, act, settle.

    1  one IMMEDIATE transaction: what the save builds on is there, room is reserved, victims are
       condemned, the intent is noted
    2  victims are unlinked, records written under temporary names and renamed
    3  one transaction: the new rows in, victims and intent out

A process that dies in between leaves an intent and a free lock: see `recovery.py`. Nothing here knows
engines, policy or queues.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rewarm.errors import DamagedRecord, NewerFormat
from rewarm.format.layouts import encode_layout
from rewarm.format.record import ALIGNMENT, Header, Outline, finite, outline, round_up
from rewarm.state.chain import Key, ordered
from rewarm.state.reason import Dropped
from rewarm.store.crew import Crew
from rewarm.store.entries import End, EntryMove
from rewarm.store.evict import Need
from rewarm.store.files import RecordName
from rewarm.store.index import NewRow, Row
from rewarm.store.lock import ProcessLock
from rewarm.store.recovery import Recovery
from rewarm.store.removal import Remover
from rewarm.store.room import Room
from rewarm.store.saves import Draft, Outcome, Save
from rewarm.store.settings import Limits
from rewarm.store.thin import thin

log = logging.getLogger("rewarm.store")

BATCH_FILES = 64
BATCH_NBYTES = 64 * 2**20

WORTH_A_HELPER_NBYTES = 4 * 2**20
"""Bytes of a batch from which on a second thread is sooner done than it costs."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    """A draft, ready to be written, with what the index will know of it."""

    name: RecordName
    outline: Outline
    row: NewRow


class Committer:
    """Writes the records of saves into one root; used by one thread of a process at a time."""

    def __init__(self, room: Room, recovery: Recovery, remover: Remover, lock: ProcessLock, crew: Crew) -> None:
        self.index, self.files, self.entries = room.index, room.files, room.entries
        self._room = room
        self._recovery = recovery
        self._remover = remover
        self._lock = lock
        self._crew = crew
        self._evicting_helps = True

    def write(self, save: Save, limits: Callable[[], Limits], wanted: Collection[Key], now_s: float) -> Outcome:
        """Write a save's records, a batch at a time, and move its entry on.

        Args:
            save: what to write; records that are there by now are left out.
            limits: asked inside each transaction; every field set.
            wanted: keys that are evicted only when nothing else is left.
            now_s: seconds since 1970.

        Raises:
            IndexFault: the index cannot be used.
        """
        outcome = Outcome()
        if not self._finite(save.drafts):
            log.warning("a state with NaN or infinity was not saved")
            return Outcome(dropped=Dropped.NOT_FINITE)
        move = self.entries.decide(save.chain, save.boundary, save.label)
        drafts = save.drafts
        if move.id is None and save.layout.rows_only:
            # It lies on an entry's path, where rows can be cut: no entry would ever let go of a point there.
            drafts = tuple(draft for draft in drafts if not draft.name.is_point)
        if not drafts:
            self._settle_entry(save, move, now_s)
        elif not self._fits(save, drafts, limits()):
            outcome.dropped = Dropped.TOO_LARGE
        while drafts and outcome.dropped is None:
            n, nbytes = 1, drafts[0].nbytes
            while n < min(len(drafts), BATCH_FILES) and nbytes + drafts[n].nbytes <= BATCH_NBYTES:
                nbytes += drafts[n].nbytes
                n += 1
            records = [self._outline(draft, save, move, now_s) for draft in drafts[:n]]
            drafts = drafts[n:]
            self._write_batch(records, save, limits, wanted, outcome)
            # After each batch, so that whatever is there belongs to an entry, however this save ends.
            move = self._settle_entry(save, move, now_s)
        if outcome.error:
            log.warning("a record could not be written (%s); what is stored is untouched", outcome.error)
        return outcome

    def _finite(self, drafts: Sequence[Draft]) -> bool:
        """Whether no float tensor has NaN or infinity in it."""
        bad: list[Draft] = []

        def look(draft: Draft) -> bool:
            if not all(finite(part) for part in draft.parts):
                bad.append(draft)
            return not bad

        self._each(look, drafts, sum(draft.nbytes for draft in drafts))
        return not bad

    def _each(self, work: Callable[[T], bool], items: Sequence[T], nbytes: int) -> None:
        """Do `work` for each item, with a helper where there is so much of it that a helper is worth it."""
        if nbytes >= WORTH_A_HELPER_NBYTES and len(items) > 1:
            self._crew.run(work, items)
            return
        for item in items:
            if not work(item):
                return

    def _fits(self, save: Save, drafts: Sequence[Draft], limits: Limits) -> bool:
        """Whether the whole conversation can be there at all: what is there of it, and what comes."""
        blocks = save.chain.blocks()
        coming = sum(round_up(draft.nbytes) + ALIGNMENT for draft in drafts)
        size = self.index.path_nbytes(blocks) + coming + self.index.own_nbytes()
        return size <= (limits.max_bytes or 0) and len(blocks) + 1 <= (limits.max_files or 0)

    def _outline(self, draft: Draft, save: Save, move: EntryMove, now_s: float) -> _Record:
        name = draft.name
        header = Header(
            kind="point" if name.is_point else "block",
            key=name.key,
            parent=draft.parent,
            fingerprint=name.fingerprint,
            layout=save.layout.digest,
            block_tokens=save.chain.block_tokens,
            first=draft.first,
            tokens=draft.tokens.tobytes(),
            valid_from=save.layout.valid_from,
            created_s=now_s,
            after=draft.after,
            after_n=draft.after_n,
            entry=(move.id or b"") if name.is_point else b"",
            label=move.label if name.is_point else None,
            boundary=save.boundary.value if name.is_point else "",
            meta=save.meta if name.is_point else {},
        )
        planned = outline(header, draft.parts)
        own = ordered(draft.tokens)
        n = draft.first + len(draft.tokens)
        row = NewRow(name, draft.parent, own, save.layout.digest, n, draft.after, round_up(planned.nbytes))
        return _Record(name, planned, row)

    def _write_batch(
        self,
        records: list[_Record],
        save: Save,
        limits: Callable[[], Limits],
        wanted: Collection[Key],
        outcome: Outcome,
    ) -> None:
        """Steps 1 to 3 for one batch."""
        with self.index.transaction():
            self._recovery.finish_left()
            records, outcome.dropped = self._admissible(records, save)
            if outcome.dropped or not records:
                return
            nbytes = sum(record.row.nbytes for record in records)
            need = self._room.need(limits(), nbytes, len(records))
            victims = self._room.choose(need, save.path, wanted)
            if not need.is_met():
                outcome.dropped = Dropped.NO_SPACE
                return
            intent = self.index.add_intent(self._lock.process, nbytes, [record.name for record in records])
            self._room.condemn(victims, intent)
        gone, _ = self._room.unlink(victims)
        written = self._write_files(records, outcome)
        if outcome.dropped is Dropped.NO_SPACE and self._evicting_helps:
            # The disk is fuller than it said. Least recently used records make room, once: a disk that refuses
            # even then (a quota of another kind, say) must not cost us everything that is stored.
            more = self._make_room(records[len(written) :], intent, save.path, wanted)
            victims, gone = [*victims, *more], [*gone, *self._room.unlink(more)[0]]
            outcome.dropped = None
            written += self._write_files(records[len(written) :], outcome)
        self._evicting_helps = outcome.dropped is None or (self._evicting_helps and bool(written))
        outcome.n_evicted += len(gone)
        with self.index.transaction():
            self._enter(written, save, outcome)
            self._room.settle(victims, gone)
            self.index.end_intent(intent)

    def _enter(self, written: Sequence[_Record], save: Save, outcome: Outcome) -> None:
        """Step 3: rows in, as far as what they build on is still there; meanwhile others may have evicted or erased."""
        forgotten = self.index.forgotten_since(0).covers(save.chain)
        entered: list[Key] = []
        for i, record in enumerate(written):
            if forgotten or not self._holds(record, save, entered):
                outcome.dropped = Dropped.FORGOTTEN if forgotten else Dropped.PARENT_GONE
                for other in written[i:]:
                    if self.index.row(other.name.key) is None:
                        self.files.remove(other.name)
                break
            self.index.insert(record.row, 0)
            entered.append(record.name.key)
        self.index.use([*save.path, *entered])
        if entered:
            self.index.add_layout(save.fingerprint, save.layout.digest, encode_layout(save.layout))

    def _holds(self, record: _Record, save: Save, entered: Sequence[Key]) -> bool:
        """Whether a record's parent, and the point behind which it begins, are there."""
        needed = {record.row.parent} | ({record.row.after} if record.row.after is not None else set())
        needed -= {save.chain.root, *entered}
        return len(self.index.present([*needed])) == len(needed)

    def _make_room(
        self, records: list[_Record], intent: int, path: Collection[Key], wanted: Collection[Key]
    ) -> list[Row]:
        """Victims for records that the disk had no room for, condemned."""
        with self.index.transaction():
            victims = self._room.choose(Need(sum(record.row.nbytes for record in records), 0), path, wanted)
            self._room.condemn(victims, intent)
        return victims

    def _admissible(self, records: list[_Record], save: Save) -> tuple[list[_Record], Dropped | None]:
        """The records that are not there yet, or why none may be written."""
        keys = [record.name.key for record in records]
        present = self.index.present(keys)
        left = [
            record
            for record in records
            if record.name.key not in present or (save.renews_point and record.name.is_point)
        ]
        if not left:
            return [], None
        if self._is_forgotten(save):
            return [], Dropped.FORGOTTEN
        if any(self.index.is_condemned(record.name.key) for record in left):
            return [], Dropped.PARENT_GONE
        coming = [*present, *(record.name.key for record in left)]
        if not all(self._holds(record, save, coming) for record in left):
            return [], Dropped.PARENT_GONE
        return left, None

    def _is_forgotten(self, save: Save) -> bool:
        """Whether it goes through what was forgotten, and some living process has not taken note of that yet."""
        if not self.index.forgotten_since(0).covers(save.chain):
            return False
        self._recovery.settle_forgets()
        return self.index.forgotten_since(0).covers(save.chain)

    def _write_files(self, records: list[_Record], outcome: Outcome) -> list[_Record]:
        """Step 2: the records that are in place now, up to the first that failed."""
        came = self._place(records)
        done: list[_Record] = []
        for record, result in zip(records, came, strict=True):
            if not isinstance(result, bool):
                break
            done.append(record)
            if result:
                outcome.n_written += 1
                outcome.nbytes += record.outline.nbytes
        for record, result in zip(records[len(done) :], came[len(done) :], strict=True):
            if result is True:
                self.files.remove(record.name)  # written by the helper, behind one that failed
            elif isinstance(result, OSError):
                full = result.errno in (errno.ENOSPC, errno.EDQUOT)
                outcome.dropped = Dropped.NO_SPACE if full else Dropped.UNAVAILABLE
                outcome.error = str(result)
            elif isinstance(result, BaseException):
                raise result
        return done

    def _place(self, records: list[_Record]) -> list[bool | BaseException | None]:
        """What came of each record: whether it was written or was there already, its fault, or None: not begun."""
        came: list[bool | BaseException | None] = [None] * len(records)

        def place(i: int) -> bool:
            try:
                came[i] = not self._adoptable(records[i])
                if came[i]:
                    self.files.publish(records[i].name, records[i].outline)
            except BaseException as error:  # noqa: BLE001 - raised on the thread that asked
                came[i] = error
                return False
            return True

        self._each(place, range(len(records)), sum(record.outline.nbytes for record in records))
        return came

    def _adoptable(self, record: _Record) -> bool:
        """Whether a good file without a row has the record's name already."""
        if not self.files.exists(record.name):
            return False
        try:
            header, _ = self.files.read(record.name)
        except (DamagedRecord, NewerFormat, OSError):
            return False
        return header.layout == record.row.layout and header.after == record.row.after

    def _settle_entry(self, save: Save, move: EntryMove, now_s: float) -> EntryMove:
        """Move the entry on to the save's end, or to the deepest block that is there; the move that comes next.

        What its path needs no more goes: a rows-only point at its old end, thinned points.
        """
        with self.index.transaction():
            end = self._end(save)
            if end is None:
                return move
            self.index.use([*save.path, end.key])
            if move.id is None:
                return move
            if not self.entries.ends_further(move, end):
                place = (save.fingerprint, save.layout.digest)
                move = self.entries.apply(move, end, place, save.boundary.value, now_s)
            stale = self._stale(save, move, end)
            if not stale:
                return replace(move, from_end=end.key)
            intent = self.index.add_intent(self._lock.process)
            for row in stale:
                self.index.condemn(row.name.key, intent)
        self._remover.finish(intent, stale)
        return replace(move, from_end=end.key)

    def _end(self, save: Save) -> End | None:
        """The deepest record of a save that is there: its point, or a block."""
        n, size = save.n, save.chain.block_tokens
        if self.index.row(save.chain.point(n)) is not None:
            tail = ordered(save.chain.tail(n // size))
            return End(save.chain.point(n), save.chain.parent(n // size), tail, n)
        n_blocks = self.index.n_present(save.chain.blocks())
        if n_blocks == 0:
            return None
        block = save.chain.block(n_blocks - 1)
        return End(block, block, b"", n_blocks * size)

    def _stale(self, save: Save, move: EntryMove, end: End) -> list[Row]:
        if move.id is None:
            return []
        if not save.layout.rows_only and not save.thin:
            return []
        if not save.layout.rows_only:
            return [row for key in thin(self.entries.own(move.id), save.n, self.index) if (row := self.index.row(key))]
        old = self.index.row(move.from_end) if move.from_end else None
        if old is None or not old.name.is_point or old.n > end.n or self.entries.ends_at(old.name.key):
            return []
        return [] if self.index.hanging(old.name.key) else [old]
