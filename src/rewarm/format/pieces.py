"""Arrays as pieces of bytes, without copies: one for each contiguous run, in the order in which a record holds them."""

from __future__ import annotations

import numpy as np

from rewarm.state.sequence import Array

SHORT_RUN = 2048
"""Runs of fewer bytes are not worth a piece of their own: such an array is better copied as a whole."""


def runs(array: Array) -> list[memoryview] | None:
    """The contiguous runs of an array as bytes, in C order; None where they are too short to be worth it."""
    if not array.size:
        return []
    n_axes, run = array.ndim, array.itemsize
    while n_axes and (array.strides[n_axes - 1] == run or array.shape[n_axes - 1] == 1):
        n_axes -= 1
        run *= array.shape[n_axes]
    if n_axes and run < SHORT_RUN:
        return None
    return [as_bytes(array[(*index, ...)]) for index in np.ndindex(array.shape[:n_axes])]


def as_bytes(array: Array) -> memoryview:
    """The bytes of an array that is C-contiguous."""
    return array.reshape(-1).view(np.uint8).data


def pieces(array: Array) -> list[memoryview]:
    """The bytes of any array, in C order; copied where its runs are short."""
    found = runs(array)
    return [as_bytes(np.ascontiguousarray(array))] if found is None else found
