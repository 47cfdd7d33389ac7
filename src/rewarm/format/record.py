"""The record format, version 1: bytes to objects and back, every size checked before it is used.

    offset  bytes  content
    0       8      magic, 8f 72 65 77 61 72 6d 0a
    8       4      format version, u32
    12      4      header length H, u32
    16      8      payload offset P, u64, a multiple of 4096
    24      8      file length L, u64
    32      16     XXH3-128 of the bytes [0, 32) and [48, P)
    48      H      header, a msgpack map (`Header`)
    48 + H         zeros up to P
    P       L - P  payload: the tensors back to back, in the table's order, each C-contiguous

Integers are little-endian, checksums are in XXH3's canonical (big-endian) form; `docs/format.md` has a
worked example. This module does not open files and does not know where a record lies; it knows that a
record is bad (`DamagedRecord`), or from a later version (`NewerFormat`), and never guesses.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import xxhash

from rewarm.errors import DamagedRecord, NewerFormat
from rewarm.format.pieces import as_bytes, pieces
from rewarm.state.chain import KEY_NBYTES, Key, Tokens, block_key, point_key
from rewarm.state.layout import STORAGE, Kind, Layout, TensorSpec
from rewarm.state.sequence import Array, MetaValue

MAGIC = b"\x8frewarm\n"
VERSION = 1
ALIGNMENT = 4096
PRELUDE = struct.Struct("<8sIIQQ16s")
MAX_HEADER_NBYTES = 64 * 2**20
_MAX_AXES = 32
_END_OF_COUNTS = 2**62


class TensorEntry(msgspec.Struct, frozen=True):
    """One row of a record's tensor table.

    Attributes:
        name: the tensor's name in the layout.
        kind: `rows`, `window` or `opaque`.
        dtype: the engine's name of the element type.
        storage: numpy's name of what the elements travel as.
        axis: the token axis; 0 for opaque tensors.
        shape: the shape without the token axis; of an opaque tensor the whole shape.
        size: rows that a window holds at most; 0 for other kinds.
        keep: first rows that a window never drops.
        rows: rows in this record; of a window the kept ones, then those of its run.
        offset: from the payload's start, in bytes.
        length: in bytes.
        checksum: XXH3-128 of the tensor's bytes.
    """

    name: str
    kind: Literal["rows", "window", "opaque"]
    dtype: str
    storage: str
    axis: int
    shape: tuple[int, ...]
    size: int
    keep: int
    rows: int
    offset: int
    length: int
    checksum: bytes

    def spec(self) -> TensorSpec:
        """The tensor's description in a layout."""
        opaque = self.kind == "opaque"
        shape = () if opaque else self.shape
        return TensorSpec(self.name, Kind(self.kind), self.dtype, self.storage, self.axis, shape, self.size, self.keep)

    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the array in this record."""
        return self.shape if self.kind == "opaque" else self.spec().shape_with(self.rows)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a record says of itself.

    Attributes:
        kind: `block` or `point`.
        key: the record's name, 32 bytes.
        parent: the key before it: a block's, or the root's.
        fingerprint: the model's identity, 32 bytes.
        layout: the layout's digest, 32 bytes.
        block_tokens: tokens per block of the root.
        first: position of the first of `tokens`.
        tokens: token ids, little-endian i64.
        codec: how the payload is encoded: `raw`.
        valid_from: of the layout.
        tensors: the tensor table; in a point, every tensor of the layout.
        created_s: seconds since 1970, by the writer's clock.
        after: in a point: the point whose end begins the window runs, else None.
        after_n: in a point with `after`: where that point ends.
        entry: in a point: id of the entry that it was saved for, 16 bytes.
        label: in a point: the entry's label.
        boundary: in a point: what ended here.
        meta: in a point: plain values that belong to the state at exactly n.
    """

    kind: Literal["block", "point"]
    key: bytes
    parent: bytes
    fingerprint: bytes
    layout: bytes
    block_tokens: int
    first: int
    tokens: bytes
    codec: str = "raw"
    valid_from: int = 0
    tensors: tuple[TensorEntry, ...] = ()
    created_s: float = 0.0
    after: bytes | None = None
    after_n: int = 0
    entry: bytes = b""
    label: str | None = None
    boundary: str = ""
    meta: dict[str, MetaValue] = {}

    @property
    def token_ids(self) -> Tokens:
        """The token ids, shape (n_tokens,)."""
        return np.frombuffer(self.tokens, dtype="<i8")

    @property
    def n(self) -> int:
        """Tokens that the sequence has at the record's end."""
        return self.first + len(self.tokens) // 8

    def read_layout(self) -> Layout:
        """The layout; only a point's table is complete."""
        return Layout(tuple(entry.spec() for entry in self.tensors), self.valid_from)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One tensor to be written.

    Attributes:
        spec: its description in the layout.
        array: of the spec's storage type; what the record holds of the tensor.
    """

    spec: TensorSpec
    array: Array


Put = Callable[[list[memoryview]], None]
"""Takes the next bytes of a payload."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A record in bytes.

    Attributes:
        header: what the head says.
        head: all bytes before the payload.
        payload: the tensors' bytes.
        nbytes: the whole file's length.
    """

    header: Header
    head: bytes
    payload: tuple[memoryview, ...]
    nbytes: int

    @property
    def payload_at(self) -> int:
        """Where the payload begins, in bytes."""
        return len(self.head)

    def write(self, put: Put) -> bytes:
        """Give the payload to `put`, then return the head."""
        put([*self.payload])
        return self.head


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """A record of which all is known but the checksums: these are taken while the payload is written.

    Attributes:
        header: what the head will say; the checksums in its table are zeros.
        parts: the tensors.
        payload_at: where the payload begins, in bytes.
        nbytes: the whole file's length.
    """

    header: Header
    parts: tuple[Part, ...]
    payload_at: int
    nbytes: int

    def write(self, put: Put) -> bytes:
        """Give the payload to `put`, some pieces at a time, from its first byte to its last; then return the head."""
        entries, group, held = [], list[memoryview](), 0
        for entry, part in zip(self.header.tensors, self.parts, strict=True):
            checksum = xxhash.xxh3_128()
            for piece in pieces(part.array):
                for start in range(0, len(piece), _GROUP_NBYTES):
                    group.append(piece[start : start + _GROUP_NBYTES])
                    checksum.update(group[-1])
                    held += len(group[-1])
                    # What the checksum has just read is still in the processor's cache.
                    if held >= _GROUP_NBYTES:
                        put(group)
                        group, held = [], 0
            entries.append(msgspec.structs.replace(entry, checksum=checksum.digest()))
        put(group)
        return _head(msgspec.structs.replace(self.header, tensors=tuple(entries)), self.payload_at, self.nbytes)


_GROUP_NBYTES = 2**20

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def outline(header: Header, parts: Sequence[Part]) -> Outline:
    """The record that `header` (its table still empty) and `parts` make, ready to be written."""
    entries, offset = [], 0
    for part in parts:
        spec, opaque = part.spec, part.spec.kind is Kind.OPAQUE
        entries.append(
            TensorEntry(
                name=spec.name,
                kind=spec.kind.value,
                dtype=spec.dtype,
                storage=spec.storage,
                axis=spec.axis,
                shape=tuple(part.array.shape) if opaque else spec.shape,
                size=spec.size,
                keep=spec.keep,
                rows=0 if opaque else part.array.shape[spec.axis],
                offset=offset,
                length=part.array.nbytes,
                checksum=bytes(16),
            )
        )
        offset += part.array.nbytes
    header = msgspec.structs.replace(header, tensors=tuple(entries))
    payload_at = round_up(PRELUDE.size + len(_encoder.encode(header)))
    return Outline(header, tuple(parts), payload_at, payload_at + offset)


def encode(header: Header, parts: Sequence[Part]) -> Encoded:
    """The record that `header` (its table still empty) and `parts` make, in bytes."""
    planned = outline(header, parts)
    head = planned.write(lambda _: None)
    payload = tuple(as_bytes(np.ascontiguousarray(part.array)) for part in parts)
    written = _decoder.decode(head[PRELUDE.size : PRELUDE.size + PRELUDE.unpack(head[: PRELUDE.size])[2]])
    return Encoded(written, head, payload, planned.nbytes)


def _head(header: Header, payload_at: int, nbytes: int) -> bytes:
    """All bytes before the payload."""
    body = _encoder.encode(header)
    plain = PRELUDE.pack(MAGIC, VERSION, len(body), payload_at, nbytes, b"")[:32]
    body += bytes(payload_at - PRELUDE.size - len(body))
    return plain + xxhash.xxh3_128_digest(plain + body) + body


def round_up(nbytes: int) -> int:
    """`nbytes` rounded up to whole 4 KiB."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Prelude:
    """The first 48 bytes, checked against the file's size."""

    header_nbytes: int
    payload_at: int
    nbytes: int
    checksum: bytes


