"""Records to states: put the tensors of a plan together, checking that each record is the one meant.

It knows where rows go, not where records lie: `read` brings a record with every byte checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rewarm.errors import RecordError
from rewarm.format.record import Header
from rewarm.state.chain import Chain, Key
from rewarm.state.layout import Kind, Layout, TensorSpec
from rewarm.state.plan import Plan
from rewarm.state.sequence import Array, MetaValue, Opaque, Rows, SequenceState, Tensor, Window

Read = Callable[[Key, bool], tuple[Header, dict[str, Array]]]
"""A record by key and whether it is a point."""

Into = Callable[[str, tuple[int, ...], npt.DTypeLike], Array]
"""A buffer for a tensor: name, least shape, element type; its token axis may be longer."""


class ForeignRecord(RecordError):
    """A record is whole, but is not the one that the prompt's tokens ask for."""

    def __init__(self, key: Key, why: str) -> None:
        super().__init__(why)
        self.key = key


@dataclass(slots=True)
class Assembly:
    """A state being put together.

    Attributes:
        layout: its layout.
        chain: over all tokens up to its end, from the root of model, layout and tenant: what every record's key
            and parent are held against. The index only said where to look.
        into: makes the buffers, or None.
    """

    layout: Layout
    chain: Chain
    into: Into | None = None
    _arrays: dict[str, Array] = field(default_factory=dict)
    _meta: dict[str, MetaValue] = field(default_factory=dict)

    def run(self, plan: Plan, read: Read) -> SequenceState:
        """The state at `plan.n`.

        Raises:
            RecordError, OSError: as `read` does; `ForeignRecord` for a record of other tokens.
        """
        for spec in self.layout.rows:
            self._arrays[spec.name] = self._buffer(spec, plan.n)
        for i, key in enumerate(plan.blocks):
            header, arrays = read(key, False)  # noqa: FBT003
            self._take_rows(header, arrays, i * self.chain.block_tokens, self.chain.block_tokens)
        if plan.tail is not None:
            self._take_tail(plan, plan.tail, read)
        elif plan.n != len(plan.blocks) * self.chain.block_tokens:
            raise AssertionError("a plan without a tail ends at a block's edge")
        return SequenceState(plan.n, self._tensors(), self._meta, self.layout.valid_from)

    def _buffer(self, spec: TensorSpec, n_rows: int) -> Array:
        shape, dtype = spec.shape_with(n_rows), np.dtype(spec.storage)
        return np.empty(shape, dtype) if self.into is None else self.into(spec.name, shape, dtype)

    def _take_tail(self, plan: Plan, tail: Key, read: Read) -> None:
        first = len(plan.blocks) * self.chain.block_tokens
        header, arrays = read(tail, plan.tail_is_point)
        self._take_rows(header, arrays, first, plan.n - first)
        if not plan.exact:
            return
        if header.n != plan.n or header.key != self.chain.point(plan.n) or header.read_layout() != self.layout:
            raise ForeignRecord(tail, "is no point at the length that is asked for")
        self._meta = dict(header.meta)
        for spec in self.layout.tensors:
            if spec.kind is Kind.OPAQUE:
                self._arrays[spec.name] = np.array(arrays[spec.name], copy=True)
        if self.layout.windows:
            self._take_windows(plan, header, arrays, read)

    def _take_rows(self, header: Header, arrays: dict[str, Array], first: int, n_rows: int) -> None:
        """Copy a record's first `n_rows` rows to where tokens `[first, first + n_rows)` go."""
        own = header.token_ids
        if header.layout != self.layout.digest or header.first != first or len(own) < n_rows:
            raise ForeignRecord(Key(header.key), "lies elsewhere in a sequence than is asked for")
        if header.parent != self.chain.parent(first // self.chain.block_tokens):
            raise ForeignRecord(Key(header.key), "hangs from other tokens than are asked for")
        if not np.array_equal(own[:n_rows], self.chain.tokens[first : first + n_rows]):
            raise ForeignRecord(Key(header.key), "holds other tokens than are asked for")
        for spec in self.layout.rows:
            source = arrays.get(spec.name)
            if source is None or source.dtype != spec.storage or source.shape != spec.shape_with(len(own)):
                raise ForeignRecord(Key(header.key), f"has no tensor {spec.name!r} of the layout's shape")
            lead = (slice(None),) * spec.axis
            rows = source[(*lead, slice(0, n_rows))]
            self._arrays[spec.name][(*lead, slice(first, first + n_rows))] = rows

    def _take_windows(self, plan: Plan, header: Header, arrays: dict[str, Array], read: Read) -> None:
        """Fill the windows from the point's own run and from the runs of earlier points, latest first."""
        for spec in self.layout.windows:
            target = np.empty(spec.shape_with(spec.window_rows(plan.n)), spec.storage)
            kept = (*(slice(None),) * spec.axis, slice(0, spec.window_span(plan.n)[0]))
            target[kept] = arrays[spec.name][kept]
            self._arrays[spec.name] = target
        open_until = {spec.name: plan.n for spec in self.layout.windows}
        for key in plan.points:
            if key != plan.tail:
                if header.after != key:
                    raise ForeignRecord(key, "is not the point behind which the window rows begin")
                header, arrays = read(key, True)  # noqa: FBT003
                self._check_earlier(header)
            for spec in self.layout.windows:
                open_until[spec.name] = self._take_run(spec, plan.n, open_until[spec.name], header, arrays)
        for spec in self.layout.windows:
            if open_until[spec.name] > spec.window_span(plan.n)[1]:
                raise ForeignRecord(plan.points[-1], f"leaves rows of the window {spec.name!r} open")

    def _check_earlier(self, header: Header) -> None:
        if header.n > len(self.chain.tokens) or header.key != self.chain.point(header.n):
            raise ForeignRecord(Key(header.key), "is no point of the tokens that are asked for")
        own = self.chain.tokens[header.first : header.n]
        if header.layout != self.layout.digest or not np.array_equal(header.token_ids, own):
            raise ForeignRecord(Key(header.key), "holds other tokens than are asked for")

    def _take_run(self, spec: TensorSpec, n: int, until: int, header: Header, arrays: dict[str, Array]) -> int:
        """Copy what a point holds of the window's rows before token `until`; where the rows begin now."""
        kept, start = spec.window_span(n)
        source, target = arrays[spec.name], self._arrays[spec.name]
        lead = (slice(None),) * spec.axis
        own_kept = min(spec.keep, header.n)
        run_start = header.n - (source.shape[spec.axis] - own_kept)
        begin, end = max(start, int(run_start)), min(until, header.n)
        if end < until or begin >= end:
            return until
        rows = source[(*lead, slice(own_kept + begin - run_start, own_kept + end - run_start))]
        target[(*lead, slice(kept + begin - start, kept + end - start))] = rows
        return begin

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for spec in self.layout.tensors:
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
