"""The index: SQLite in WAL mode, a rebuildable hint of which records there are, and counters.

Every SQL statement of the store is here or in `entries.py`. It knows rows, not files: whether a record
is good is seen when it is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rewarm.errors import IndexFault
from rewarm.state.chain import Key
from rewarm.state.plan import Child
from rewarm.store.connection import LOG_NBYTES, Connection
from rewarm.store.files import RecordName
from rewarm.store.forgotten import Forgotten

_BATCH = 500

REMEMBERED = 10_000
"""Keys of evicted records, and keys seen once, that are kept."""


@dataclass(frozen=True, slots=True)
class Row:
    """A record as the index knows it, complete but for its tokens."""

    name: RecordName
    parent: Key
    n: int
    nbytes: int
    used: int


@dataclass(frozen=True, slots=True)
class NewRow:
    """A record to be entered."""

    name: RecordName
    parent: Key
    tokens: bytes
    layout: bytes
    n: int
    after: Key | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes and files that the limits count, index and log apart."""

    record_bytes: int
    record_files: int
    reserved_bytes: int
    reserved_files: int
    quarantine_bytes: int
    quarantine_files: int

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return self.record_bytes + self.reserved_bytes + self.quarantine_bytes

    @property
    def n_files(self) -> int:
        """All files."""
        return self.record_files + self.reserved_files + self.quarantine_files