def read_prelude(data: bytes, file_nbytes: int) -> Prelude:
    """Check the first 48 bytes of a file of `file_nbytes` bytes.

    Raises:
        DamagedRecord: no record, or its sizes do not agree with the file's.
        NewerFormat: a later version wrote it.
    """
    if len(data) < PRELUDE.size:
        raise DamagedRecord("shorter than a record's first 48 bytes")
    magic, version, header_nbytes, payload_at, nbytes, checksum = PRELUDE.unpack(data[: PRELUDE.size])
    if magic != MAGIC:
        raise DamagedRecord("does not begin as a record does")
    if version > VERSION:
        raise NewerFormat(f"written in format version {version}; this version reads up to {VERSION}")
    if version != VERSION:
        raise DamagedRecord(f"format version {version} has never been written")
    if nbytes != file_nbytes:
        raise DamagedRecord(f"says it has {nbytes} bytes, and the file has {file_nbytes}")
    end = PRELUDE.size + header_nbytes
    if header_nbytes > MAX_HEADER_NBYTES or payload_at != round_up(end) or payload_at > nbytes:
        raise DamagedRecord("header and payload do not fit the file")
    return Prelude(header_nbytes, payload_at, nbytes, checksum)


def read_header(head: bytes, prelude: Prelude) -> Header:
    """The header out of a record's bytes before the payload, with everything in it checked.

    Raises:
        DamagedRecord: checksum, structure, sizes or key are wrong.
        NewerFormat: the payload's codec is not known.
    """
    if len(head) != prelude.payload_at:
        raise DamagedRecord("ends inside its header")
    if xxhash.xxh3_128_digest(head[:32] + head[48:]) != prelude.checksum:
        raise DamagedRecord("the header's checksum does not agree")
    try:
        header = _decoder.decode(head[PRELUDE.size : PRELUDE.size + prelude.header_nbytes])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedRecord(f"the header cannot be read: {error}") from None
    if header.codec != "raw":
        raise NewerFormat(f"the payload's codec {header.codec!r} is not known")
    _check_header(header)
    _check_table(header, prelude.nbytes - prelude.payload_at)
    return header


