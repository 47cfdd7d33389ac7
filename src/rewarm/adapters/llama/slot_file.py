"""Slot files of llama-server: bytes to dataclasses and back, byte for byte.

Knows the layout of the file that `POST /slots/0?action=save` writes, and nothing else: no model, no
store, no I/O. The file names neither the sections nor all that is in them, so `parse` tries every
combination that is known and takes the one that ends exactly where the file ends.

    file       u32 'ggsq', u32 version (2 to 4), u32 n, i32 tokens[n], sections, [checkpoints]
    tokens     plain ids, or: -1, 1, n, ids[n], n_media, keys[n_media], for each {u32 length, bytes}, zeros
    sections   attention; attention window; attention recurrent; attention window recurrent; recurrent
    attention  u32 streams, for each: u32 cells, and if there are any:
               cells * {i32 position, u32 1, [i32 x, i32 y, i32 token], i32 sequence}
               u32 v_trans, u32 layers, [version 4: u32 n_rot_k, u32 n_rot_v]
               layers * {i32 type, u64 row, rows}: keys, then values likewise (MLA has none);
               transposed values: {i32 type, u32 element, u32 columns, columns * cells elements}
    recurrent  u32 cells, cells * {i32 position, u32 0}, u32 0, u32 layers,
               for each recurrent layer {i32 type, u64 row, rows}: R, then S likewise
    checkpoints u32 'SCKP', u32 1, u32 count, count * {i64 n, i32 first position, i32 last position,
               3 * {u64 length, bytes}: target, draft, speculation}
    target     u32 'ggsq' of blobs, i32 sequence, sections that cannot be cut: window, recurrent
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from rewarm.adapters.llama.slot_parts import (
    TYPES,
    Checkpoint,
    Ints,
    KvSection,
    Media,
    Memory,
    Piece,
    Plane,
    RecurrentSection,
    SlotFile,
    Stream,
    UnknownLayout,
)

__all__ = ["SlotFile", "UnknownLayout", "parse", "parse_partial", "parse_tokens", "write", "write_partial"]

FILE_MAGIC = 0x67677371
BLOB_MAGIC = 0xAF143CD8
CHECKPOINTS_MAGIC = 0x504B4353
VERSIONS = (2, 3, 4)
TOKENS_VERSION = 1
CHECKPOINTS_VERSION = 1
NO_TOKEN = -1
"""Stands for each token of a media chunk, and begins a list that has a header."""

MAX_STREAMS = 256
MAX_LAYERS = 1024
MAX_CHECKPOINTS = 1024
"""As the server's own limits: what is above is no slot file, whatever its length."""


@dataclass(frozen=True, slots=True)
class _Form:
    """What a file does not say about itself."""

    sections: tuple[str, ...]
    extended: bool
    values: bool


_WHOLE = (("base",), ("base", "swa"), ("base", "recurrent"), ("base", "swa", "recurrent"), ("recurrent",))
_PARTIAL = (("swa",), ("recurrent",), ("swa", "recurrent"))


class _Reader:
    """Reads little-endian numbers and runs of bytes; never past the end, never a copy of a run."""

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self.data = data
        self.at = at

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def numbers(self, form: struct.Struct) -> tuple[int, ...]:
        if self.left < form.size:
            raise UnknownLayout(f"ends inside its structure, at byte {self.at}")
        found = form.unpack_from(self.data, self.at)
        self.at += form.size
        return found

    def u32(self) -> int:
        return self.numbers(_U32)[0]

    def run(self, nbytes: int) -> memoryview:
        if nbytes > self.left:
            raise UnknownLayout(f"says {nbytes} bytes at byte {self.at}, where {self.left} are left")
        found = self.data[self.at : self.at + nbytes]
        self.at += nbytes
        return found

    def ints(self, count: int) -> Ints:
        return np.frombuffer(self.run(count * 4), "<i4")


_U32 = struct.Struct("<I")
_HEADER = struct.Struct("<III")
_ROWS = struct.Struct("<iQ")
_COLUMNS = struct.Struct("<iII")
_BLOB = struct.Struct("<Ii")
_POINT = struct.Struct("<qii")
_LENGTH = struct.Struct("<Q")
_PAIR = struct.Struct("<II")


