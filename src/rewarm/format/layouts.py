"""Layouts as bytes, for the index: msgpack, the fields of `TensorSpec` by name."""

from __future__ import annotations

import msgspec

from rewarm.state.layout import Kind, Layout, TensorSpec


class _Spec(msgspec.Struct, frozen=True):
    name: str
    kind: Kind
    dtype: str
    storage: str
    axis: int
    shape: tuple[int, ...]
    size: int
    keep: int


class _Layout(msgspec.Struct, frozen=True):
    tensors: tuple[_Spec, ...]
    valid_from: int


_decoder = msgspec.msgpack.Decoder(_Layout)


def encode_layout(layout: Layout) -> bytes:
    """`layout` as bytes."""
    tensors = tuple(_Spec(s.name, s.kind, s.dtype, s.storage, s.axis, s.shape, s.size, s.keep) for s in layout.tensors)
    return msgspec.msgpack.encode(_Layout(tensors, layout.valid_from))


def decode_layout(data: bytes) -> Layout:
    """The layout in `data`.

    Raises:
        ValueError: there is none.
    """
    try:
        read = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"no layout: {error}") from None
    specs = (TensorSpec(s.name, s.kind, s.dtype, s.storage, s.axis, s.shape, s.size, s.keep) for s in read.tensors)
    return Layout(tuple(specs), read.valid_from)
