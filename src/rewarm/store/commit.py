"""How records get in and out: reserve and condemn, act, settle; and finishing what a dead process began.

    1  one IMMEDIATE transaction: what a save builds on is there, room is reserved, victims are
       condemned, the intent is noted
    2  victims are unlinked, records written under temporary names and renamed
    3  one transaction: the new rows in, victims and intent out

A process that dies in between leaves an intent and a free lock; whoever comes next settles it. Nothing
here knows engines, policy or queues.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from rewarm.errors import DamagedRecord, NewerFormat
from rewarm.format.layouts import encode_layout
from rewarm.format.record import Encoded, Header, Part, encode, round_up
from rewarm.state.chain import Chain, Key, Tokens, ordered
from rewarm.state.layout import Layout
from rewarm.state.reason import Boundary, Dropped
from rewarm.state.sequence import MetaValue
from rewarm.store.entries import End, Entries, EntryMove
from rewarm.store.evict import Need, choose
from rewarm.store.files import Files, RecordName
from rewarm.store.index import Index, NewRow, Row
from rewarm.store.lock import ProcessLock
from rewarm.store.settings import Limits

log = logging.getLogger("rewarm.store")

BATCH_FILES = 64
BATCH_NBYTES = 64 * 2**20
QUARANTINE_FILES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A record to be written.

    Attributes:
        name: where it goes.
        parent: the key before it.
        first: position of the first of `tokens`.
        tokens: its own tokens.
        parts: its tensors, private copies.
        after: of a point: the earlier point behind which its window runs begin.
        after_n: where that point ends.
    """

    name: RecordName
    parent: Key
    first: int
    tokens: Tokens
    parts: tuple[Part, ...]
    after: Key | None = None
    after_n: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(part.array.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Save:
    """What is to be written for one state: the records that are not there, in the chain's order.

    Attributes:
        fingerprint: the namespace.
        layout: of the state.
        chain: over all tokens of the state.
        drafts: blocks, then the point.
        boundary: what ended at the state's end.
        label: the entry's, or None.
        meta: of the point.
        earlier: the points that the point's window runs need.
        renews_point: the point is there, but rows of its windows have gone: it is written anew.
    """

    fingerprint: bytes
    layout: Layout
    chain: Chain
    drafts: tuple[Draft, ...]
    boundary: Boundary
    label: str | None = None
    meta: dict[str, MetaValue] = field(default_factory=dict)
    earlier: tuple[Key, ...] = ()
    renews_point: bool = False

    @property
    def path(self) -> list[Key]:
        """The records that the point needs, itself apart."""
        return [*self.chain.blocks(), *self.earlier]

    @property
    def n(self) -> int:
        """Tokens of the state."""
        return len(self.chain.tokens)


@dataclass(slots=True)
class Outcome:
    """What a commit did.

    Attributes:
        n_written: records written.
        nbytes: bytes of their files, headers included, not rounded.
        n_evicted: records dropped to make room.
        dropped: why something was not written, or None.
    """

    n_written: int = 0
    nbytes: int = 0
    n_evicted: int = 0
    dropped: Dropped | None = None


@dataclass(slots=True)
class Removal:
    """What a removal freed, or would free: files, and bytes rounded up to 4 KiB each."""

    n_files: int = 0
    nbytes: int = 0

    def add(self, rows: Iterable[Row]) -> Removal:
        """Count `rows` in."""
        for row in rows:
            self.n_files += 1
            self.nbytes += row.nbytes
        return self


@dataclass(frozen=True, slots=True, eq=False)
class _Record:
    """A draft, encoded, with what the index will know of it."""

    name: RecordName
    encoded: Encoded
    row: NewRow


class Committer:
    """Writes and removes records of one root; used by one thread at a time."""

    def __init__(self, index: Index, files: Files, lock: ProcessLock) -> None:
        self.index = index
        self.files = files
        self.entries = Entries(index)
        self._lock = lock

    def write(self, save: Save, limits: Limits, wanted: Collection[Key], now_s: float) -> Outcome:
        """Write a save's records, a batch at a time, and move its entry on.

        Args:
            save: what to write; records that are there by now are left out.
            limits: every field set.
            wanted: keys that are evicted only when nothing else is left.
            now_s: seconds since 1970.

        Raises:
            IndexFault: the index cannot be used.
        """
        outcome = Outcome()
        move = self.entries.decide(save.chain, save.boundary, save.label)
        drafts = save.drafts
        while drafts and outcome.dropped is None:
            n, nbytes = 1, drafts[0].nbytes
            while n < min(len(drafts), BATCH_FILES) and nbytes + drafts[n].nbytes <= BATCH_NBYTES:
                nbytes += drafts[n].nbytes
                n += 1
            records = [self._encode(draft, save, move, now_s) for draft in drafts[:n]]
            drafts = drafts[n:]
            self._write_batch(records, save, limits, wanted, outcome)
        if outcome.dropped is None:
            self._settle_entry(save, move, now_s)
        return outcome

    def _encode(self, draft: Draft, save: Save, move: EntryMove, now_s: float) -> _Record:
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
        encoded = encode(header, draft.parts)
        own = ordered(draft.tokens)
        n = draft.first + len(draft.tokens)
        row = NewRow(name, draft.parent, own, save.layout.digest, n, draft.after, round_up(encoded.nbytes))
        return _Record(name, encoded, row)

    def _write_batch(
        self, records: list[_Record], save: Save, limits: Limits, wanted: Collection[Key], outcome: Outcome
    ) -> None:
        """Steps 1 to 3 for one batch."""
        with self.index.transaction():
            self.finish_dead()
            records, outcome.dropped = self._admissible(records, save, limits)
            if outcome.dropped or not records:
                return
            path = set(save.path)
            need = self._need(limits, sum(r.row.nbytes for r in records), len(records))
            victims = self._choose(need, path, wanted)
            if not need.is_met():
                outcome.dropped = Dropped.NO_SPACE
                return
            intent = self.index.add_intent(
                self._lock.process, sum(r.row.nbytes for r in records), [r.name for r in records]
            )
            self._condemn(victims, intent)
        gone, _ = self._unlink(victims)
        outcome.n_evicted += len(gone)
        written = self._write_files(records, outcome)
        with self.index.transaction():
            for record in written:
                self.index.insert(record.row, 0)
            self.index.use([*save.path, *(r.name.key for r in written)])
            if written:
                self.index.add_layout(save.fingerprint, save.layout.digest, encode_layout(save.layout))
            self._settle(intent, victims, gone)

    def _admissible(self, records: list[_Record], save: Save, limits: Limits) -> tuple[list[_Record], Dropped | None]:
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
        coming = present | {record.name.key for record in left} | {save.chain.root}
        afters = {record.row.after for record in left if record.row.after is not None}
        parents = ({record.row.parent for record in left} | afters) - coming
        if any(self.index.is_condemned(record.name.key) for record in left):
            return [], Dropped.PARENT_GONE
        if len(self.index.present([*parents])) < len(parents):
            return [], Dropped.PARENT_GONE
        blocks = save.chain.blocks()
        size = self.index.path_nbytes(blocks) + sum(draft.nbytes for draft in save.drafts)
        if size + self.index.own_nbytes() > (limits.max_bytes or 0) or len(blocks) + 1 > (limits.max_files or 0):
            return [], Dropped.TOO_LARGE
        return left, None

    def _need(self, limits: Limits, nbytes: int, n_files: int) -> Need:
        """What must go before `nbytes` bytes in `n_files` files may come; quarantine goes first."""
        need = self._over(limits, nbytes, n_files)
        for file_name, _ in self.index.quarantine():
            if need.is_met():
                break
            if self.files.remove_quarantined(file_name):
                self.index.delete_quarantined(file_name)
                need = self._over(limits, nbytes, n_files)
        return need

    def _over(self, limits: Limits, nbytes: int, n_files: int) -> Need:
        totals = self.index.totals()
        over = totals.nbytes + self.index.own_nbytes() + nbytes - (limits.max_bytes or 0)
        short = (limits.min_free_bytes or 0) + nbytes - self.files.free_bytes()
        return Need(max(over, short), totals.n_files + n_files - (limits.max_files or 0))

    def _choose(self, need: Need, path: Collection[Key], wanted: Collection[Key]) -> list[Row]:
        if need.is_met():
            return []
        spared = self.entries.path() | set(path)
        return choose(self.index.by_use, need, spared, wanted, self.index.hanging)

    def _condemn(self, rows: Sequence[Row], intent: int) -> None:
        for row in rows:
            self.entries.shorten(row.name.key)
            self.index.condemn(row.name.key, intent)

    def _unlink(self, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """Remove files; those that are gone, and those that cannot be removed."""
        gone: list[Row] = []
        stuck: list[Row] = []
        for row in rows:
            (gone if self.files.remove(row.name) else stuck).append(row)
        return gone, stuck

    def _write_files(self, records: list[_Record], outcome: Outcome) -> list[_Record]:
        """Step 2: the records that are in place now, up to the first that failed."""
        done = []
        for record in records:
            try:
                if not self._adoptable(record):
                    self.files.publish(record.name, record.encoded)
                    outcome.n_written += 1
                    outcome.nbytes += record.encoded.nbytes
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                outcome.dropped = Dropped.NO_SPACE if full else Dropped.UNAVAILABLE
                log.warning("a record could not be written (%s); what is stored is untouched", error)
                break
            done.append(record)
        return done

    def _adoptable(self, record: _Record) -> bool:
        """Whether a good file without a row has the record's name already."""
        if not self.files.exists(record.name):
            return False
        try:
            header, _ = self.files.read(record.name)
        except (DamagedRecord, NewerFormat, OSError):
            return False
        return header.layout == record.row.layout and header.after == record.row.after

    def _settle(self, intent: int, victims: Sequence[Row], gone: Sequence[Row]) -> None:
        """Step 3: rows of removed files go; files that cannot be removed are found again."""
        self.index.delete(row.name.key for row in gone)
        left = {row.name.key for row in gone}
        for row in victims:
            if row.name.key not in left:
                self.index.condemn(row.name.key, 0)
        self.index.end_intent(intent)
        self.index.count("evicted_files", len(gone))

    def _settle_entry(self, save: Save, move: EntryMove, now_s: float) -> None:
        """Move the entry on; the rows-only point at its old end goes."""
        n, size = save.n, save.chain.block_tokens
        parent = save.chain.parent(n // size)
        end = End(save.chain.point(n), parent, ordered(save.chain.tail(n // size)), n)
        with self.index.transaction():
            if self.index.row(end.key) is None:
                return
            place = (save.fingerprint, save.layout.digest)
            self.entries.apply(move, end, place, save.boundary.value, now_s)
            old = self.index.row(move.from_end) if move.from_end else None
            stale = old is not None and save.layout.rows_only and old.name.is_point
            if old is None or not stale or self.entries.ends_at(old.name.key) or self.index.hanging(old.name.key):
                return
            intent = self.index.add_intent(self._lock.process, 0, [])
            self.index.condemn(old.name.key, intent)
        self._finish_removal(intent, [old])

    def _finish_removal(self, intent: int, rows: Sequence[Row]) -> list[Row]:
        gone, stuck = self._unlink(rows)
        with self.index.transaction():
            self.index.delete(row.name.key for row in gone)
            for row in stuck:
                self.index.condemn(row.name.key, 0)
            self.index.end_intent(intent)
        return gone

    # Removing on request, and to keep a limit that was lowered.

    def remove(self, rows: Sequence[Row], entry_ids: Sequence[bytes] = ()) -> Removal:
        """Erase records and entries: an intent first, so that a crash in the middle is finished by the next open."""
        with self.index.transaction():
            intent = self.index.add_intent(self._lock.process, 0, [])
            for row in rows:
                self.index.condemn(row.name.key, intent)
            for entry_id in entry_ids:
                self.entries.delete(entry_id)
        gone = self._finish_removal(intent, rows)
        return Removal().add(gone)

    def shrink(self, limits: Limits) -> Removal:
        """Evict until `limits` hold; what was removed."""
        with self.index.transaction():
            self.finish_dead()
            victims = self._choose(self._need(limits, 0, 0), (), ())
            if not victims:
                return Removal()
            intent = self.index.add_intent(self._lock.process, 0, [])
            self._condemn(victims, intent)
        gone = self._finish_removal(intent, victims)
        with self.index.transaction():
            self.index.count("evicted_files", len(gone))
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
        """A record's file is not there: take its row out."""
        with self.index.transaction():
            if not self.files.exists(name):
                self.index.expose(name.key)
                self.entries.shorten(name.key)
                self.index.delete([name.key])

    # Finishing.

    def finish_dead(self) -> None:
        """Inside a transaction: finish the intents of processes that are no more, and this one's own left ones."""
        for intent, process in self.index.intents():
            if process == self._lock.process:
                self._finish(intent)
                continue
            with self._lock.burying(process) as dead:
                if dead:
                    self._finish(intent)
                    self.files.remove_temporaries(process)

    def bury(self) -> None:
        """At open: finish the intents of dead processes and empty their temporaries."""
        with self.index.transaction():
            self.finish_dead()
        for process in self._lock.dead():
            with self._lock.burying(process) as dead:
                if dead:
                    self.files.remove_temporaries(process)

    def _finish(self, intent: int) -> None:
        for row in self.index.condemned(intent):
            if self.files.remove(row.name):
                self.index.delete([row.name.key])
            else:
                self.index.condemn(row.name.key, 0)
        for name in self.index.intent_writes(intent):
            if self.files.exists(name) and self.index.row(name.key) is None and not self.adopt(name):
                self.files.remove(name)
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
