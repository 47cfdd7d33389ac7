"""Where the bytes of a record go in memory: straight into the arrays that they are for, wherever rows are long.

A record holds each tensor back to back; the array that it belongs into has, for each head, rows of other
records before and after. So a tensor is read as a list of pieces, one for each contiguous run. Pure but for
the buffers that it makes: it knows neither files nor what the tensors mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rewarm.errors import RecordError
from rewarm.format.pieces import as_bytes, runs
from rewarm.format.record import Header, TensorEntry, check_tensor
from rewarm.state.sequence import Array
from rewarm.store.disk import MAX_BUFFERS, MAX_PIECE

Place = Callable[[Header], Mapping[str, Array]]
"""Gives, for a record's header, the array of each tensor of its table: of the stored shape and element type,
contiguous or not; or raises `RecordError` for a record that is not wanted."""

GROUP_BYTES = 4 * 2**20
"""Bytes that are read before they are checked: they are still in the processor's cache then."""


def private_arrays(header: Header, without: Collection[str] = ()) -> dict[str, Array]:
    """New arrays for the tensors of a record, but for those in `without`. The header's sizes fit the file's."""
    return {
        entry.name: np.empty(entry.stored_shape(), entry.storage)
        for entry in header.tensors
        if entry.name not in without
    }


@dataclass(slots=True)
class Group:
    """Tensors that are read in one go.

    Attributes:
        pieces: what is filled, in the record's order.
    """

    pieces: list[memoryview] = field(default_factory=list)
    _tensors: list[tuple[TensorEntry, list[memoryview]]] = field(default_factory=list)
    _copies: list[tuple[Array, Array]] = field(default_factory=list)
    nbytes: int = 0

    def add(self, entry: TensorEntry, array: Array) -> None:
        """Have a tensor read into `array`."""
        if array.shape != entry.stored_shape() or array.dtype != entry.storage:
            raise RecordError(f"tensor {entry.name!r} does not have the shape or the element type that is asked for")
        pieces = runs(array)
        if pieces is None:
            whole = np.empty(array.shape, array.dtype)
            self._copies.append((array, whole))
            pieces = [as_bytes(whole)]
        self.pieces += pieces
        self._tensors.append((entry, pieces))
        self.nbytes += entry.length

    def check(self) -> None:
        """Check every tensor, now that it has been read, and copy those that were read elsewhere.

        Raises:
            DamagedRecord: a checksum does not agree.
        """
        for entry, pieces in self._tensors:
            check_tensor(entry, pieces)
        for array, whole in self._copies:
            array[...] = whole


def groups(tensors: Sequence[tuple[TensorEntry, Array]]) -> Iterator[Group]:
    """The tensors of a record, in its order, in groups of some `GROUP_BYTES`."""
    group = Group()
    for entry, array in tensors:
        group.add(entry, array)
        if group.nbytes >= GROUP_BYTES or len(group.pieces) >= MAX_BUFFERS:
            yield group
            group = Group()
    yield group


def each(call: Callable[[Sequence[memoryview]], int], pieces: Sequence[memoryview]) -> None:
    """Have all bytes of `pieces` read or written, in as many system calls as it takes.

    Args:
        call: reads into, or writes, some bytes of the buffers that it gets; how many.
        pieces: of bytes.

    Raises:
        EOFError: a call did nothing.
    """
    rest = deque(piece for piece in pieces if len(piece))
    while rest:
        done = call(one_call(rest))
        if not done:
            raise EOFError
        while done:
            piece = rest.popleft()
            if len(piece) > done:
                rest.appendleft(piece[done:])
            done -= min(done, len(piece))


def one_call(pieces: Iterable[memoryview]) -> list[memoryview]:
    """As many of the first pieces as one system call fills, the last one cut where need be."""
    taken: list[memoryview] = []
    room = MAX_PIECE
    for piece in pieces:
        if not room or len(taken) == MAX_BUFFERS:
            break
        taken.append(piece[:room])
        room -= len(taken[-1])
    return taken
