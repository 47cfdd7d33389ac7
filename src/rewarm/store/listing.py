"""Entries for lists that stay quick at ten thousand of them: all without sizes, sizes where they are asked for.

What belongs to one entry alone is said in `entries.py`; here the same is found for all entries in one pass over
the index. Looks only. It knows rows, not files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rewarm.state.chain import Key
from rewarm.store.entries import Entries, Entry
from rewarm.store.index import Index


@dataclass(frozen=True, slots=True)
class Step:
    """One record of an entry's path.

    Attributes:
        key: its name; equal keys are the same record.
        n: tokens at its end.
        nbytes: of its file, rounded up to 4 KiB.
        is_point: whether it is a point, else a block.
    """

    key: Key
    n: int
    nbytes: int
    is_point: bool


@dataclass(slots=True)
class _Record:
    parent: Key
    is_point: bool
    after: Key | None
    nbytes: int


@dataclass(slots=True)
class _Tree:
    """The records of an index, by what hangs from what."""

    records: dict[Key, _Record] = field(default_factory=dict)
    children: dict[Key, list[Key]] = field(default_factory=dict)
    n_ends: dict[Key, int] = field(default_factory=dict)
    _below: dict[Key, int] = field(default_factory=dict)

    def path_nbytes(self, end: Key) -> int:
        """Bytes of the path of the record `end`: its blocks, itself, and the points that its windows reach."""
        record = self.records.get(end)
        if record is None:
            return 0
        if not record.is_point:
            return self._blocks_nbytes(end)
        total, point = self._blocks_nbytes(record.parent), record
        while True:
            total += point.nbytes
            before = self.records.get(point.after) if point.after is not None else None
            if before is None:
                return total
            point = before

    def _blocks_nbytes(self, key: Key) -> int:
        """Bytes of the block `key` and of all above it; remembered, since many entries share them."""
        way: list[Key] = []
        while key not in self._below and key in self.records:
            way.append(key)
            key = self.records[key].parent
        total = self._below.get(key, 0)
        for each in reversed(way):
            total += self.records[each].nbytes
            self._below[each] = total
        return total


class Listing:
    """The entries of one index, for lists."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._entries = Entries(index)

    def all(self) -> list[Entry]:
        """Every entry, latest match first, with sizes of 0: see `sized`."""
        sql = (
            "SELECT entries.id, fingerprint, n, label, boundary, pinned, created_s, matched_s, hits FROM entries"
            " JOIN namespaces ON namespaces.id = namespace ORDER BY matched_s DESC, n DESC"
        )
        return [
            Entry(row[0].hex(), row[1].hex(), int(row[2]), row[3], row[4], bool(row[5]), row[6], row[7], int(row[8]))
            for row in self._index.rows(sql)
        ]

    def sized(self, entries: Iterable[Entry]) -> list[Entry]:
        """These entries with their sizes; for a page of them."""
        found = []
        for entry in entries:
            nbytes, own_nbytes = self._exactly(bytes.fromhex(entry.id))
            found.append(replace(entry, nbytes=nbytes, own_nbytes=own_nbytes))
        return found

    def path(self, entry_id: str) -> list[Step]:
        """The records on an entry's path, from its first block to its end."""
        sql = (
            'WITH RECURSIVE up (key) AS (SELECT "end" FROM entries WHERE id = ?1'
            " UNION SELECT records.parent FROM records JOIN up ON records.key = up.key)"
            " SELECT up.key, n, nbytes, is_point FROM up JOIN records ON records.key = up.key"
            " WHERE condemned = 0 ORDER BY n, is_point"
        )
        rows = self._index.rows(sql, (bytes.fromhex(entry_id),))
        return [Step(Key(row[0]), int(row[1]), int(row[2]), bool(row[3])) for row in rows]

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Bytes of the whole path, and of what only it needs, of every entry, by id: in one pass."""
        tree = self._tree()
        ends = self._index.rows('SELECT id, "end", parent, tail FROM entries')
        for row in ends:
            end = Key(row[1])
            tree.n_ends[end] = tree.n_ends.get(end, 0) + 1
        return {row[0].hex(): self._sizes_of(tree, row) for row in ends}

    def _tree(self) -> _Tree:
        tree = _Tree()
        sql = "SELECT key, parent, is_point, after, nbytes FROM records WHERE condemned = 0"
        for key, parent, is_point, after, nbytes in self._index.rows(sql):
            tree.records[key] = _Record(parent, bool(is_point), after, int(nbytes))
            tree.children.setdefault(parent, []).append(key)
        return tree

    def _sizes_of(self, tree: _Tree, row: Sequence[bytes]) -> tuple[int, int]:
        """Bytes of an entry's path and of its own records; `row` is its id, end, parent and tail."""
        end, key, below = Key(row[1]), Key(row[2]), None
        own: list[Key] = []
        while True:
            others = [child for child in tree.children.get(key, ()) if child not in (below, end)]
            if self._is_unclear(tree, key, end, others):
                return self._exactly(row[0])
            if (
                below is None
                and end != key
                and end in tree.records
                and not (others and self._goes_on(key, end, row[3]))
            ):
                own.append(end)
            record = tree.records.get(key)
            n_other_ends = tree.n_ends.get(key, 0) - int(key == end)
            if others or n_other_ends or record is None:
                break
            own.append(key)
            key, below = record.parent, key
        return tree.path_nbytes(end), sum(tree.records[each].nbytes for each in own)

    def _is_unclear(self, tree: _Tree, key: Key, end: Key, others: Sequence[Key]) -> bool:
        """Whether the tokens must be seen: of points that no entry ends at, of an end shared, behind a hole."""
        if any(tree.records[child].is_point and not tree.n_ends.get(child) for child in others):
            return True
        shares_end = tree.n_ends.get(end, 0) > 1 and end != key
        return shares_end or (key not in tree.records and self._index.hole(key) is not None)

    def _goes_on(self, parent: Key, end: Key, tail: bytes) -> bool:
        """Whether another record under `parent` begins with all of `tail`: it may give that record's rows too."""
        sql = (
            "SELECT EXISTS (SELECT 1 FROM records WHERE parent = ?1 AND is_point IN (0, 1) AND tokens >= ?2"
            " AND tokens < ?3 AND key != ?4 AND condemned = 0)"
        )
        return bool(self._index.one(sql, (parent, tail, tail + b"\xff", end))[0])

    def _exactly(self, entry_id: bytes) -> tuple[int, int]:
        own = [child.key for child in self._entries.own(entry_id)]
        path = self._entries.path([entry_id])
        return self._index.path_nbytes([*path.union(own)]), self._index.path_nbytes(own)