def parse(data: memoryview) -> SlotFile:
    """Take a slot file apart; the parts are views of `data`. Checks the structure, not the numbers in rows.

    Raises:
        UnknownLayout: magic, version or a section is not known, or the file does not end where its layout says.
    """
    version, tokens, wrapped, media, start = _read_head(data)
    memory, end = _only(data, start, version, _WHOLE)
    checkpoints = _read_checkpoints(_Reader(data, end)) if end < len(data) else None
    return SlotFile(version, tokens, wrapped, media, memory, checkpoints)


def parse_tokens(data: memoryview) -> Ints:
    """The token list alone, -1 for each token of a media chunk: also of files of another version or layout.

    Raises:
        UnknownLayout: magic or the list is not known.
    """
    return _read_head(data, any_version=True)[1]


def parse_partial(data: memoryview, version: int) -> Memory:
    """Take a checkpoint's target apart: what of a model's memory cannot be cut.

    Raises:
        UnknownLayout: as `parse`.
    """
    reader = _Reader(data)
    magic, _ = reader.numbers(_BLOB)
    if magic != BLOB_MAGIC:
        raise UnknownLayout(f"has a checkpoint that begins with {magic:#010x}")
    memory, end = _only(data, reader.at, version, _PARTIAL)
    if end != len(data):
        raise UnknownLayout("has a checkpoint that goes on behind its sections")
    return memory


def _only(data: memoryview, start: int, version: int, candidates: Iterable[tuple[str, ...]]) -> tuple[Memory, int]:
    """The one combination of sections that ends where the data or its checkpoints do, and that end."""
    found: list[tuple[Memory, int]] = []
    why = "fits no known combination of sections"
    for sections in candidates:
        attention = sections != ("recurrent",)
        for form in _forms(sections) if attention else (_Form(sections, extended=False, values=True),):
            reader = _Reader(data, start)
            try:
                memory = _read_memory(reader, version, form)
            except UnknownLayout as error:
                why = str(error)
                continue
            if _ends(reader):
                found.append((memory, reader.at))
    if not found:
        raise UnknownLayout(why)
    if len(found) > 1 and any(_has_cells(memory) for memory, _ in found):
        raise UnknownLayout("can be read in more than one way")
    return found[0]


def _forms(sections: tuple[str, ...]) -> Iterator[_Form]:
    for extended in (False, True):
        for values in (True, False):
            yield _Form(sections, extended, values)


def _ends(reader: _Reader) -> bool:
    return reader.left == 0 or (
        reader.left >= _HEADER.size and _U32.unpack_from(reader.data, reader.at)[0] == CHECKPOINTS_MAGIC
    )


def _has_cells(memory: Memory) -> bool:
    streams = [s for section in (memory.base, memory.swa) if section is not None for s in section.streams]
    return any(s is not None for s in streams) or (memory.recurrent is not None and len(memory.recurrent.positions) > 0)


def _read_head(data: memoryview, *, any_version: bool = False) -> tuple[int, Ints, bool, tuple[Media, ...], int]:
    """Version, tokens, whether their list has a header, media, and where the state begins."""
    reader = _Reader(data)
    magic, version, n_listed = reader.numbers(_HEADER)
    if magic != FILE_MAGIC:
        raise UnknownLayout(f"is no slot file: begins with {magic:#010x}")
    if version not in VERSIONS and not any_version:
        raise UnknownLayout(f"is of version {version}, and only {VERSIONS} are known")
    listed = reader.run(n_listed * 4)
    wrapped = n_listed > 0 and int.from_bytes(listed[:4], "little", signed=True) == NO_TOKEN
    tokens, media = _read_tokens(listed) if wrapped else (np.frombuffer(listed, "<i4"), ())
    if not wrapped and (tokens < 0).any():
        raise UnknownLayout("has a negative token id")
    return version, tokens, wrapped, media, reader.at


def _read_tokens(listed: memoryview) -> tuple[Ints, tuple[Media, ...]]:
    """A list with the server's header: a marker, a version, the tokens, and the media chunks."""
    reader = _Reader(listed, 4)
    if reader.u32() != TOKENS_VERSION:
        raise UnknownLayout("has a token list of an unknown version")
    tokens = reader.ints(reader.u32())
    keys = [int(key) for key in reader.ints(reader.u32())]
    media = tuple(Media(key, reader.run(reader.u32())) for key in keys)
    if reader.left >= 4 or any(reader.run(reader.left)):
        raise UnknownLayout("has a token list that goes on behind its media")
    _check_media(tokens, keys)
    return tokens, media