def _check_header(header: Header) -> None:
    names = (header.key, header.parent, header.fingerprint, header.layout)
    if any(len(name) != KEY_NBYTES for name in names) or (header.after is not None and len(header.after) != KEY_NBYTES):
        raise DamagedRecord("a key or digest does not have 32 bytes")
    size, n_own = header.block_tokens, len(header.tokens) // 8
    if size < 1 or len(header.tokens) % 8 or header.first % size:
        raise DamagedRecord("the tokens do not lie on the grid of blocks")
    if not (0 <= header.first < _END_OF_COUNTS and 0 <= header.valid_from < _END_OF_COUNTS):
        raise DamagedRecord("a count of tokens is impossible")
    if header.after is not None and not 0 < header.after_n < header.n:
        raise DamagedRecord("its window runs begin behind a point that is no earlier one")
    if header.kind == "block":
        fits, key = n_own == size, block_key(Key(header.parent), header.token_ids)
    else:
        fits, key = n_own < size and header.n > 0, point_key(Key(header.parent), header.n, header.token_ids)
    if not fits:
        raise DamagedRecord("has the wrong number of tokens")
    if key != header.key:
        raise DamagedRecord("its key is not that of its tokens")


def _check_table(header: Header, payload_nbytes: int) -> None:
    at = 0
    for entry in header.tensors:
        _check_entry(entry, header)
        length = math.prod(entry.stored_shape()) * np.dtype(entry.storage).itemsize
        if entry.length != length or entry.offset != at:
            raise DamagedRecord(f"tensor {entry.name!r} does not lie where it should")
        at += length
    if at != payload_nbytes:
        raise DamagedRecord("the tensors do not fill the payload")
    if len({entry.name for entry in header.tensors}) != len(header.tensors):
        raise DamagedRecord("two tensors have one name")
    if header.kind == "point" and header.read_layout().digest != header.layout:
        raise DamagedRecord("its layout is not that of its tensors")


