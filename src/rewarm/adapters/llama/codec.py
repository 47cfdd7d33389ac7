"""Between llama-server's slot files and `SequenceState`, bit for bit.

Full-attention sections become rows, sliding windows windows, recurrent sections opaque tensors. Whatever
is unknown is refused with `UnknownLayout`; its file can be kept whole (`opaque_state`), usable at its own
length only. Knows no server, no files and no store.

| tensor         | kind   | array                                                        |
|----------------|--------|--------------------------------------------------------------|
| `attn.k.007`   | rows   | (n, elements); bytes for quantised types                     |
| `attn.v.007`   | rows   | as keys; (elements, n), token axis 1, where llama.cpp keeps values transposed |
| `attn.cell`    | rows   | (n, 4): position, x, y, token; only for positions of several axes |
| `swa.k.003` .. | window | as `attn`, the last `n_swa` tokens                           |
| `rec.r.001`    | opaque | (elements,) of the recurrent layers in order, and `rec.s.001` |

A state that was cut keeps its layout but not its `meta`, so whatever it takes to write a file again stands
in the tensors' `dtype`: `f16:v4w.rot0` is ggml's type, the file's version, `w` for a token list with a
header, and the size of llama.cpp's rotation; `f32:v4w.of24` a recurrent tensor of a model of 24 layers.
`slot_builder` is the way back.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import blake3
import numpy as np
import numpy.typing as npt

from rewarm.adapters.llama import slot_file
from rewarm.adapters.llama.slot_builder import MEDIA, from_state
from rewarm.adapters.llama.slot_parts import (
    TYPES,
    Ints,
    KvSection,
    Memory,
    Piece,
    Plane,
    RecurrentSection,
    SlotFile,
    Stream,
    UnknownLayout,
)
from rewarm.state.sequence import Array, MetaValue, Opaque, Rows, SequenceState, Tensor, Window

__all__ = ["VERSION", "CodecState", "UnknownLayout", "from_state", "opaque_state", "to_state", "whole_file"]

VERSION = 1
"""Part of every identity: raised when the same slot file gives other tensors."""

Tokens = npt.NDArray[np.int64]

_STORAGE = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}
"""What elements travel as; those of all other types as bytes."""

_WHOLE_FILE = "file"
_SIGN = np.int64(-(2**63))


@dataclass(frozen=True, slots=True, eq=False)
class CodecState:
    """A slot file as states.

    Attributes:
        tokens: (n,) int64, for `Namespace.save` and `find`: a media chunk's tokens are negative numbers made
            from the chunk's content, so that another image is another prefix. `tokens[:k]` goes with a point at k.
        state: after all tokens.
        points: restore points from the server's checkpoints, shortest first, each complete at its own
            `n_tokens`, all below the state's; none for models whose states can be cut anywhere.
        gates: for each of `points`, how many tokens a prompt must share with this one, its own last not counted,
            before the server goes on at that point.
        n_streams: streams in the file: what `from_state` needs for the same server.
    """

    tokens: Tokens
    state: SequenceState
    points: tuple[SequenceState, ...] = ()
    n_streams: int = 1
    gates: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Form:
    """What every tensor of a file has in common."""

    version: int
    wrapped: bool

    def dtype(self, ggml_type: str, rest: str = "") -> str:
        return f"{ggml_type}:v{self.version}{'w' if self.wrapped else ''}{rest}"


def to_state(slot: SlotFile, n_swa: int = 0) -> CodecState:
    """The states that a slot file holds, as views of its bytes where that is possible.

    Args:
        slot: from `slot_file.parse`.
        n_swa: the model's sliding window in tokens (GGUF's `<arch>.attention.sliding_window`), needed for
            files with a window section: a file that is not longer than the window does not tell it.

    Raises:
        UnknownLayout: the cells are not exactly the token list's positions, the window section is not what
            a standard window of `n_swa` holds, or the parts do not fit each other.
    """
    n = len(slot.tokens)
    if n == 0:
        raise UnknownLayout("holds no tokens")
    tokens, runs = _tokens(slot)
    form = _Form(slot.version, slot.wrapped)
    memory, rows = slot.memory, dict[str, Rows]()
    positions = np.arange(n, dtype=np.int32)
    if memory.base is not None:
        stream = _only_stream(memory.base)
        order = _order(stream)
        positions = stream.positions[order]
        _check_positions(positions, n, [] if stream.extended is None else runs)
        rows.update(_attention("attn", stream, order, form))
    if memory.swa is not None:
        n_swa = n_swa or _told_window(memory.swa, n)
    media = {f"{MEDIA}{m.index}": base64.b64encode(m.chunk).decode() for m in slot.media}
    reader = _Reader(form, n_swa, positions, rows, media)
    state = reader.at(n, memory)
    points, gates = {}, {}
    for point in slot.checkpoints or ():
        k = point.n_tokens
        if len(point.draft) or len(point.spec):
            raise UnknownLayout("has checkpoints of a draft model")
        if not runs and point.pos_max not in (k - 1, k):
            raise UnknownLayout(f"has a checkpoint at {k} tokens whose last position is {point.pos_max}")
        if 0 < k < n and not any(start < k < end for start, end in runs):
            points[k] = reader.at(k, slot_file.parse_partial(_view(point.target), slot.version))
            if points[k].layout() != state.layout():
                raise UnknownLayout("has a checkpoint of another layout than its state")
            gates[k] = max(k, point.pos_min + n_swa + 1) if memory.swa is not None and point.pos_min else k
    base = memory.base or memory.swa
    lengths, n_streams = sorted(points), len(base.streams) if base else 1
    return CodecState(tokens, state, tuple(points[k] for k in lengths), n_streams, tuple(gates[k] for k in lengths))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Makes the states at several lengths: rows are shared, what cannot be cut is each length's own."""

    form: _Form
    n_swa: int
    positions: Ints
    rows: Mapping[str, Rows]
    media: Mapping[str, MetaValue]

    def at(self, k: int, memory: Memory) -> SequenceState:
        tensors: dict[str, Tensor] = {name: _cut(tensor, k) for name, tensor in self.rows.items()}
        if memory.swa is not None:
            tensors.update(self._window(k, memory.swa))
        if memory.recurrent is not None:
            tensors.update(self._recurrent(k, memory.recurrent))
        meta = {name: chunk for name, chunk in self.media.items() if int(name.removeprefix(MEDIA)) < k}
        return SequenceState(k, tensors, meta)

    def _window(self, k: int, section: KvSection) -> dict[str, Tensor]:
        stream = _only_stream(section)
        order = _order(stream)
        held = min(k, self.n_swa)
        if not np.array_equal(stream.positions[order], np.arange(k - held, k)):
            raise UnknownLayout(f"has a window section that is not the last {held} of {k} tokens")
        if int(self.positions[k - 1]) != k - 1:
            raise UnknownLayout("has a window section and media whose positions are shared")
        parts = _attention("swa", stream, order, self.form)
        return {name: Window(t.array, t.axis, self.n_swa, dtype=t.dtype) for name, t in parts.items()}

    def _recurrent(self, k: int, section: RecurrentSection) -> dict[str, Tensor]:
        if section.positions.tolist() != [int(self.positions[k - 1])]:
            raise UnknownLayout(f"has recurrent states after {section.positions.tolist()} for {k} tokens")
        rest = f".of{section.n_layers}"
        tensors: dict[str, Tensor] = {}
        for part, planes in (("r", section.r), ("s", section.s)):
            for i, plane in enumerate(planes):
                dtype = self.form.dtype(TYPES[plane.ggml_type].name, rest)
                tensors[f"rec.{part}.{i:03d}"] = Opaque(_elements(plane), dtype)
        return tensors


