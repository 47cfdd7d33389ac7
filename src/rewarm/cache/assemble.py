"""Records to states: put the tensors of a plan together, checking that each record is the one meant.

It knows where rows go, not where records lie. Before a record's bytes are read, a step says where they are to
be: rows of whole records come straight to their place among the others, on the thread that reads them; what a
plan cuts, and windows out of several points, is read elsewhere and copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from rewarm.cache.memory import free_memory
from rewarm.errors import RecordError
from rewarm.format.record import Header
from rewarm.state.chain import Chain, Key
from rewarm.state.layout import Kind, Layout, TensorSpec
from rewarm.state.plan import Plan
from rewarm.state.sequence import Array, MetaValue, Opaque, Rows, SequenceState, Tensor, Window
from rewarm.store.scatter import Place, private_arrays

Into = Callable[[str, tuple[int, ...], npt.DTypeLike], Array]
"""A buffer for a tensor: name, least shape, element type; its token axis may be longer."""

Record = tuple[Header, dict[str, Array]]


class ForeignRecord(RecordError):
    """A record is whole, but is not the one that the prompt's tokens ask for."""

    def __init__(self, key: Key, why: str) -> None:
        super().__init__(why)
        self.key = key


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One record to read.

    Attributes:
        key: of the record.
        is_point: whether it is a point.
        place: says where its tensors go, once its header is known; called on the thread that reads.
    """

    key: Key
    is_point: bool
    place: Place


class Assembly:
    """A state being put together.

    Args:
        layout: of the state.
        chain: over all tokens up to its end, from the root of model, layout and tenant: what every record's key
            and parent are held against. The index only said where to look.
        plan: the records.
        into: makes the buffers, or None; called on this thread.

    Attributes:
        steps: the records to read, in the order in which `run` asks for them.

    Raises:
        ValueError: `into` gave a buffer of another shape or element type, or one that cannot be written.
    """

    def __init__(self, layout: Layout, chain: Chain, plan: Plan, into: Into | None = None) -> None:
        self._layout = layout
        self._chain = chain
        self._plan = plan
        self._into = into
        self._arrays = {spec.name: self._buffer(spec, plan.n) for spec in layout.rows}
        if plan.exact:
            self._arrays |= {spec.name: self._buffer(spec, spec.window_rows(plan.n)) for spec in layout.windows}
        size = chain.block_tokens
        self.steps = [
            Step(key, is_point=False, place=partial(self._place_rows, i * size, size))
            for i, key in enumerate(plan.blocks)
        ]
        if plan.tail is not None:
            self.steps.append(Step(plan.tail, is_point=plan.tail_is_point, place=self._place_tail))
        elif plan.n != len(plan.blocks) * size:
            raise AssertionError("a plan without a tail ends at a block's edge")
        earlier = (key for key in plan.points if key != plan.tail)
        self.steps += [Step(key, is_point=True, place=self._place_earlier) for key in earlier]

    def run(self, read: Callable[[Step], Record]) -> SequenceState:
        """The state at the plan's end.

        Args:
            read: brings a record, its tensors where `Step.place` says and every byte checked; it is asked for the
                steps in their order.

        Raises:
            RecordError, OSError: as `read` does; `ForeignRecord` for a record of other tokens.
        """
        n_blocks = len(self._plan.blocks)
        for step in self.steps[:n_blocks]:
            read(step)
        meta: dict[str, MetaValue] = {}
        if self._plan.tail is not None:
            header, arrays = read(self.steps[n_blocks])
            self._take_rows(header, arrays)
            if self._plan.exact:
                meta = dict(header.meta)
                for spec in self._layout.tensors:
                    if spec.kind is Kind.OPAQUE:
                        # Taken out, so that a copy needs room for one tensor, not for all of them.
                        self._arrays[spec.name] = self._own(spec, arrays.pop(spec.name))
                if self._layout.windows:
                    self._take_windows(header, arrays, self.steps[n_blocks + 1 :], read)
        state = SequenceState(self._plan.n, self._tensors(), meta, self._layout.valid_from)
        self._arrays = {}  # the steps hold this object in a circle: it must not keep what the caller lets go of
        return state

    # Where tensors go: on the reading threads, before the bytes are read.

    def _place_rows(self, first: int, n_rows: int, header: Header) -> dict[str, Array]:
        """The places of a record whose first `n_rows` rows are those of tokens `[first, first + n_rows)`."""
        own = header.token_ids
        if header.layout != self._layout.digest or header.first != first or len(own) < n_rows:
            raise ForeignRecord(Key(header.key), "lies elsewhere in a sequence than is asked for")
        if header.parent != self._chain.parent(first // self._chain.block_tokens):
            raise ForeignRecord(Key(header.key), "hangs from other tokens than are asked for")
        if not np.array_equal(own[:n_rows], self._chain.tokens[first : first + n_rows]):
            raise ForeignRecord(Key(header.key), "holds other tokens than are asked for")
        stored = {entry.name: (entry.storage, entry.stored_shape()) for entry in header.tensors}
        places: dict[str, Array] = {}
        for spec in self._layout.rows:
            if stored.get(spec.name) != (spec.storage, spec.shape_with(len(own))):
                raise ForeignRecord(Key(header.key), f"has no tensor {spec.name!r} of the layout's shape")
            if n_rows == len(own):
                places[spec.name] = self._arrays[spec.name][_along(spec, first, first + n_rows)]
        return {**private_arrays(header, without=places), **places}

    def _place_tail(self, header: Header) -> dict[str, Array]:
        plan = self._plan
        first = len(plan.blocks) * self._chain.block_tokens
        places = self._place_rows(first, plan.n - first, header)
        if not plan.exact:
            return places
        if header.n != plan.n or header.key != self._chain.point(plan.n) or header.read_layout() != self._layout:
            raise ForeignRecord(Key(header.key), "is no point at the length that is asked for")
        _check_room(header)
        for spec in self._layout.windows:
            target = self._arrays[spec.name][_along(spec, 0, spec.window_rows(plan.n))]
            if places[spec.name].shape == target.shape:
                places[spec.name] = target
        return places

    def _place_earlier(self, header: Header) -> dict[str, Array]:
        if header.n > len(self._chain.tokens) or header.key != self._chain.point(header.n):
            raise ForeignRecord(Key(header.key), "is no point of the tokens that are asked for")
        own = self._chain.tokens[header.first : header.n]
        if header.layout != self._layout.digest or not np.array_equal(header.token_ids, own):
            raise ForeignRecord(Key(header.key), "holds other tokens than are asked for")
        return private_arrays(header)

    # What was read elsewhere: on the caller's thread.

    def _take_rows(self, header: Header, arrays: dict[str, Array]) -> None:
        """Copy the rows of a record that the plan cuts."""
        first, n = header.first, self._plan.n
        if n == header.n:
            return
        for spec in self._layout.rows:
            self._arrays[spec.name][_along(spec, first, n)] = arrays[spec.name][_along(spec, 0, n - first)]

    def _take_windows(
        self, header: Header, arrays: dict[str, Array], earlier: list[Step], read: Callable[[Step], Record]
    ) -> None:
        """Fill the windows from the point's own run and from the runs of earlier points, latest first."""
        n = self._plan.n
        for spec in self._layout.windows:
            kept = _along(spec, 0, spec.window_span(n)[0])
            if not np.may_share_memory(arrays[spec.name], self._arrays[spec.name]):
                self._arrays[spec.name][kept] = arrays[spec.name][kept]
        open_until = {spec.name: n for spec in self._layout.windows}
        last = header.key
        for step in (None, *earlier):
            if step is not None:
                if header.after != step.key:
                    raise ForeignRecord(step.key, "is not the point behind which the window rows begin")
                header, arrays = read(step)
                last = header.key
            for spec in self._layout.windows:
                open_until[spec.name] = self._take_run(spec, open_until[spec.name], header, arrays)
        for spec in self._layout.windows:
            if open_until[spec.name] > spec.window_span(n)[1]:
                raise ForeignRecord(Key(last), f"leaves rows of the window {spec.name!r} open")

    def _take_run(self, spec: TensorSpec, until: int, header: Header, arrays: dict[str, Array]) -> int:
        """Copy what a point holds of the window's rows before token `until`; where the rows begin now."""
        kept, start = spec.window_span(self._plan.n)
        source, target = arrays[spec.name], self._arrays[spec.name]
        own_kept = min(spec.keep, header.n)
        run_start = header.n - (source.shape[spec.axis] - own_kept)
        begin, end = max(start, int(run_start)), min(until, header.n)
        if end < until or begin >= end:
            return until
        if not np.may_share_memory(source, target):
            rows = source[_along(spec, own_kept + begin - run_start, own_kept + end - run_start)]
            target[_along(spec, kept + begin - start, kept + end - start)] = rows
        return begin

    def _buffer(self, spec: TensorSpec, n_rows: int) -> Array:
        return self._made(spec, spec.shape_with(n_rows))

    def _own(self, spec: TensorSpec, array: Array) -> Array:
        """An opaque tensor where the caller wants it."""
        if self._into is None:
            return array
        buffer = self._made(spec, array.shape)
        buffer[...] = array
        return buffer

    def _made(self, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        dtype = np.dtype(spec.storage)
        if self._into is None:
            return np.empty(shape, dtype)
        buffer = self._into(spec.name, shape, dtype)
        if buffer.dtype != dtype or not buffer.flags.writeable or not _fits(buffer.shape, shape, spec):
            raise ValueError(f"the buffer for {spec.name!r} must be a writable array of {dtype}, at least {shape}")
        return buffer

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for spec in self._layout.tensors:
            array = self._arrays[spec.name]
            # The engine's name is given back only where numpy has none of its own for the type.
            dtype = spec.dtype if spec.dtype != array.dtype.name else None
            if spec.kind is Kind.ROWS:
                tensors[spec.name] = Rows(array, spec.axis, dtype)
            elif spec.kind is Kind.WINDOW:
                tensors[spec.name] = Window(array, spec.axis, spec.size, spec.keep, dtype)
            else:
                tensors[spec.name] = Opaque(array, dtype)
        return tensors


def _check_room(header: Header) -> None:
    """Opaque tensors are in no layout's sum of bytes: only the point that holds them says how large they are.

    Raises:
        MemoryError: there is less room than they take.
    """
    needed = sum(entry.length for entry in header.tensors if entry.kind == Kind.OPAQUE.value)
    free = free_memory() if needed else None
    if free is not None and needed > free:
        raise MemoryError(f"opaque tensors of {needed} bytes, {free} are free")


def _along(spec: TensorSpec, first: int, end: int) -> tuple[slice, ...]:
    """The index of rows `[first, end)`."""
    return (*(slice(None),) * spec.axis, slice(first, end))


def _fits(given: tuple[int, ...], asked: tuple[int, ...], spec: TensorSpec) -> bool:
    """Whether a buffer's shape is the one asked for, or longer along the token axis."""
    if len(given) != len(asked) or spec.kind is Kind.OPAQUE:
        return given == asked
    along = spec.axis
    others = (given[:along] + given[along + 1 :]) == (asked[:along] + asked[along + 1 :])
    return others and given[along] >= asked[along]
