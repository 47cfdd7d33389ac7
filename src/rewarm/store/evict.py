"""What to drop when a limit would be passed. Pure: index rows in, index rows out.

Least recently matched first, deepest first, so that no chain is left with a hole: a record from which
another one hangs stays until that one goes. Pins and the path being written are never dropped; what a
process has just found is dropped only when nothing else is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from rewarm.state.chain import Key
from rewarm.store.index import Row


@dataclass(slots=True)
class Need:
    """How much must go: bytes and files, each 0 or less when nothing must."""

    nbytes: int
    n_files: int

    def is_met(self) -> bool:
        """Whether enough has gone."""
        return self.nbytes <= 0 and self.n_files <= 0

    def less(self, nbytes: int) -> None:
        """One file of `nbytes` bytes goes."""
        self.nbytes -= nbytes
        self.n_files -= 1


def choose(
    rows: Callable[[], Iterable[Row]],
    need: Need,
    spared: Collection[Key],
    wanted: Collection[Key],
    hanging: Callable[[Key], Collection[Key]],
) -> list[Row]:
    """The records to drop, children before parents; `need` is lowered by what they free.

    Args:
        rows: live records in the order in which they go, some of them twice perhaps: those of models that are gone,
            then the least recently used first, deepest first.
        need: what must be freed.
        spared: never dropped.
        wanted: dropped only when nothing else is left.
        hanging: live records that need a given one.
    """
    chosen: list[Row] = []
    dropped: set[Key] = set()
    for soft in (frozenset(wanted), frozenset[Key]()):
        progress = True
        while progress and not need.is_met():
            progress = False
            for row in rows():
                key = row.name.key
                if need.is_met():
                    break
                if key in dropped or key in spared or key in soft or not dropped.issuperset(hanging(key)):
                    continue
                chosen.append(row)
                dropped.add(key)
                need.less(row.nbytes)
                progress = True
    return chosen