def _check_media(tokens: Ints, keys: list[int]) -> None:
    """Each run of -1 begins at a key, each key begins such a run, and there is no other negative id."""
    gaps = tokens == NO_TOKEN
    if (tokens[~gaps] < 0).any():
        raise UnknownLayout("has a negative token id")
    starts = np.flatnonzero(gaps & ~np.concatenate(([False], gaps[:-1]))) if len(tokens) else np.empty(0, np.int64)
    in_range = all(0 <= key < len(tokens) and gaps[key] for key in keys)
    if keys != sorted(set(keys)) or not in_range or not set(starts.tolist()) <= set(keys):
        raise UnknownLayout("has media chunks that do not fit its token list")


def _read_memory(reader: _Reader, version: int, form: _Form) -> Memory:
    base = swa = recurrent = None
    for section in form.sections:
        if section == "recurrent":
            recurrent = _read_recurrent(reader)
        elif section == "swa":
            swa = _read_kv(reader, version, form)
        else:
            base = _read_kv(reader, version, form)
    return Memory(base, swa, recurrent)


def _read_kv(reader: _Reader, version: int, form: _Form) -> KvSection:
    n_streams = reader.u32()
    if not 1 <= n_streams <= MAX_STREAMS:
        raise UnknownLayout(f"says {n_streams} streams")
    return KvSection(tuple(_read_stream(reader, version, form) for _ in range(n_streams)))


def _read_stream(reader: _Reader, version: int, form: _Form) -> Stream | None:
    n_cells = reader.u32()
    if n_cells == 0:
        return None
    width = 6 if form.extended else 3
    cells = reader.ints(n_cells * width).reshape(n_cells, width)
    if (cells[:, 1] != 1).any():
        raise UnknownLayout("has cells of more or less than one sequence")
    v_trans, n_layers = reader.numbers(_PAIR)
    rotations = reader.numbers(_PAIR) if version >= 4 else None
    if v_trans not in (0, 1) or not 1 <= n_layers <= MAX_LAYERS:
        raise UnknownLayout(f"says {n_layers} layers, transposed {v_trans}")
    keys = tuple(_read_rows(reader, n_cells) for _ in range(n_layers))
    read = _read_columns if v_trans else _read_rows
    values = tuple(read(reader, n_cells) for _ in range(n_layers)) if form.values else ()
    if any(len({plane.ggml_type for plane in part}) > 1 for part in (keys, values)):
        raise UnknownLayout("has layers of different element types")
    extended = cells[:, 2:5] if form.extended else None
    turned = (rotations[0], rotations[1]) if rotations else None
    return Stream(cells[:, 0], extended, cells[:, -1], v_trans, turned, keys, values)


def _read_rows(reader: _Reader, n_cells: int) -> Plane:
    number, row = reader.numbers(_ROWS)
    element = TYPES.get(number)
    if element is None or row % element.nbytes:
        raise UnknownLayout(f"has rows of {row} bytes of the element type {number}")
    return Plane(number, row, 0, reader.run(n_cells * row))


def _read_columns(reader: _Reader, n_cells: int) -> Plane:
    number, size, n_columns = reader.numbers(_COLUMNS)
    element = TYPES.get(number)
    if element is None or element.block != 1 or size != element.nbytes or n_columns == 0:
        raise UnknownLayout(f"has columns of {size} bytes an element of the type {number}")
    return Plane(number, size, n_columns, reader.run(n_columns * n_cells * size))


def _read_recurrent(reader: _Reader) -> RecurrentSection:
    n_cells = reader.u32()
    cells = reader.ints(n_cells * 2).reshape(n_cells, 2)
    if cells[:, 1].any():
        raise UnknownLayout("has recurrent cells that name sequences")
    s_trans, n_layers = reader.numbers(_PAIR)
    if s_trans or not 1 <= n_layers <= MAX_LAYERS:
        raise UnknownLayout(f"says {n_layers} recurrent layers, transposed {s_trans}")
    # Layers without a recurrent state are left out and not marked: the planes go on to the end.
    planes = []
    while not _ends(reader):
        planes.append(_read_rows(reader, n_cells))
        if len(planes) > 2 * n_layers:
            raise UnknownLayout(f"has more than two tensors for each of {n_layers} recurrent layers")
    half = len(planes) // 2
    r, s = tuple(planes[:half]), tuple(planes[half:])
    if not r or len(r) != len(s) or any(len({(p.ggml_type, p.row_nbytes) for p in part}) > 1 for part in (r, s)):
        raise UnknownLayout("has recurrent layers that do not fit each other")
    return RecurrentSection(cells[:, 0], n_layers, r, s)


