"""States to records: cut the state of a sequence into blocks and a point, copying only what is not there.

Pure but for the copies that it makes, one piece of memory for each record; it does not know queues or disks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rewarm.cache.arena import ALIGNMENT, Arena
from rewarm.format.record import Part
from rewarm.state.chain import Chain, Key
from rewarm.state.layout import Kind, Layout, TensorSpec
from rewarm.state.plan import tail_tokens
from rewarm.state.sequence import Array, SequenceState
from rewarm.store.files import RecordName
from rewarm.store.saves import Draft


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A state and where it belongs."""

    state: SequenceState
    layout: Layout
    chain: Chain
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class After:
    """The earlier point behind which window runs begin.

    Attributes:
        key: the point.
        n: where it ends.
        points: it and the points that its own window runs need.
    """

    key: Key
    n: int
    points: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Drafts:
    """What was cut.

    Attributes:
        drafts: blocks, then the point, in the chain's order.
        nbytes: bytes that they hold.
        n_left: records that there was no room for.
        reached: tokens before the first of them; all when there was room.
    """

    drafts: tuple[Draft, ...]
    nbytes: int
    n_left: int
    reached: int


def keys_of(chain: Chain) -> list[Key]:
    """The keys of every record that a state over all of `chain` consists of: blocks, then the point."""
    return [*chain.blocks(), chain.point(len(chain.tokens))]


def drafts(cut: Cut, present: Collection[Key], after: After | None, room: int | None, arena: Arena | None) -> Drafts:
    """The records of a state whose keys are not in `present`.

    Args:
        cut: the state.
        present: keys of records that are there.
        after: where window runs begin, if not at the window's edge.
        room: bytes that may be held, or None for all; the first record that does not fit ends the list.
        arena: where copies are made; None to copy nothing but what does not have the form of a record.
    """
    made: list[Draft] = []
    nbytes = n_left = 0
    reached = cut.state.n_tokens
    for name, first, end, size in _missing(cut, present, after):
        if n_left or (room is not None and nbytes + size > room):
            n_left += 1
            reached = min(reached, first)
            continue
        nbytes += size
        made.append(_draft(cut, name, (first, end), after, arena))
    return Drafts(tuple(made), nbytes, n_left, reached)


def _missing(cut: Cut, present: Collection[Key], after: After | None) -> Iterator[tuple[RecordName, int, int, int]]:
    """Name, first token, end and bytes of each record that is not there."""
    size, n = cut.chain.block_tokens, cut.state.n_tokens
    row = sum(spec.row_nbytes for spec in cut.layout.rows)
    for i, key in enumerate(cut.chain.blocks()):
        if key not in present:
            yield RecordName(cut.fingerprint, key, is_point=False), i * size, (i + 1) * size, row * size
    point = cut.chain.point(n)
    if point not in present:
        others = sum(
            spec.row_nbytes * _window_rows(spec, n, after)
            if spec.kind is Kind.WINDOW
            else cut.state.tensors[spec.name].array.nbytes
            for spec in cut.layout.tensors
            if spec.kind is not Kind.ROWS
        )
        yield RecordName(cut.fingerprint, point, is_point=True), n // size * size, n, row * (n % size) + others


def private(draft: Draft) -> Draft:
    """`draft` with copies of its arrays."""
    parts = tuple(replace(part, array=np.array(part.array, order="C", copy=True)) for part in draft.parts)
    return replace(draft, parts=parts)


def _draft(cut: Cut, name: RecordName, span: tuple[int, int], after: After | None, arena: Arena | None) -> Draft:
    first, end = span
    parent = cut.chain.parent(first // cut.chain.block_tokens)
    specs = cut.layout.tensors if name.is_point else cut.layout.rows
    parts = tuple(Part(spec, _piece(cut.state, spec, span, after)) for spec in specs)
    if arena is not None:
        parts = _copied(parts, arena)
    tokens = tail_tokens(cut.chain, end) if name.is_point else cut.chain.tokens[first:end]
    if name.is_point and after is not None:
        return Draft(name, parent, first, tokens, parts, after.key, after.n)
    return Draft(name, parent, first, tokens, parts)


def _piece(state: SequenceState, spec: TensorSpec, span: tuple[int, int], after: After | None) -> Array:
    """What a record holds of a tensor: a view, unless it lies in two places."""
    array = state.tensors[spec.name].array
    lead = (slice(None),) * spec.axis
    if spec.kind is Kind.ROWS:
        array = array[(*lead, slice(*span))]
    elif spec.kind is Kind.WINDOW and after is not None:
        kept, _ = spec.window_span(state.n_tokens)
        run = _window_rows(spec, state.n_tokens, after) - kept
        rows = array.shape[spec.axis]
        pieces = [array[(*lead, slice(0, kept))], array[(*lead, slice(rows - run, rows))]]
        array = np.concatenate(pieces, axis=spec.axis) if kept else pieces[1]
    return array.astype(spec.storage, copy=False)


def _copied(parts: tuple[Part, ...], arena: Arena) -> tuple[Part, ...]:
    """`parts` as C-contiguous copies in one piece of memory: the engine goes on writing into its own arrays."""
    places, nbytes = [], 0
    for part in parts:
        places.append(nbytes)
        nbytes += -(-part.array.nbytes // ALIGNMENT) * ALIGNMENT
    memory = arena.take(nbytes)
    copies = []
    for part, at in zip(parts, places, strict=True):
        target = memory[at : at + part.array.nbytes].view(part.array.dtype).reshape(part.array.shape)
        target[...] = part.array
        copies.append(replace(part, array=target))
    return tuple(copies)


def _window_rows(spec: TensorSpec, n: int, after: After | None) -> int:
    """Rows of a window that a point at `n` holds itself: the kept ones and those of its run."""
    kept, start = spec.window_span(n)
    return kept + n - max(start, after.n if after else 0)


def unshared(state: SequenceState) -> SequenceState:
    """`state` with copies of its arrays."""
    tensors = {name: replace(tensor, array=np.array(tensor.array, copy=True)) for name, tensor in state.tensors.items()}
    return replace(state, tensors=tensors, meta=dict(state.meta))
