"""The state of one sequence after n tokens: what engines hand in at a save and take back at a restore.

Arrays here are numpy's; an adapter converts its engine's caches to and from them, bit for bit. Element
types that numpy lacks travel as unsigned integers of their width, with their own name in `dtype`
("bfloat16" as uint16). Nothing here knows tokens, keys, records or the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from rewarm.state.layout import STORAGE, Kind, Layout, TensorSpec
from rewarm.state.reason import Reason

Array = npt.NDArray[Any]
MetaValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A tensor with one row per token, such as the keys of a full-attention layer.

    Attributes:
        array: any shape whose token axis is as long as the state.
        axis: the token axis, 0 or more.
        dtype: the engine's name of the element type, where numpy has none.
    """

    array: Array
    axis: int
    dtype: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """A tensor that holds the first `keep` rows and the last rows: sliding-window attention.

    Attributes:
        array: rows in token order, `min(n_tokens, size)` along the token axis.
        axis: the token axis, 0 or more.
        size: rows that the window holds at most, `keep` included.
        keep: first rows of the sequence that are never dropped.
        dtype: the engine's name of the element type, where numpy has none.
    """

    array: Array
    axis: int
    size: int
    keep: int = 0
    dtype: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """A tensor that is valid as a whole at exactly the state's length: recurrent states.

    Attributes:
        array: any shape.
        dtype: the engine's name of the element type, where numpy has none.
    """

    array: Array
    dtype: str | None = None


Tensor = Rows | Window | Opaque


@dataclass(frozen=True, slots=True, eq=False)
class SequenceState:
    """The state of one sequence after `n_tokens` tokens.

    Attributes:
        n_tokens: how many tokens the state covers.
        tensors: by name; all of them together are the state.
        meta: a few plain values that belong to the state at exactly `n_tokens`.
        valid_from: the shortest length to which the rows may be cut; 0 but for KV that an engine
            quantises from a given length on.
        reason: set by a restore: why the state is shorter than the match that was asked for.
    """

    n_tokens: int
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, MetaValue] = field(default_factory=dict)
    valid_from: int = 0
    reason: Reason = Reason.HIT

    def layout(self) -> Layout:
        """The layout of this state.

        Raises:
            ValueError: when an array does not fit its description or the state's length.
        """
        if self.n_tokens < 0:
            raise ValueError("n_tokens is negative")
        specs = [_spec(name, tensor, self.n_tokens) for name, tensor in self.tensors.items()]
        return Layout(tuple(specs), self.valid_from)


def _spec(name: str, tensor: Tensor, n_tokens: int) -> TensorSpec:
    """The description of one tensor, checked against the state's length."""
    array = tensor.array
    storage = array.dtype.newbyteorder("<").str
    if STORAGE.fullmatch(storage) is None:
        raise ValueError(f"tensor {name!r}: elements of type {array.dtype} cannot be stored")
    dtype = tensor.dtype or array.dtype.name
    if isinstance(tensor, Opaque):
        return TensorSpec(name, Kind.OPAQUE, dtype, storage)
    axis = tensor.axis
    if not 0 <= axis < array.ndim:
        raise ValueError(f"tensor {name!r}: axis {axis} is not one of an array of shape {array.shape}")
    shape = array.shape[:axis] + array.shape[axis + 1 :]
    if isinstance(tensor, Rows):
        if array.shape[axis] != n_tokens:
            raise ValueError(f"tensor {name!r}: {array.shape[axis]} rows for {n_tokens} tokens")
        return TensorSpec(name, Kind.ROWS, dtype, storage, axis, shape)
    if tensor.size < 1 or not 0 <= tensor.keep < tensor.size:
        raise ValueError(f"tensor {name!r}: a window of size {tensor.size} with keep {tensor.keep}")
    spec = TensorSpec(name, Kind.WINDOW, dtype, storage, axis, shape, tensor.size, tensor.keep)
    if array.shape[axis] != spec.window_rows(n_tokens):
        raise ValueError(
            f"tensor {name!r}: {array.shape[axis]} rows for a window of {tensor.size} after {n_tokens} tokens"
        )
    return spec
