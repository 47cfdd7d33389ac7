"""Layouts: which tensors the state of a sequence has, and which of the three kinds each one is.

A layout says nothing about how many tokens a state covers; it is what states of one shape share, and
its digest is part of every key. It does not know engines, records or the store.

| kind   | what it takes to restore the state after n tokens                              |
|--------|--------------------------------------------------------------------------------|
| rows   | the rows of tokens [0, n); any prefix down to `valid_from` is valid by itself    |
| window | the `keep` first rows and the last `size - keep` rows before n, every one        |
| opaque | the exact bytes captured at n                                                    |
"""

from __future__ import annotations

import enum
import functools
import math
import re
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

DOMAIN = b"rewarm/1 layout"
STORAGE = re.compile(r"\|[biu]1|<[iu][248]|<f(2|4|8)|<c(8|16)")
"""The element types that records hold, as numpy names them."""


class Kind(enum.StrEnum):
    """What a tensor needs in order to be restored; see the module's table."""

    ROWS = "rows"
    WINDOW = "window"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a layout.

    Attributes:
        name: unique in the layout.
        kind: rows, window or opaque.
        dtype: the engine's name for the element type, `"float32"` or `"bfloat16"`.
        storage: numpy's name for what the elements travel as, little-endian: `"<f4"`, `"<u2"`.
        axis: the token axis; 0 for opaque tensors, which have none.
        shape: the shape without the token axis; empty for opaque tensors, whose shape is free.
        size: rows that a window holds at most, `keep` included; 0 for other kinds.
        keep: first rows of the sequence that a window never drops.
    """

    name: str
    kind: Kind
    dtype: str
    storage: str
    axis: int = 0
    shape: tuple[int, ...] = ()
    size: int = 0
    keep: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return np.dtype(self.storage).itemsize

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token's row, over all axes."""
        return math.prod(self.shape) * self.itemsize

    def shape_with(self, n_rows: int) -> tuple[int, ...]:
        """The whole shape when the token axis is `n_rows` long."""
        return (*self.shape[: self.axis], n_rows, *self.shape[self.axis :])

    def window_rows(self, n_tokens: int) -> int:
        """Rows that a window holds after `n_tokens` tokens."""
        return min(n_tokens, self.size)

    def window_span(self, n_tokens: int) -> tuple[int, int]:
        """`(kept, start)`: a window after `n_tokens` holds the rows of tokens [0, kept) and [start, n_tokens)."""
        kept = min(self.keep, n_tokens)
        return kept, max(kept, n_tokens - (self.size - self.keep))

    def _canonical(self) -> bytes:
        fields = [self.name, self.kind.value, self.dtype, self.storage]
        if self.kind is not Kind.OPAQUE:
            fields += [str(self.axis), "x".join(map(str, self.shape)), str(self.size), str(self.keep)]
        return b"".join(len(f.encode()).to_bytes(8, "little") + f.encode() for f in fields)


@dataclass(frozen=True)
class Layout:
    """The tensors of a state, in order of name, and the first length at which its rows are valid."""

    tensors: tuple[TensorSpec, ...]
    valid_from: int = 0

    def __post_init__(self) -> None:
        """Sort the tensors by name, so that equal layouts are equal.

        Raises:
            ValueError: two tensors of one name, or a negative `valid_from`.
        """
        ordered = tuple(sorted(self.tensors, key=lambda spec: spec.name))
        if len({spec.name for spec in ordered}) != len(ordered):
            raise ValueError("two tensors of a layout have one name")
        if self.valid_from < 0:
            raise ValueError("valid_from is negative")
        object.__setattr__(self, "tensors", ordered)

    @functools.cached_property
    def digest(self) -> bytes:
        """32 bytes that name this layout; part of every key."""
        parts = [spec._canonical() for spec in self.tensors]
        body = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return blake3(DOMAIN + self.valid_from.to_bytes(8, "little") + body).digest()

    @functools.cached_property
    def rows(self) -> tuple[TensorSpec, ...]:
        """The tensors of kind rows: what block records hold."""
        return tuple(spec for spec in self.tensors if spec.kind is Kind.ROWS)

    @functools.cached_property
    def windows(self) -> tuple[TensorSpec, ...]:
        """The tensors of kind window."""
        return tuple(spec for spec in self.tensors if spec.kind is Kind.WINDOW)

    @functools.cached_property
    def rows_only(self) -> bool:
        """Whether a state can be cut at any token from `valid_from` on."""
        return bool(self.tensors) and len(self.rows) == len(self.tensors)

    @functools.cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """The tensors by their names."""
        return {spec.name: spec for spec in self.tensors}

    def state_nbytes(self, n_tokens: int) -> int:
        """Bytes of rows and windows after `n_tokens` tokens; opaque tensors not counted."""
        total = sum(spec.row_nbytes * n_tokens for spec in self.rows)
        return total + sum(spec.row_nbytes * spec.window_rows(n_tokens) for spec in self.windows)