class Index(Connection):
    """The index' rows, over one connection."""

    # Looking up: what the planner asks.

    def n_present(self, blocks: Sequence[Key]) -> int:
        """How many of `blocks` are there, from the first one on without a gap."""
        for start in range(0, len(blocks), _BATCH):
            batch = blocks[start : start + _BATCH]
            found = {row[0] for row in self._among("SELECT key FROM records WHERE condemned = 0 AND key", batch)}
            for i, key in enumerate(batch):
                if key not in found:
                    return start + i
        return len(blocks)

    def present(self, keys: Sequence[Key]) -> set[Key]:
        """Those of `keys` that are there."""
        found: set[Key] = set()
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            found |= {row[0] for row in self._among("SELECT key FROM records WHERE condemned = 0 AND key", batch)}
        return found

    def _among(self, select: str, values: Sequence[Any], tail: str = "") -> list[Any]:
        return self.rows(f"{select} IN ({','.join('?' * len(values))}) {tail}", values)

    _CHILD = "SELECT key, is_point, n, tokens, after FROM records WHERE condemned = 0 AND "

    def child(self, key: Key) -> Child | None:
        """The record named `key`."""
        return _child(self.one(f"{self._CHILD} key = ?", (key,)))

    def before(self, parent: Key, tokens: bytes, *, is_point: bool, strictly: bool = False) -> Child | None:
        """The last block, or point, under `parent` at or before (`strictly`: before) `tokens` in token order."""
        order = "<" if strictly else "<="
        sql = f"{self._CHILD} parent = ? AND is_point = ? AND tokens {order} ? ORDER BY tokens DESC LIMIT 1"
        return _child(self.one(sql, (parent, is_point, tokens)))

    def behind(self, parent: Key, tokens: bytes, *, is_point: bool, strictly: bool = False) -> Child | None:
        """The first block, or point, under `parent` at or behind (`strictly`: behind) `tokens` in token order."""
        order = ">" if strictly else ">="
        sql = f"{self._CHILD} parent = ? AND is_point = ? AND tokens {order} ? ORDER BY tokens LIMIT 1"
        return _child(self.one(sql, (parent, is_point, tokens)))

    def children(self, parent: Key) -> list[Child]:
        """Every record under `parent`."""
        return [child for row in self.rows(f"{self._CHILD} parent = ?", (parent,)) if (child := _child(row))]

    def hanging(self, key: Key) -> set[Key]:
        """The live records that hang from `key`, or begin their window runs behind it."""
        sql = (
            "SELECT key FROM records WHERE parent = ?1 AND condemned = 0"
            " UNION SELECT key FROM records WHERE after = ?1 AND condemned = 0"
        )
        return {Key(row[0]) for row in self.rows(sql, (key,))}

    # Records and their use.

    _ROW = (
        "SELECT fingerprint, key, is_point, parent, n, nbytes, used FROM records"
        " JOIN namespaces ON namespaces.id = records.namespace WHERE "
    )

    def row(self, key: Key) -> Row | None:
        """The live record named `key`."""
        found = self.one(f"{self._ROW} condemned = 0 AND key = ?", (key,))
        return _row(found) if found else None

    def by_use(self, namespace: bytes | None = None) -> Iterator[Row]:
        """Live records, least recently used first, deepest first; all, or those of one namespace."""
        if namespace is not None:
            sql = f"{self._ROW} condemned = 0 AND fingerprint = ? ORDER BY n DESC"
            yield from map(_row, self.rows(sql, (namespace,)))
            return
        yield from map(_row, self.each(f"{self._ROW} condemned = 0 ORDER BY used, n DESC"))

    def insert(self, new: NewRow, used: int) -> None:
        """Enter a record, or make its row say what the file says now."""
        sql = (
            "INSERT INTO records (key, parent, is_point, tokens, namespace, layout, n, after, nbytes, used)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (key) DO UPDATE SET nbytes = excluded.nbytes, used = excluded.used, after = excluded.after"
        )
        name = new.name
        namespace = self.namespace_id(name.fingerprint)
        values = (name.key, new.parent, name.is_point, new.tokens, namespace, new.layout, new.n)
        self.close_holes([name.key])
        self.execute(sql, (*values, new.after, new.nbytes, used))

    def delete(self, keys: Iterable[Key]) -> None:
        """Take rows out."""
        for key in keys:
            self.execute("DELETE FROM records WHERE key = ?", (key,))

    def leave_hole(self, key: Key) -> None:
        """Take a row out, and remember where its chain went on, for what hangs below."""
        self.execute("INSERT OR REPLACE INTO holes SELECT key, parent, tokens FROM records WHERE key = ?", (key,))
        self.delete([key])

    def hole(self, key: Key) -> tuple[Key, bytes] | None:
        """Parent and tokens of a block that is gone while something hung from it."""
        row = self.one("SELECT parent, tokens FROM holes WHERE key = ?", (key,))
        return (Key(row[0]), row[1]) if row else None

    def prune_holes(self) -> None:
        """Forget holes from which nothing hangs any more."""
        sql = (
            "DELETE FROM holes WHERE NOT EXISTS (SELECT 1 FROM records WHERE parent = holes.key)"
            " AND NOT EXISTS (SELECT 1 FROM holes AS below WHERE below.parent = holes.key)"
        )
        while self.execute(sql).rowcount > 0:
            continue

    def close_holes(self, keys: Iterable[Key]) -> None:
        """Forget where chains went on."""
        for key in keys:
            self.execute("DELETE FROM holes WHERE key = ?", (key,))

    def condemn(self, key: Key, intent: int) -> None:
        """Mark a record as being removed by `intent`; nobody finds it any more."""
        self.execute("UPDATE records SET condemned = ? WHERE key = ?", (intent, key))

    def condemned(self, intent: int) -> list[Row]:
        """The records that `intent` removes."""
        return [_row(found) for found in self.rows(f"{self._ROW} condemned = ?", (intent,))]

    def is_condemned(self, key: Key) -> bool:
        """Whether somebody is removing `key`."""
        return self.one("SELECT 1 FROM records WHERE key = ? AND condemned != 0", (key,)) is not None

    def use(self, keys: Sequence[Key]) -> None:
        """Note that a whole path was used now."""
        used = self.tick()
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            marks = ",".join("?" * len(batch))
            self.execute(f"UPDATE records SET used = ? WHERE key IN ({marks})", (used, *batch))

    def tick(self) -> int:
        """The next value of the recency counter."""
        self.count("recency", 1)
        return int(self.one("SELECT value FROM counters WHERE name = 'recency'")[0])

    def expose(self, key: Key) -> None:
        """Make `key`'s descendants the first to be evicted: the record itself is damaged."""
        sql = (
            "WITH RECURSIVE below (key) AS (SELECT ?1 UNION"
            " SELECT records.key FROM records JOIN below ON records.parent = below.key)"
            " UPDATE records SET used = 0 WHERE key IN below"
        )
        self.execute(sql, (key,))

    def expose_orphans(self, block_tokens: int) -> None:
        """Make records whose chain has a hole the first to be evicted: nobody can find them before it is closed."""
        sql = (
            "WITH RECURSIVE lost (key) AS (SELECT key FROM records WHERE n >= ?1 + 1 - is_point"
            " AND NOT EXISTS (SELECT 1 FROM records AS above WHERE above.key = records.parent)"
            " UNION SELECT records.key FROM records JOIN lost ON records.parent = lost.key)"
            " UPDATE records SET used = 0 WHERE key IN lost"
        )
        self.execute(sql, (block_tokens,))

    def below(self, key: Key) -> list[Row]:
        """The live records that descend from `key`, deepest first."""
        sql = (
            "WITH RECURSIVE below (key) AS (SELECT ?1 UNION"
            " SELECT records.key FROM records JOIN below ON records.parent = below.key)"
            f" {self._ROW} condemned = 0 AND key IN below AND key != ?1 ORDER BY n DESC"
        )
        return [_row(found) for found in self.rows(sql, (key,))]

    def path_nbytes(self, keys: Sequence[Key]) -> int:
        """Bytes of those of `keys` that are there."""
        total = 0
        for start in range(0, len(keys), _BATCH):
            rows = self._among("SELECT TOTAL(nbytes) FROM records WHERE key", keys[start : start + _BATCH])
            total += int(rows[0][0])
        return total

    # Keys that are remembered: evicted, seen once, forgotten.

    def remember_evicted(self, keys: Iterable[Key]) -> None:
        """Keep the keys of evicted records, the last 10,000 of them."""
        self._remember("evicted", keys)

    def remember_sightings(self, keys: Iterable[Key]) -> None:
        """Keep keys that were seen once, the last 10,000 of them."""
        self._remember("sightings", keys)

    def _remember(self, table: str, keys: Iterable[Key]) -> None:
        for key in keys:
            self.execute(f"INSERT OR REPLACE INTO {table} (key) VALUES (?)", (key,))
        self.execute(f"DELETE FROM {table} WHERE id <= (SELECT MAX(id) FROM {table}) - ?", (REMEMBERED,))

    def among_evicted(self, keys: Sequence[Key]) -> bool:
        """Whether one of `keys` (500 at most) was evicted lately."""
        return bool(self._among("SELECT 1 FROM evicted WHERE key", keys, "LIMIT 1"))

    def among_sightings(self, keys: Sequence[Key]) -> set[Key]:
        """Those of `keys` (500 at most) that were seen before."""
        return {Key(row[0]) for row in self._among("SELECT key FROM sightings WHERE key", keys)}

    def forget(self, rows: Iterable[Row]) -> int:
        """Let nobody write these records until every living process has taken note; the number of this forgetting."""
        self.count("forgets", 1)
        number = self.n_forgets()
        for row in rows:
            key, length = row.name.key, row.n if row.name.is_point else 0
            self.execute("INSERT OR REPLACE INTO forgotten VALUES (?, ?, ?)", (key, number, length))
            self.execute("DELETE FROM evicted WHERE key = ?", (key,))
            self.execute("DELETE FROM sightings WHERE key = ?", (key,))
        return number

    def n_forgets(self) -> int:
        """The number of the last forgetting."""
        found = self.one("SELECT value FROM counters WHERE name = 'forgets'")
        return int(found[0]) if found else 0

    def forgotten_since(self, number: int) -> Forgotten:
        """What was forgotten after the forgetting `number`, as far as it is not settled."""
        rows = self.rows("SELECT key, length FROM forgotten WHERE number > ?", (number,))
        return Forgotten(frozenset(Key(row[0]) for row in rows), frozenset(int(row[1]) for row in rows))

    def note_forgets(self, process: str, number: int) -> None:
        """A process has taken note of everything forgotten up to `number`."""
        self.execute("INSERT OR REPLACE INTO processes VALUES (?, ?)", (process, number))

    def processes(self) -> list[str]:
        """The processes that must take note."""
        return [row[0] for row in self.rows("SELECT process FROM processes")]

    def remove_process(self, process: str) -> None:
        """A process has gone."""
        self.execute("DELETE FROM processes WHERE process = ?", (process,))

    def settle_forgets(self) -> None:
        """Drop the keys that every process has taken note of."""
        self.execute("DELETE FROM forgotten WHERE number <= (SELECT MIN(noted) FROM processes)")

    def empty(self) -> None:
        """Take out everything but the counters."""
        for table in ("intent_writes", "intents", "records", "entries", "layouts", "namespaces", "quarantine", "holes"):
            self.execute(f"DELETE FROM {table}")
        self.execute("DELETE FROM counters WHERE name = 'built'")
        for total in ("record", "reserved", "quarantine"):
            self.execute(f"UPDATE totals SET {total}_bytes = 0, {total}_files = 0")

    # Namespaces and layouts.

    def namespace_id(self, fingerprint: bytes) -> int:
        """The row of a namespace, made when it is not there."""
        found = self.one("SELECT id FROM namespaces WHERE fingerprint = ?", (fingerprint,))
        if found is None:
            self.execute("INSERT OR IGNORE INTO namespaces (fingerprint) VALUES (?)", (fingerprint,))
            found = self.one("SELECT id FROM namespaces WHERE fingerprint = ?", (fingerprint,))
        return int(found[0])

    def namespaces(self) -> list[tuple[bytes, int, int]]:
        """Fingerprint, files and bytes of each namespace."""
        sql = (
            "SELECT fingerprint, COUNT(records.id), TOTAL(records.nbytes) FROM namespaces"
            " LEFT JOIN records ON records.namespace = namespaces.id AND condemned = 0 GROUP BY namespaces.id"
        )
        return [(row[0], int(row[1]), int(row[2])) for row in self.rows(sql)]

    def add_layout(self, fingerprint: bytes, digest: bytes, spec: bytes) -> None:
        """Remember a layout that a namespace has records of."""
        values = (self.namespace_id(fingerprint), digest, spec)
        self.execute("INSERT OR IGNORE INTO layouts VALUES (?, ?, ?)", values)

    def layouts(self, fingerprint: bytes) -> list[bytes]:
        """The layouts that a namespace has, or had, records of."""
        sql = "SELECT spec FROM layouts JOIN namespaces ON id = namespace WHERE fingerprint = ?"
        return [row[0] for row in self.rows(sql, (fingerprint,))]

    # Intents, quarantine, totals, counters.

    def add_intent(
        self, process: str, nbytes: int = 0, writes: Sequence[RecordName] = (), *, erases: bool = False
    ) -> int:
        """Note what `process` is about to write or erase, and reserve its bytes and files."""
        sql = "INSERT INTO intents (process, bytes, files, erases) VALUES (?, ?, ?, ?)"
        cursor = self.execute(sql, (process, nbytes, len(writes), erases))
        intent = int(cursor.lastrowid or 0)
        for i, name in enumerate(writes):
            values = (intent, i, name.fingerprint, name.key, name.is_point)
            self.execute("INSERT INTO intent_writes VALUES (?, ?, ?, ?, ?)", values)
        return intent

    def end_intent(self, intent: int) -> None:
        """Take an intent out."""
        self.execute("DELETE FROM intent_writes WHERE intent = ?", (intent,))
        self.execute("DELETE FROM intents WHERE id = ?", (intent,))

    def intents(self) -> list[tuple[int, str]]:
        """Id and process of every intent, oldest first."""
        return [(int(row[0]), row[1]) for row in self.rows("SELECT id, process FROM intents ORDER BY id")]

    def erases(self, intent: int) -> bool:
        """Whether what an intent removes must never be found again."""
        return bool(self.one("SELECT erases FROM intents WHERE id = ?", (intent,))[0])

    def intent_writes(self, intent: int) -> list[RecordName]:
        """What an intent is about to write, in order."""
        sql = "SELECT fingerprint, key, is_point FROM intent_writes WHERE intent = ? ORDER BY position"
        return [RecordName(row[0], Key(row[1]), bool(row[2])) for row in self.rows(sql, (intent,))]

    def quarantine(self) -> list[tuple[str, int]]:
        """Names and bytes of the files in quarantine, oldest first."""
        return [(row[0], int(row[1])) for row in self.rows("SELECT name, nbytes FROM quarantine ORDER BY id")]

    def add_quarantined(self, file_name: str, nbytes: int) -> None:
        """Note a file in quarantine."""
        # Not OR REPLACE, which would take the old row out without its trigger: the totals would drift.
        self.delete_quarantined(file_name)
        self.execute("INSERT INTO quarantine (name, nbytes) VALUES (?, ?)", (file_name, nbytes))

    def delete_quarantined(self, file_name: str) -> None:
        """Forget a file that was in quarantine."""
        self.execute("DELETE FROM quarantine WHERE name = ?", (file_name,))

    def totals(self) -> Totals:
        """What the limits count, index and log apart."""
        sql = (
            "SELECT record_bytes, record_files, reserved_bytes, reserved_files, quarantine_bytes,"
            " quarantine_files FROM totals"
        )
        return Totals(*map(int, self.one(sql)))

    def condemned_totals(self) -> tuple[int, int]:
        """Files and bytes of records that are being removed."""
        row = self.one("SELECT COUNT(*), TOTAL(nbytes) FROM records WHERE condemned != 0")
        return int(row[0]), int(row[1])

    def own_nbytes(self, *, reserve: bool = False) -> int:
        """Bytes of index and log on the disk, each rounded up to 4 KiB; with `reserve`, the log at its usual most."""
        total = 0
        for suffix, least in (("", 0), ("-wal", LOG_NBYTES if reserve else 0), ("-shm", 0)):
            size = 0
            with contextlib.suppress(OSError):
                size = self.path.with_name(self.path.name + suffix).stat().st_size
            total += max(least, -(-size // 4096) * 4096)
        return total

    def count(self, name: str, by: int) -> None:
        """Add to a counter."""
        sql = "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = value + ?2"
        self.execute(sql, (name, by))

    def is_built(self) -> bool:
        """Whether the records that were there when the index was made have been entered."""
        return self.one("SELECT 1 FROM counters WHERE name = 'built'") is not None

    def set_built(self) -> None:
        """Note, in the transaction that enters them, that they are entered."""
        self.set_counter("built", 1)

    def set_counter(self, name: str, value: int) -> None:
        """Set a counter."""
        sql = "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = ?2"
        self.execute(sql, (name, value))

    def counters(self) -> dict[str, int]:
        """All counters."""
        return {row[0]: int(row[1]) for row in self.rows("SELECT name, value FROM counters")}


def _child(row: Any) -> Child | None:
    if row is None:
        return None
    key, is_point, n, tokens, after = row
    if not (isinstance(key, bytes) and isinstance(tokens, bytes) and isinstance(n, int)):
        raise IndexFault("the index holds what was never written there", broken=True)
    return Child(Key(key), bool(is_point), n, tokens, Key(after) if after is not None else None)


def _row(row: Any) -> Row:
    name = RecordName(row[0], Key(row[1]), bool(row[2]))
    return Row(name, Key(row[3]), int(row[4]), int(row[5]), int(row[6]))