def _tokens(slot: SlotFile) -> tuple[Tokens, list[tuple[int, int]]]:
    """The tokens with negative numbers for media, and the media's runs as (start, end)."""
    tokens = slot.tokens.astype(np.int64)
    runs = []
    limits = [*(media.index for media in slot.media[1:]), len(tokens)]
    for media, limit in zip(slot.media, limits, strict=False):
        text = np.flatnonzero(slot.tokens[media.index : limit] >= 0)
        end = media.index + int(text[0]) if len(text) else limit
        runs.append((media.index, end))
        n_bytes = 8 * (end - media.index)
        digest = np.frombuffer(blake3.blake3(bytes(media.chunk)).digest(length=n_bytes), "<i8")
        tokens[media.index : end] = digest | _SIGN
    return tokens, runs


def _only_stream(section: KvSection) -> Stream:
    """The one stream that holds the sequence."""
    streams = [stream for stream in section.streams if stream is not None]
    if len(streams) != 1 or len(set(streams[0].seq_ids.tolist())) != 1:
        raise UnknownLayout("holds the cells of more than one sequence, or of none")
    return streams[0]


def _order(stream: Stream) -> npt.NDArray[np.intp] | slice:
    """What brings the cells into the order of the tokens: by position, and inside an image row by row."""
    by = [stream.positions] if stream.extended is None else [*stream.extended.T[:2], stream.positions]
    order = np.lexsort(by)
    return slice(None) if np.array_equal(order, np.arange(len(order))) else order


