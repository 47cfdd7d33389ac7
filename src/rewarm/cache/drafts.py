"""States to records: cut the state of a sequence into blocks and a point, copying only what is not there.

Pure but for the copies that it makes; it does not know queues or disks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from rewarm.format.record import Part
from rewarm.state.chain import Chain, Key
from rewarm.state.layout import Kind, Layout, TensorSpec
from rewarm.state.plan import tail_tokens
from rewarm.state.sequence import Array, SequenceState
from rewarm.store.commit import Draft
from rewarm.store.files import RecordName


def keys_of(chain: Chain) -> list[Key]:
    """The keys of every record that a state over all of `chain` consists of: blocks, then the point."""
    return [*chain.blocks(), chain.point(len(chain.tokens))]


def drafts(
    state: SequenceState, layout: Layout, chain: Chain, fingerprint: bytes, present: Collection[Key]
) -> tuple[Draft, ...]:
    """The records of `state` whose keys are not in `present`, as private copies, in the chain's order."""
    made: list[Draft] = []
    size = chain.block_tokens
    for i, key in enumerate(chain.blocks()):
        if key not in present:
            first, end = i * size, (i + 1) * size
            parts = tuple(Part(spec, _rows(state, spec, first, end)) for spec in layout.rows)
            name = RecordName(fingerprint, key, is_point=False)
            made.append(Draft(name, chain.parent(i), first, chain.tokens[first:end], parts))
    n = state.n_tokens
    point = chain.point(n)
    if point not in present:
        first = n // size * size
        parts = tuple(Part(spec, _at_point(state, spec, first)) for spec in layout.tensors)
        name = RecordName(fingerprint, point, is_point=True)
        made.append(Draft(name, chain.parent(n // size), first, tail_tokens(chain, n), parts))
    return tuple(made)


def missing_nbytes(state: SequenceState, layout: Layout, chain: Chain, present: Collection[Key]) -> int:
    """Bytes that `drafts` would copy."""
    row = sum(spec.row_nbytes for spec in layout.rows)
    n_blocks = sum(key not in present for key in chain.blocks())
    total = row * chain.block_tokens * n_blocks
    if chain.point(state.n_tokens) not in present:
        others = (state.tensors[spec.name].array.nbytes for spec in layout.tensors if spec.kind is not Kind.ROWS)
        total += row * (state.n_tokens % chain.block_tokens) + sum(others)
    return total


def private(state: SequenceState) -> SequenceState:
    """`state` with copies of its arrays."""
    tensors = {name: replace(tensor, array=np.array(tensor.array, copy=True)) for name, tensor in state.tensors.items()}
    return replace(state, tensors=tensors, meta=dict(state.meta))


def _at_point(state: SequenceState, spec: TensorSpec, first: int) -> Array:
    if spec.kind is Kind.ROWS:
        return _rows(state, spec, first, state.n_tokens)
    return _copy(state.tensors[spec.name].array, spec)


def _rows(state: SequenceState, spec: TensorSpec, first: int, end: int) -> Array:
    index = (slice(None),) * spec.axis + (slice(first, end),)
    return _copy(state.tensors[spec.name].array[index], spec)


def _copy(array: Array, spec: TensorSpec) -> Array:
    # A copy even where the array is contiguous: the engine goes on writing into its own.
    return np.array(array, dtype=spec.storage, order="C", copy=True)