def _read_checkpoints(reader: _Reader) -> tuple[Checkpoint, ...]:
    _, version, count = reader.numbers(_HEADER)
    if version != CHECKPOINTS_VERSION or count > MAX_CHECKPOINTS:
        raise UnknownLayout(f"has {count} checkpoints of version {version}")
    points = []
    for _ in range(count):
        n_tokens, pos_min, pos_max = reader.numbers(_POINT)
        parts = [reader.run(reader.numbers(_LENGTH)[0]) for _ in range(3)]
        if n_tokens < 0 or not 0 <= pos_min <= pos_max:
            raise UnknownLayout(f"has a checkpoint at {n_tokens} with the positions {pos_min} to {pos_max}")
        points.append(Checkpoint(n_tokens, pos_min, pos_max, *parts))
    if reader.left:
        raise UnknownLayout(f"goes on for {reader.left} bytes behind its checkpoints")
    return tuple(points)


def write(slot: SlotFile) -> list[Piece]:
    """The pieces of a slot file, to be written one after the other. `write(parse(data))` is `data`."""
    listed = _tokens_bytes(slot)
    pieces: list[Piece] = [_HEADER.pack(FILE_MAGIC, slot.version, len(listed) // 4), listed]
    pieces += _memory_pieces(slot.memory)
    if slot.checkpoints is not None:
        pieces.append(_HEADER.pack(CHECKPOINTS_MAGIC, CHECKPOINTS_VERSION, len(slot.checkpoints)))
        for point in slot.checkpoints:
            pieces.append(_POINT.pack(point.n_tokens, point.pos_min, point.pos_max))
            for part in (point.target, point.draft, point.spec):
                pieces += [_LENGTH.pack(len(part)), part]
    return pieces


def write_partial(memory: Memory, seq_id: int = 0) -> bytes:
    """The target of a checkpoint."""
    return b"".join([_BLOB.pack(BLOB_MAGIC, seq_id), *_memory_pieces(memory)])


def _tokens_bytes(slot: SlotFile) -> bytes:
    tokens = slot.tokens.astype("<i4").tobytes()
    if not slot.wrapped:
        return tokens
    parts = [struct.pack("<iII", NO_TOKEN, TOKENS_VERSION, len(slot.tokens)), tokens, _U32.pack(len(slot.media))]
    parts += [_U32.pack(media.index) for media in slot.media]
    for media in slot.media:
        parts += [_U32.pack(len(media.chunk)), bytes(media.chunk)]
    listed = b"".join(parts)
    return listed + bytes(-len(listed) % 4)


def _memory_pieces(memory: Memory) -> Iterator[Piece]:
    for section in (memory.base, memory.swa):
        if section is not None:
            yield _U32.pack(len(section.streams))
            for stream in section.streams:
                yield from _stream_pieces(stream)
    if memory.recurrent is not None:
        yield from _recurrent_pieces(memory.recurrent)


def _stream_pieces(stream: Stream | None) -> Iterator[Piece]:
    if stream is None:
        yield _U32.pack(0)
        return
    n_cells = len(stream.positions)
    ones = np.ones(n_cells, np.int32)
    extended = [] if stream.extended is None else list(stream.extended.T)
    cells = np.stack([stream.positions, ones, *extended, stream.seq_ids], axis=1)
    yield _U32.pack(n_cells) + cells.astype("<i4").tobytes()
    yield _PAIR.pack(stream.v_trans, len(stream.keys)) + (_PAIR.pack(*stream.rotations) if stream.rotations else b"")
    yield from _plane_pieces(stream.keys)
    yield from _plane_pieces(stream.values)


def _recurrent_pieces(section: RecurrentSection) -> Iterator[Piece]:
    cells = np.stack([section.positions, np.zeros_like(section.positions)], axis=1)
    yield _U32.pack(len(section.positions)) + cells.astype("<i4").tobytes() + _PAIR.pack(0, section.n_layers)
    yield from _plane_pieces(section.r)
    yield from _plane_pieces(section.s)


def _plane_pieces(planes: Iterable[Plane]) -> Iterator[Piece]:
    for plane in planes:
        if plane.n_columns:
            yield _COLUMNS.pack(plane.ggml_type, plane.row_nbytes, plane.n_columns)
        else:
            yield _ROWS.pack(plane.ggml_type, plane.row_nbytes)
        yield plane.data