def _check_positions(positions: Ints, n: int, runs: Iterable[tuple[int, int]]) -> None:
    """Exactly 0..n-1; an image's tokens may share one position, and the text goes on at a later one."""
    expected, start, at = np.empty(n, np.int64), 0, 0
    if len(positions) != n:
        raise UnknownLayout(f"has {len(positions)} cells for {n} tokens")
    for begin, end in [*runs, (n, n)]:
        expected[start:begin] = np.arange(at, at + begin - start)
        at += begin - start
        shared = end - begin > 1 and positions[begin] == positions[end - 1]
        expected[begin:end] = at if shared else np.arange(at, at + end - begin)
        at += end - begin
        if shared and end < n:
            if not at - (end - begin) < positions[end] <= at:
                raise UnknownLayout("has text behind an image at an impossible position")
            at = int(positions[end])
        start = end
    if not np.array_equal(positions, expected):
        raise UnknownLayout("has cells that are not at the positions of its tokens")


def _told_window(section: KvSection, n: int) -> int:
    held = len(_only_stream(section).positions)
    if held >= n:
        raise UnknownLayout("has a window section, and nothing says how long the window is")
    return held


def _attention(prefix: str, stream: Stream, order: npt.NDArray[np.intp] | slice, form: _Form) -> dict[str, Rows]:
    tensors = {}
    rotations = stream.rotations or (None, None)
    # Where there are no values, nothing else tells whether they would be transposed: the server checks it.
    bare = "" if stream.values else f".trans{stream.v_trans}"
    for part, planes, rotation in zip("kv", (stream.keys, stream.values), rotations, strict=True):
        rest = bare if rotation is None else f".rot{rotation}{bare}"
        for i, plane in enumerate(planes):
            elements = _elements(plane)
            axis = 1 if plane.n_columns else 0
            shape = (plane.n_columns, -1) if axis else (len(stream.positions), -1)
            array = elements.reshape(shape)[:, order] if axis else elements.reshape(shape)[order]
            tensors[f"{prefix}.{part}.{i:03d}"] = Rows(array, axis, form.dtype(TYPES[plane.ggml_type].name, rest))
    if stream.extended is not None:
        cells = np.concatenate([stream.positions[:, None], stream.extended], axis=1)
        tensors[f"{prefix}.cell"] = Rows(cells[order].astype("<i4"), 0, form.dtype("i32"))
    return tensors


def _elements(plane: Plane) -> Array:
    return np.frombuffer(plane.data, _STORAGE.get(TYPES[plane.ggml_type].name, "|u1"))


def _cut(tensor: Rows, n: int) -> Rows:
    lead = (slice(None),) * tensor.axis
    return Rows(tensor.array[(*lead, slice(0, n))], tensor.axis, tensor.dtype)


def _view(piece: Piece) -> memoryview:
    return memoryview(piece)


def opaque_state(data: memoryview, n_tokens: int, meta: Mapping[str, MetaValue] | None = None) -> SequenceState:
    """The fallback for an unknown layout: the whole file as one opaque tensor, usable after exactly `n_tokens`."""
    array = np.frombuffer(data, np.uint8)
    return SequenceState(n_tokens, {_WHOLE_FILE: Opaque(array, "slot file")}, dict(meta or {}))


def whole_file(state: SequenceState) -> memoryview | None:
    """The file that `opaque_state` kept; None for any other state."""
    tensor = state.tensors.get(_WHOLE_FILE)
    return None if tensor is None or len(state.tensors) != 1 else tensor.array.data.cast("B")
