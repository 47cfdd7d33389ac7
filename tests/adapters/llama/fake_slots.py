"""Slot files as llama-server writes them, of a model that is a hash: for tests without an engine.

Each row is made of a digest of all tokens up to its own, as in a real cache, and begins with that digest, so
that a model can go on from any file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import blake3
import numpy as np

from rewarm.adapters.llama import codec, slot_file
from rewarm.adapters.llama.slot_parts import (
    NUMBERS,
    Checkpoint,
    KvSection,
    Memory,
    Plane,
    RecurrentSection,
    SlotFile,
    Stream,
)
from rewarm.state.sequence import SequenceState
from rewarm.testing.conformance import CodecEngine

DIGEST = 32


@dataclass(frozen=True)
class Shape:
    """What a slot file looks like.

    Attributes:
        attn: layers of full attention.
        swa: layers with a sliding window.
        rec: recurrent layers.
        n_swa: of the window.
        types: of keys and of values.
        version: of the file.
        trans: whether values are transposed.
        axes: whether cells have positions of several axes.
        values: whether there are values; not for MLA.
        streams: streams of the server, of which the last one is used.
        shuffle: seed for the physical order of cells; 0 leaves them in order.
        points: lengths of checkpoints.
        wrapped: whether the token list has a header.
    """

    attn: int = 2
    swa: int = 0
    rec: int = 0
    n_swa: int = 6
    types: tuple[str, str] = ("f16", "f16")
    version: int = 4
    trans: bool = False
    axes: bool = False
    values: bool = True
    streams: int = 1
    shuffle: int = 0
    points: tuple[int, ...] = ()
    wrapped: bool = True


SHAPES = {
    "dense": Shape(),
    "dense of version 3": Shape(version=3, wrapped=False),
    "transposed": Shape(trans=True, types=("f16", "f32")),
    "quantised": Shape(types=("q8_0", "q4_0")),
    "bf16": Shape(types=("bf16", "bf16")),
    "shuffled": Shape(shuffle=1, streams=2),
    "shuffled, transposed": Shape(shuffle=1, trans=True),
    "several axes": Shape(axes=True, types=("q8_0", "f16")),
    "no values": Shape(values=False),
    "no values, transposed": Shape(values=False, trans=True),
    "window": Shape(swa=3, points=(3, 9)),
    "window, transposed": Shape(swa=2, trans=True, shuffle=2, streams=3),
    "window, several axes": Shape(swa=2, axes=True),
    "hybrid": Shape(rec=2, points=(3, 9)),
    "hybrid with a window": Shape(swa=2, rec=1, points=(3, 9)),
    "recurrent": Shape(attn=0, rec=2, points=(3, 9)),
}

_ROW = {"f16": 64, "f32": 64, "bf16": 64, "q8_0": 34, "q4_0": 36}


def digests(tokens: Sequence[int], start: bytes = b"") -> list[bytes]:
    """Of each prefix that ends with one of `tokens`."""
    found = []
    for token in tokens:
        start = _bytes_of(start + int(token).to_bytes(8, "little", signed=True), DIGEST)
        found.append(start)
    return found


def slot(shape: Shape, tokens: Sequence[int], own: Sequence[bytes] | None = None, first: int = 0) -> SlotFile:
    """The slot after `tokens`; `own` are the digests from position `first` on, where they are known."""
    own = digests(tokens) if own is None else own
    rows = dict(enumerate(own, first))
    n = len(tokens)
    points = []
    for k in shape.points:
        if k < n:
            target = slot_file.write_partial(_memory(replace(shape, attn=0), k, rows, tokens), shape.streams - 1)
            points.append(Checkpoint(k, k - 1 if shape.rec else 0, k - 1, target))
    ids = np.array(tokens, np.int32)
    return SlotFile(
        shape.version, ids, shape.wrapped, (), _memory(shape, n, rows, tokens), tuple(points) if points else None
    )


def data(shape: Shape, tokens: Sequence[int]) -> memoryview:
    return memoryview(b"".join(slot_file.write(slot(shape, tokens))))


def _memory(shape: Shape, n: int, rows: dict[int, bytes], tokens: Sequence[int]) -> Memory:
    base = _section(shape, "a", shape.attn, range(n), rows, tokens) if shape.attn else None
    window = range(max(0, n - shape.n_swa), n)
    swa = _section(shape, "w", shape.swa, window, rows, tokens) if shape.swa else None
    recurrent = None
    if shape.rec:
        r = tuple(Plane(NUMBERS["f32"], 64, 0, _row(rows[n - 1], f"r{i}", 64)) for i in range(shape.rec))
        s = tuple(Plane(NUMBERS["f32"], 0, 0, b"") for _ in range(shape.rec))
        recurrent = RecurrentSection(np.array([n - 1], np.int32), 8, r, s)
    return Memory(base, swa, recurrent)


def _section(
    shape: Shape, tag: str, n_layers: int, span: range, rows: dict[int, bytes], tokens: Sequence[int]
) -> KvSection:
    at = np.array(span, np.int32)
    if shape.shuffle:
        at = np.random.default_rng(shape.shuffle).permutation(at)
    planes: list[tuple[Plane, ...]] = []
    for part, name in zip("kv", shape.types, strict=True):
        width = _ROW[name]
        of_layer = []
        for i in range(n_layers if part == "k" or shape.values else 0):
            block = np.frombuffer(b"".join(_row(rows[int(p)], f"{tag}{part}{i}", width) for p in at), np.uint8)
            size = {"f32": 4}.get(name, 2)
            if part == "v" and shape.trans:
                columns = np.ascontiguousarray(block.reshape(len(at), -1, size).transpose(1, 0, 2))
                of_layer.append(Plane(NUMBERS[name], size, width // size, columns.tobytes()))
            else:
                of_layer.append(Plane(NUMBERS[name], width, 0, block.tobytes()))
        planes.append(tuple(of_layer))
    extended = np.stack([at, at, np.array(tokens, np.int32)[at]], axis=1) if shape.axes else None
    seq = np.full(len(at), shape.streams - 1, np.int32)
    rotations = (64, 0) if shape.version >= 4 else None
    stream = Stream(at, extended, seq, int(shape.trans), rotations, planes[0], planes[1])
    return KvSection((None,) * (shape.streams - 1) + (stream,))


def _row(digest: bytes, name: str, width: int) -> bytes:
    return digest + _bytes_of(digest + name.encode(), width - DIGEST)


def _bytes_of(seed: bytes, n: int) -> bytes:
    """`n` bytes below 64: as floats of any width they are finite, which a save demands."""
    return bytes(byte & 63 for byte in blake3.blake3(seed).digest(n))


class FakeLlama(CodecEngine):
    """The hash as an engine: a live cache is the bytes of a slot file."""

    refusal = slot_file.UnknownLayout

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def run(self, tokens: Sequence[int], live: Any = None) -> memoryview:
        if live is None:
            return data(self.shape, tokens)
        before = slot_file.parse(live)
        n = len(before.tokens)
        state = codec.to_state(before, self.shape.n_swa).state
        known = self._known(state)
        all_tokens = [*before.tokens.tolist(), *tokens]
        own = [*known, *digests(tokens, known[-1])]
        # What lies before the rows that a cache of windows or recurrent states holds is not asked for.
        shape = replace(self.shape, points=tuple(k for k in self.shape.points if k - self.shape.n_swa >= n))
        return memoryview(b"".join(slot_file.write(slot(shape, all_tokens, own, n - len(known)))))

    def _known(self, state: SequenceState) -> list[bytes]:
        for name in ("attn.k.000", "swa.k.000", "rec.r.000"):
            if name in state.tensors:
                array = np.ascontiguousarray(state.tensors[name].array)
                rows = array.reshape(1, -1) if name.startswith("rec") else array
                return [row.tobytes()[:DIGEST] for row in rows]
        raise AssertionError("a state without rows")

    def encode(self, live: Any) -> SequenceState:
        return codec.to_state(slot_file.parse(live), self.shape.n_swa).state

    def decode(self, state: SequenceState) -> memoryview:
        tokens = np.arange(state.n_tokens)
        if "attn.cell" in state.tensors:
            tokens = state.tensors["attn.cell"].array[:, 3]
        return memoryview(b"".join(codec.from_state(state, tokens)))

    def unknown(self) -> memoryview:
        return memoryview(bytes(self.run([1, 2, 3]))[:-1])