def _check_entry(entry: TensorEntry, header: Header) -> None:
    n_own = len(header.tokens) // 8
    if not STORAGE.fullmatch(entry.storage) or len(entry.checksum) != 16:
        raise DamagedRecord(f"tensor {entry.name!r} has an impossible element type or checksum")
    if len(entry.shape) > _MAX_AXES or not all(0 <= length < _END_OF_COUNTS for length in entry.shape):
        raise DamagedRecord(f"tensor {entry.name!r} has an impossible shape")
    if not 0 <= entry.axis <= len(entry.shape) or entry.rows < 0:
        raise DamagedRecord(f"tensor {entry.name!r} has an impossible shape")
    if math.prod(length for length in entry.stored_shape() if length) >= _END_OF_COUNTS:
        # Also where another length is 0 and there is no byte of it: numpy refuses such shapes.
        raise DamagedRecord(f"tensor {entry.name!r} has an impossible shape")
    if entry.kind == "rows" and entry.rows != n_own:
        raise DamagedRecord(f"tensor {entry.name!r} has {entry.rows} rows for {n_own} tokens")
    if entry.kind == "window" and not _window_fits(entry, header):
        raise DamagedRecord(f"tensor {entry.name!r} does not hold its window's rows")
    if header.kind == "block" and entry.kind != "rows":
        raise DamagedRecord(f"tensor {entry.name!r} is no tensor of rows")


def _window_fits(entry: TensorEntry, header: Header) -> bool:
    if entry.size < 1 or not 0 <= entry.keep < entry.size:
        return False
    kept, start = entry.spec().window_span(header.n)
    if header.after is not None:
        start = max(start, header.after_n)
    return entry.rows == kept + header.n - start


def read_payload(header: Header, payload: memoryview) -> dict[str, Array]:
    """The record's tensors by name, as views into `payload`, each one's checksum checked.

    Raises:
        DamagedRecord: a checksum does not agree.
    """
    arrays: dict[str, Array] = {}
    for entry in header.tensors:
        data = payload[entry.offset : entry.offset + entry.length]
        check_tensor(entry, [data])
        arrays[entry.name] = np.frombuffer(data, dtype=entry.storage).reshape(entry.stored_shape())
    return arrays


def check_tensor(entry: TensorEntry, pieces: Iterable[memoryview]) -> None:
    """Whether the bytes of a tensor, in the order of the record, are those that were written.

    Raises:
        DamagedRecord: the checksum does not agree.
    """
    checksum = xxhash.xxh3_128()
    for piece in pieces:
        checksum.update(piece)
    if checksum.digest() != entry.checksum:
        raise DamagedRecord(f"the checksum of tensor {entry.name!r} does not agree")


_CHECKED_NBYTES = 2**18
"""Bytes that are looked at twice while they are in the processor's cache."""

_FIRST_NOT_FINITE = {
    "bfloat16": ("<u2", "<i2", 0x7F80),
    "float16": ("<u2", "<i2", 0x7C00),
    "float32": ("<u4", "<i4", 0x7F80_0000),
    "float64": ("<u8", "<i8", 0x7FF0_0000_0000_0000),
    "complex64": ("<u4", "<i4", 0x7F80_0000),
    "complex128": ("<u8", "<i8", 0x7FF0_0000_0000_0000),
    # Without infinity, and NaN in the last place only.
    "float8_e4m3fn": ("|u1", "|i1", 0x7F),
    "float8_e5m2": ("|u1", "|i1", 0x7C),
    # Names that some engines give the same two types.
    "float8_e4m3": ("|u1", "|i1", 0x7F),
    "fp8_e4m3": ("|u1", "|i1", 0x7F),
    "fp8_e5m2": ("|u1", "|i1", 0x7C),
}
"""By element type: how its bits are seen without and with a sign, and the least of them that is infinity or NaN."""


def finite(part: Part) -> bool:
    """Whether a float tensor is free of NaN and infinity; other element types always are."""
    unsigned, signed, first = _FIRST_NOT_FINITE.get(part.spec.dtype, ("", "", 0))
    if not unsigned or part.array.dtype.itemsize % np.dtype(unsigned).itemsize:
        return True
    sign = 1 << (8 * np.dtype(unsigned).itemsize - 1)
    for run in pieces(part.array):
        for start in range(0, len(run), _CHECKED_NBYTES):
            bits = np.frombuffer(run[start : start + _CHECKED_NBYTES], unsigned)
            # Seen without a sign, negative numbers are the largest, and seen with it the positive ones are.
            if bits.max() >= sign + first or bits.view(signed).max() >= first:
                return False
    return True
