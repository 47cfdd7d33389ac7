"""Thinning: which restore points of a conversation are kept. Pure but for following window runs in the index.

Of the points that an entry has since its last fork, the newest four stay, and those nearest to 1/2, 1/4 and
1/8 of its length, and whatever their window runs need. A point at which another entry ends, a system
prompt's above all, is not among them: it belongs to both.
"""

from __future__ import annotations

from collections.abc import Sequence

from rewarm.state.chain import Key
from rewarm.state.plan import Child
from rewarm.store.index import Index

NEWEST = 4
FRACTIONS = (2, 4, 8)


def kept(points: Sequence[int], n: int) -> set[int]:
    """Which of the points at these lengths are kept, for an entry of `n` tokens."""
    newest = sorted(points)[-NEWEST:]
    older = [point for point in points if point not in newest]
    nearest = {min(older, key=lambda point: abs(point - n / fraction)) for fraction in FRACTIONS if older}
    return {*newest, *nearest}


def thin(own: Sequence[Child], n: int, index: Index) -> list[Key]:
    """The keys of the points among an entry's own records that may go, deepest first."""
    points = {child.key: child for child in own if child.is_point}
    keep = kept([child.n for child in points.values()], n)
    needed: set[Key] = set()
    for child in points.values():
        if child.n in keep:
            current: Child | None = child
            while current is not None and current.key not in needed:
                needed.add(current.key)
                current = index.child(current.after) if current.after is not None else None
    stale = [child for child in points.values() if child.key not in needed and index.hanging(child.key) <= set(points)]
    return [child.key for child in sorted(stale, key=lambda child: -child.n)]
