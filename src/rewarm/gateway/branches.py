"""Which conversations share which prefixes, in an order in which it can be drawn: a row each, branches below. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rewarm.gateway.entry_list import Row

MAX_DRAWN = 24
"""Conversations that a picture shows; more could not be told apart."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One conversation in the picture.

    Attributes:
        row: the entry.
        depth: 0 of one that branched off none of the others.
        fork_tokens: tokens up to where it branched off; 0 where it shares nothing.
        parent_at: place in the picture of the one it branched off, or None.
        of: title of that one, or "".
    """

    row: Row
    depth: int
    fork_tokens: int
    parent_at: int | None
    of: str


@dataclass(frozen=True, slots=True)
class Picture:
    """The branches of one model, top to bottom.

    Attributes:
        model: its name.
        branches: each behind the one that it branched off.
        n_tokens: of the longest.
    """

    model: str
    branches: list[Branch]
    n_tokens: int


def draw(rows: Sequence[Row], limit: int = MAX_DRAWN) -> tuple[list[Picture], int, int]:
    """Pictures of the entries that share something, one per model; how many are left out, and how many share nothing.

    Families with the latest match come first.

    Args:
        rows: all entries, latest match first.
        limit: entries that are drawn at most.
    """
    by_id = {row.entry.id: row for row in rows}
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(_oldest(row, by_id), []).append(row)
    pictures: dict[str, list[Branch]] = {}
    left, n_alone = limit, 0
    for family in families.values():
        if len(family) == 1:
            n_alone += 1
            continue
        chosen = _with_parents(family, by_id, left)
        if len(chosen) > 1:
            left -= len(chosen)
            _add(pictures.setdefault(chosen[0].entry.fingerprint, []), chosen)
    drawn = [
        Picture(branches[0].row.model, branches, max(each.row.entry.n_tokens for each in branches))
        for branches in pictures.values()
    ]
    return drawn, len(rows) - n_alone - (limit - left), n_alone


def _oldest(row: Row, by_id: dict[str, Row]) -> str:
    seen = set()
    while row.entry.parent in by_id and row.entry.id not in seen:
        seen.add(row.entry.id)
        row = by_id[row.entry.parent]
    return row.entry.id


def _with_parents(family: Iterable[Row], by_id: dict[str, Row], limit: int) -> list[Row]:
    """As many of a family as fit, each with all that it branched off."""
    chosen: dict[str, Row] = {}
    for row in family:
        line, at = [row], row
        while at.entry.parent in by_id and at.entry.parent not in chosen and len(line) <= limit:
            at = by_id[at.entry.parent]
            line.append(at)
        missing = [each for each in line if each.entry.id not in chosen]
        if len(chosen) + len(missing) > limit:
            continue
        chosen.update({each.entry.id: each for each in missing})
    return list(chosen.values())


def _add(branches: list[Branch], chosen: list[Row]) -> None:
    """Put a family's rows in order: each one's own branches right below it, those that left last first."""
    ids = {row.entry.id for row in chosen}
    below: dict[str | None, list[Row]] = {}
    for row in chosen:
        below.setdefault(row.entry.parent if row.entry.parent in ids else None, []).append(row)
    waiting = [(row, 0, None, "") for row in reversed(below.get(None, []))]
    stack: list[tuple[Row, int, int | None, str]] = list(waiting)
    while stack:
        row, depth, parent_at, of = stack.pop()
        at = len(branches)
        branches.append(Branch(row, depth, row.entry.fork_tokens if parent_at is not None else 0, parent_at, of))
        children = sorted(below.get(row.entry.id, []), key=lambda each: each.entry.fork_tokens)
        stack += [(each, depth + 1, at, row.title) for each in children]
