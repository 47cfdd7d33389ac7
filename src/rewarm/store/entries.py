"""Entries: named ends of chains. Which one a save moves on, and what belongs to one alone.

An entry's end lies behind the block `parent` by the tokens `tail` (ordered form); after its end was
evicted it is the deepest record that is left. This module knows the index, not files or settings.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from rewarm.state.chain import Chain, Key, common_prefix, from_ordered, ordered
from rewarm.state.plan import Child, tail_tokens
from rewarm.state.reason import Boundary
from rewarm.store.index import Index
from rewarm.store.sizes import sizes


@dataclass(frozen=True, slots=True)
class Entry:
    """A named end of a chain, for lists and pages.

    Attributes:
        id: 32 hex characters.
        fingerprint: of its namespace, 64 hex characters.
        n_tokens: tokens up to its end.
        label: the name that the save gave, or None.
        boundary: what ended there.
        pinned: whether its path is spared by eviction.
        created_s: seconds since 1970.
        matched_s: when it was last matched or saved, seconds since 1970.
        hits: restores that used its end.
        nbytes: bytes of its whole path.
        own_nbytes: bytes that only this entry needs; the others are shared.
        parent: id of the older entry that it branched off, or None where it shares nothing.
        fork_tokens: where: tokens up to the end of the last record that both need, at most a block less than the
            tokens that they share.
    """

    id: str
    fingerprint: str
    n_tokens: int
    label: str | None
    boundary: str
    pinned: bool
    created_s: float
    matched_s: float
    hits: int
    nbytes: int = 0
    own_nbytes: int = 0
    parent: str | None = None
    fork_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EntryMove:
    """What a save does to the entries: nothing (`id` None), move one on (`from_end`), or make one.

    Attributes:
        id: 16 bytes.
        from_end: the end that the entry had.
        label: of the entry.
    """

    id: bytes | None
    from_end: Key | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class End:
    """Where an entry ends."""

    key: Key
    parent: Key
    tail: bytes
    n: int


@dataclass(slots=True)
class _Apart:
    """What counts as gone already while it is worked out what goes with it: entries, and records by their keys."""

    entries: list[bytes] = field(default_factory=list)
    records: dict[Key, Child] = field(default_factory=dict)


_COLUMNS = 'id, "end", parent, tail, n, label, boundary, pinned'


class Entries:
    """The entries' rows, in one index."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def decide(self, chain: Chain, boundary: Boundary, label: str | None) -> EntryMove:
        """Which entry a save of all of `chain` moves on."""
        n = len(chain.tokens)
        system = boundary is Boundary.SYSTEM
        if self._continues(chain, n):
            ends = self._index.rows('SELECT label, boundary FROM entries WHERE "end" = ?', (chain.point(n),))
            known = any(row[0] == label and (not system or row[1] == Boundary.SYSTEM) for row in ends)
            if known or not (system or self._labels_differ(chain, label)):
                return EntryMove(None)
            return EntryMove(secrets.token_bytes(16), None, label)
        best: Any = None
        for row in self._prefixes(chain):
            movable = row[5] == label if label is not None else _unnamed(row)
            if movable and (best is None or row[4] > best[4]):
                best = row
        if best is None and label is not None:
            best = max((row for row in self._prefixes(chain) if _unnamed(row)), key=lambda row: row[4], default=None)
        if best is None:
            return EntryMove(secrets.token_bytes(16), None, label)
        return EntryMove(best[0], Key(best[1]), label if label is not None else best[5])

    def _continues(self, chain: Chain, n: int) -> bool:
        """Whether what is stored goes on past `n`, or an entry ends there: `n` lies on an entry's path."""
        tail = ordered(tail_tokens(chain, n))
        parent = chain.parent(n // chain.block_tokens)
        sql = (
            "SELECT EXISTS (SELECT 1 FROM records WHERE parent = ?1 AND is_point IN (0, 1) AND tokens >= ?2"
            " AND tokens < ?3 AND n > ?4 AND condemned = 0)"
            ' OR EXISTS (SELECT 1 FROM entries WHERE "end" = ?5)'
        )
        return bool(self._index.one(sql, (parent, tail, tail + b"\xff", n, chain.point(n)))[0])

    def _labels_differ(self, chain: Chain, label: str | None) -> bool:
        """Whether a labelled save ends on the path of entries none of which bears its label."""
        if label is None:
            return False
        labels = self._index.rows("SELECT parent, tail, n FROM entries WHERE label = ?", (label,))
        return not any(self._passes(chain, Key(row[0]), row[2]) for row in labels)

    def _passes(self, chain: Chain, parent: Key, n: int) -> bool:
        """Whether the entry that ends under `parent` goes through all of `chain`."""
        target = chain.parent(len(chain.tokens) // chain.block_tokens)
        key: Key | None = parent
        while key is not None and n >= len(chain.tokens):
            if key == target:
                return True
            row = self._index.row(key)
            key = row.parent if row else None
        return False

    def _prefixes(self, chain: Chain) -> list[Any]:
        """The entries that end on `chain`, before its end."""
        n, size = len(chain.tokens), chain.block_tokens
        parents = [chain.parent(i) for i in range(n // size + 1)]
        found = []
        for start in range(0, len(parents), 500):
            batch = parents[start : start + 500]
            marks = ",".join("?" * len(batch))
            found += self._index.rows(f"SELECT {_COLUMNS} FROM entries WHERE parent IN ({marks})", batch)
        at = {key: i * size for i, key in enumerate(parents)}
        return [
            row
            for row in found
            if row[4] < n and ordered(chain.tokens[at[row[2]] : at[row[2]] + size]).startswith(row[3])
        ]

    def apply(self, move: EntryMove, end: End, place: tuple[bytes, bytes], boundary: str, now_s: float) -> EntryMove:
        """Do what `decide` found; when the entry has moved meanwhile, a new one begins. What was done.

        Args:
            move: from `decide`.
            end: the record that was saved.
            place: fingerprint and layout digest.
            boundary: what ended there.
            now_s: seconds since 1970.
        """
        if move.id is None:
            return move
        if move.from_end is not None:
            cursor = self._index.execute(
                'UPDATE entries SET "end" = ?, parent = ?, tail = ?, n = ?, label = ?, boundary = ?, matched_s = ?'
                ' WHERE id = ? AND "end" = ?',
                (end.key, end.parent, end.tail, end.n, move.label, boundary, now_s, move.id, move.from_end),
            )
            if cursor.rowcount:
                return move
            move = replace(move, id=secrets.token_bytes(16))
        namespace = self._index.namespace_id(place[0])
        self._index.execute(
            'INSERT OR IGNORE INTO entries (id, namespace, layout, "end", parent, tail, n, label, boundary,'
            " created_s, matched_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (move.id, namespace, place[1], end.key, end.parent, end.tail, end.n, move.label, boundary, now_s, now_s),
        )
        return move

    def ends_further(self, move: EntryMove, end: End) -> bool:
        """Whether the entry that would be moved ends at `end` or behind it already."""
        found = self._index.one("SELECT n FROM entries WHERE id = ?", (move.id,))
        return found is not None and int(found[0]) >= end.n and move.from_end is not None

    def restore(self, move: EntryMove, end: End, place: tuple[bytes, bytes], boundary: str, now_s: float) -> None:
        """Enter an entry as a point's header names it, or let it end there when that is further on."""
        if move.id is None or self.ends_at(end.key):
            return
        found = self._index.one('SELECT "end", n FROM entries WHERE id = ?', (move.id,))
        if found is None:
            self.apply(move, end, place, boundary, now_s)
        elif found[1] < end.n:
            self.apply(replace(move, from_end=Key(found[0])), end, place, boundary, now_s)

    def ends_at(self, key: Key) -> int:
        """How many entries end at `key`."""
        return int(self._index.one('SELECT COUNT(*) FROM entries WHERE "end" = ?', (key,))[0])

    def shorten(self, key: Key) -> None:
        """`key` goes: entries that end there end at the deepest record left, or go with their last own one."""
        row = self._index.row(key)
        if row is None:
            return
        for found in self._index.rows(f'SELECT {_COLUMNS} FROM entries WHERE "end" = ?', (key,)):
            end = self._deepest_left(row.parent, found[3], key)
            if end is None or (end.key == row.parent and self._is_shared(end.key, key)):
                self._index.execute("DELETE FROM entries WHERE id = ?", (found[0],))
            else:
                values = (end.key, end.parent, end.tail, end.n, found[0])
                self._index.execute('UPDATE entries SET "end" = ?, parent = ?, tail = ?, n = ? WHERE id = ?', values)

    def _deepest_left(self, parent: Key, tail: bytes, but: Key) -> End | None:
        points = [c for c in self._index.children(parent) if c.is_point and c.key != but and tail.startswith(c.tokens)]
        if points:
            deepest = max(points, key=lambda child: child.n)
            return End(deepest.key, parent, deepest.tokens, deepest.n)
        block = self._index.row(parent)
        return End(parent, parent, b"", block.n) if block else None

    def _is_shared(self, block: Key, but: Key) -> bool:
        children = [child for child in self._index.children(block) if child.key != but]
        return bool(children) or self.ends_at(block) > 0

    def own(self, *entry_ids: bytes) -> list[Child]:
        """The records that only these entries need, each entry's deepest first; over the holes that damage has left.

        What several of them share is among them when nobody else needs it, and is there once.
        """
        apart = _Apart()
        for entry_id in entry_ids:
            apart.entries.append(entry_id)
            own = self._own(entry_id, apart)
            apart.records.update((child.key, child) for child in own)
        return list(apart.records.values())

    def _own(self, entry_id: bytes, apart: _Apart) -> list[Child]:
        found = self._index.one(f"SELECT {_COLUMNS} FROM entries WHERE id = ?", (entry_id,))
        if found is None:
            return []
        own: list[Child] = []
        parent, tail, below = Key(found[2]), found[3], None
        while True:
            here, shared = self._own_under(parent, tail, below, apart)
            own += here
            block, row, hole = self._index.child(parent), self._index.row(parent), self._index.hole(parent)
            if shared or self._others_end(parent, apart) or (row is None and hole is None):
                return own
            if block is not None and row is not None:
                own.append(block)
                parent, tail, below = row.parent, block.tokens, block.key
            elif hole is not None:
                parent, tail, below = hole[0], hole[1], parent

    def _own_under(self, parent: Key, tail: bytes, below: Key | None, apart: _Apart) -> tuple[list[Child], bool]:
        """An entry's own points under `parent`, deepest first, and whether others hang there too."""
        children = [c for c in self._index.children(parent) if c.key != below and c.key not in apart.records]
        mine = [c for c in children if c.is_point and tail.startswith(c.tokens)]
        mine = [c for c in mine if not self._others_end(c.key, apart)]
        others = [c for c in children if c not in mine]
        fork = max((_common(tail, other.tokens) for other in others), default=-1)
        own = [c for c in mine if len(from_ordered(c.tokens)) > fork]
        return sorted(own, key=lambda child: -child.n), bool(others)

    def _others_end(self, key: Key, apart: _Apart) -> bool:
        ends = self._index.rows('SELECT id FROM entries WHERE "end" = ?', (key,))
        return any(row[0] not in apart.entries for row in ends)

    def path(self, entry_ids: Iterable[bytes] | None = None) -> set[Key]:
        """Every record on the paths of the given entries, or of the pinned ones."""
        if entry_ids is None:
            starts = self._index.rows('SELECT "end" FROM entries WHERE pinned')
        else:
            starts = [self._index.one('SELECT "end" FROM entries WHERE id = ?', (i,)) for i in entry_ids]
        keys: set[Key] = set()
        sql = (
            "WITH RECURSIVE up (key) AS (SELECT ?1 UNION SELECT records.parent FROM records JOIN up"
            " ON records.key = up.key UNION SELECT records.after FROM records JOIN up ON records.key = up.key"
            " WHERE records.after IS NOT NULL) SELECT up.key FROM up JOIN records ON records.key = up.key"
        )
        for start in starts:
            if start is not None:
                keys |= {Key(row[0]) for row in self._index.rows(sql, (start[0],))}
        return keys

    def delete(self, entry_id: bytes) -> None:
        """Take an entry out; its records are somebody else's business."""
        self._index.execute("DELETE FROM entries WHERE id = ?", (entry_id,))

    def delete_of(self, fingerprint: bytes) -> list[bytes]:
        """Take a namespace's entries out; their ids."""
        namespace = self._index.namespace_id(fingerprint)
        ids = [row[0] for row in self._index.rows("SELECT id FROM entries WHERE namespace = ?", (namespace,))]
        self._index.execute("DELETE FROM entries WHERE namespace = ?", (namespace,))
        return ids

    def pin(self, entry_id: bytes, *, pinned: bool) -> bool:
        """Mark an entry; whether it is there."""
        sql = "UPDATE entries SET pinned = ? WHERE id = ?"
        return self._index.execute(sql, (pinned, entry_id)).rowcount > 0

    def matched(self, end: Key, now_s: float) -> None:
        """A restore used the end of these entries."""
        self._index.execute('UPDATE entries SET hits = hits + 1, matched_s = ? WHERE "end" = ?', (now_s, end))

    def unpinned(self) -> list[tuple[str, str, float]]:
        """Id (hex), fingerprint (hex) and last match (seconds since 1970) of every entry that is not pinned."""
        sql = (
            "SELECT entries.id, fingerprint, matched_s FROM entries JOIN namespaces ON namespaces.id = namespace"
            " WHERE NOT pinned"
        )
        return [(row[0].hex(), row[1].hex(), float(row[2])) for row in self._index.rows(sql)]

    def list(self) -> list[Entry]:
        """All entries, latest match first."""
        sql = (
            'SELECT entries.id, fingerprint, n, label, boundary, pinned, created_s, matched_s, hits, "end" FROM entries'
            " JOIN namespaces ON namespaces.id = namespace ORDER BY matched_s DESC, n DESC"
        )
        rows = self._index.rows(sql)
        found = sizes(self._index, [row[9] for row in rows], [(row[6], row[0].hex()) for row in rows])
        return [
            Entry(
                id=row[0].hex(),
                fingerprint=row[1].hex(),
                n_tokens=int(row[2]),
                label=row[3],
                boundary=row[4],
                pinned=bool(row[5]),
                created_s=row[6],
                matched_s=row[7],
                hits=int(row[8]),
                nbytes=size.nbytes,
                own_nbytes=size.own_nbytes,
                parent=None if size.parent is None else rows[size.parent][0].hex(),
                fork_tokens=size.fork_tokens,
            )
            for row, size in zip(rows, found, strict=True)
        ]


def _unnamed(row: Any) -> bool:
    return row[5] is None and not row[7] and row[6] != Boundary.SYSTEM


def _common(a: bytes, b: bytes) -> int:
    return common_prefix(from_ordered(a), from_ordered(b))
