"""Room under the limits: what must go, what goes, and the removal of what was chosen.

Everything that a limit counts is looked at here: records, reservations, quarantine, index and log, and
what is free on the disk. Called inside transactions; owns none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rewarm.state.chain import Key
from rewarm.store.entries import Entries
from rewarm.store.evict import Need, choose
from rewarm.store.files import Files
from rewarm.store.index import Index, Row
from rewarm.store.settings import Limits

INDEX_ROW_NBYTES = 4096
"""What one more record may add to the index, at the most."""


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


class Room:
    """Makes room in one root.

    Attributes:
        gone: fingerprints of namespaces whose records go before others.
    """

    def __init__(self, index: Index, files: Files, entries: Entries) -> None:
        self.index = index
        self.files = files
        self.entries = entries
        self.gone: Collection[bytes] = ()

    def need(self, limits: Limits, nbytes: int, n_files: int) -> Need:
        """What must go before `nbytes` bytes in `n_files` files may come; quarantine goes first."""
        need = self._over(limits, nbytes, n_files)
        for file_name, _ in self.index.quarantine():
            if need.is_met():
                break
            if self.files.remove_quarantined(file_name):
                self.index.delete_quarantined(file_name)
                need = self._over(limits, nbytes, n_files)
        return need

    def settle(self, victims: Sequence[Row], gone: Sequence[Row]) -> None:
        """Rows of evicted files go, and their keys are remembered; files that cannot be removed are found again."""
        keys = [row.name.key for row in gone]
        self.index.delete(keys)
        self.index.remember_evicted(keys)
        self.index.prune_holes()
        for row in victims:
            if row.name.key not in keys:
                self.index.condemn(row.name.key, 0)
        self.index.count("evicted_files", len(gone))

    def _over(self, limits: Limits, nbytes: int, n_files: int) -> Need:
        totals = self.index.totals()
        coming = nbytes + n_files * INDEX_ROW_NBYTES
        over = totals.nbytes + self.index.own_nbytes(reserve=True) + coming - (limits.max_bytes or 0)
        short = (limits.min_free_bytes or 0) + nbytes - self.files.free_bytes()
        return Need(max(over, short), totals.n_files + n_files - (limits.max_files or 0))

    def choose(self, need: Need, path: Collection[Key], wanted: Collection[Key]) -> list[Row]:
        """The records that go for `need`, children first; `need` is lowered by what they free.

        Args:
            need: what must be freed.
            path: keys that are being written or built on: spared, as pinned paths are.
            wanted: keys that go only when nothing else is left.
        """
        if need.is_met():
            return []
        spared = self.entries.path() | set(path)
        return choose(self._in_order, need, spared, wanted, self.index.hanging)

    def _in_order(self) -> Iterator[Row]:
        """Live records in the order in which they go: those of models that are gone first."""
        for fingerprint in sorted(self.gone):
            yield from self.index.by_use(fingerprint)
        yield from self.index.by_use()

    def condemn(self, rows: Sequence[Row], intent: int) -> None:
        """Nobody finds `rows` any more; entries that end there are shortened."""
        for row in rows:
            self.entries.shorten(row.name.key)
            self.index.condemn(row.name.key, intent)

    def unlink(self, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """Remove files; those that are gone, and those that cannot be removed."""
        gone: list[Row] = []
        stuck: list[Row] = []
        for row in rows:
            (gone if self.files.remove(row.name) else stuck).append(row)
        return gone, stuck
