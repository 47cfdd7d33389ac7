"""The record format: what is written comes back, and nothing else does."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rewarm.errors import DamagedRecord, NewerFormat, RecordError
from rewarm.format import record as format_
from rewarm.format.record import (
    ALIGNMENT,
    MAGIC,
    MAX_HEADER_NBYTES,
    PRELUDE,
    Encoded,
    Header,
    Part,
    encode,
    finite,
    read_header,
    read_payload,
    read_prelude,
)
from rewarm.state.chain import Chain, as_tokens, root_key
from rewarm.state.layout import Kind, Layout, TensorSpec
from rewarm.state.sequence import Array

SIZE = 4
ROWS = TensorSpec("k", Kind.ROWS, "float32", "<f4", 1, (2, 3))
WINDOW = TensorSpec("w", Kind.WINDOW, "bfloat16", "<u2", 0, (3,), 6, 1)
OPAQUE = TensorSpec("z", Kind.OPAQUE, "float16", "<f2")
LAYOUT = Layout((ROWS, WINDOW, OPAQUE), 2)
TOKENS = list(range(100, 110))


def numbers(shape: tuple[int, ...], storage: str, seed: int = 0) -> Array:
    """Bits that are no NaN in any float type."""
    size = int(np.prod(shape)) * np.dtype(storage).itemsize
    data = np.random.default_rng(seed).integers(0, 0x70, size=size, dtype=np.uint8)
    return data.view(storage).reshape(shape)


def header(kind: str, layout: Layout = LAYOUT, tokens: list[int] = TOKENS, **fields: object) -> Header:
    """The header of block 1, or of the point at 10, of `tokens`."""
    chain = Chain(root_key(SIZE, b"f" * 32, layout.digest, b""), as_tokens(tokens), SIZE)
    i = len(tokens) // SIZE
    common = {"fingerprint": b"f" * 32, "layout": layout.digest, "block_tokens": SIZE, "valid_from": layout.valid_from}
    if kind == "block":
        own = chain.tokens[(i - 1) * SIZE : i * SIZE].tobytes()
        common |= {"key": chain.block(i - 1), "parent": chain.parent(i - 1), "first": (i - 1) * SIZE, "tokens": own}
    else:
        common |= {"key": chain.point(len(tokens)), "parent": chain.parent(i), "first": i * SIZE}
        common |= {"tokens": chain.tail(i).tobytes(), "entry": b"e" * 16, "boundary": "assistant"}
    return Header(kind=kind, **(common | fields))  # type: ignore[arg-type]


def block(**fields: object) -> Encoded:
    return encode(header("block", **fields), [Part(ROWS, numbers(ROWS.shape_with(SIZE), "<f4"))])


def point(**fields: object) -> Encoded:
    head = header("point", **fields)
    kept, start = WINDOW.window_span(head.n)
    n_window = kept + head.n - max(start, head.after_n)
    parts = [
        Part(ROWS, numbers(ROWS.shape_with(len(head.tokens) // 8), "<f4", 1)),
        Part(WINDOW, numbers(WINDOW.shape_with(n_window), "<u2", 2)),
        Part(OPAQUE, numbers((2, 5), "<f2", 3)),
    ]
    return encode(head, parts)


def file_of(record: Encoded) -> bytes:
    data = record.head + b"".join(record.payload)
    assert len(data) == record.nbytes
    return data


def read(data: bytes) -> tuple[Header, dict[str, Array]]:
    """As the store reads a file, over bytes."""
    prelude = read_prelude(data[: PRELUDE.size], len(data))
    head = read_header(data[: prelude.payload_at], prelude)
    return head, read_payload(head, memoryview(data)[prelude.payload_at :])


RECORDS = {
    "block": block,
    "point": point,
    "point with meta": lambda: point(meta={"a": 1, "b": None, "c": "x", "d": 0.5, "e": True}, label="häß"),
    "point after": lambda: point(after=b"a" * 32, after_n=7),
    "block of no tensors": lambda: encode(header("block"), []),
    "point at a block's edge": lambda: point(tokens=TOKENS[:8]),
}


@pytest.mark.parametrize("make", RECORDS.values(), ids=RECORDS)
def test_a_record_comes_back(make) -> None:  # type: ignore[no-untyped-def]
    record = make()
    head, arrays = read(file_of(record))
    assert head == record.header
    assert [entry.name for entry in head.tensors] == list(arrays)
    at = 0
    for data, array in zip(record.payload, arrays.values(), strict=True):
        assert array.tobytes() == bytes(data)
        at += len(data)
    if head.kind == "point":
        assert head.read_layout() == LAYOUT


@pytest.mark.parametrize("make", RECORDS.values(), ids=RECORDS)
def test_the_payload_is_aligned(make) -> None:  # type: ignore[no-untyped-def]
    record = make()
    assert len(record.head) % ALIGNMENT == 0
    assert record.nbytes == len(record.head) + sum(map(len, record.payload))


def assert_refused(data: bytes, kind: type[RecordError] = DamagedRecord) -> None:
    with pytest.raises(kind):
        read(data)


@pytest.mark.parametrize("make", [block, point], ids=["block", "point"])
def test_b039_every_flipped_bit_is_seen(make) -> None:  # type: ignore[no-untyped-def]
    """All bits of the head that carry anything, a sample of the padding, and all of the payload."""
    data = file_of(make())
    header_end = PRELUDE.size + struct.unpack_from("<I", data, 12)[0]
    places = [*range(header_end), *range(header_end, ALIGNMENT, 97), ALIGNMENT - 1, *range(ALIGNMENT, len(data))]
    for at in places:
        for bit in range(8) if at < PRELUDE.size else (at % 8,):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises((DamagedRecord, NewerFormat)) as caught:
                read(bytes(flipped))
            # Only a larger version number can look like a later version.
            assert caught.type is DamagedRecord or 8 <= at < 12


@pytest.mark.parametrize("make", RECORDS.values(), ids=RECORDS)
def test_b061_a_file_that_is_shorter_or_longer_than_it_says_is_refused(make) -> None:  # type: ignore[no-untyped-def]
    data = file_of(make())
    for part in range(16):
        assert_refused(data[: len(data) * part // 16])
    for cut in (1, 2, 47, 48, 49, 4094, 4095):
        assert_refused(data[:-cut])
        assert_refused(data[:cut])
        assert_refused(data + bytes(cut))
    assert_refused(data + data)
    assert_refused(bytes(len(data)))
    assert_refused(b"")


@pytest.mark.parametrize("nbytes", [0, 1, 47, 48, 4096, 65536])
def test_random_bytes_are_refused(nbytes: int) -> None:
    assert_refused(np.random.default_rng(nbytes).bytes(nbytes))


def with_prelude(data: bytes, *, header_nbytes: int, payload_at: int, nbytes: int, version: int = 1) -> bytes:
    """`data` with other sizes in its first 48 bytes, and a checksum that agrees with them."""
    plain = struct.pack("<8sIIQQ", MAGIC, version, header_nbytes, payload_at, nbytes)
    checksum = xxhash.xxh3_128_digest(plain + data[PRELUDE.size : min(payload_at, len(data))])
    return plain + checksum + data[PRELUDE.size :]


@pytest.mark.parametrize("power", range(64))
@pytest.mark.parametrize("field", ["header_nbytes", "payload_at", "nbytes"])
def test_no_claimed_size_is_believed(power: int, field: str) -> None:
    data = file_of(point())
    length = struct.unpack_from("<I", data, 12)[0]
    right = {"header_nbytes": length, "payload_at": ALIGNMENT, "nbytes": len(data)}
    for value in {0, 2**power - 1, 2**power, 2**power + 1} - {right[field]}:
        if field == "header_nbytes" and value >= 2**32:
            continue
        tracemalloc.start()
        assert_refused(with_prelude(data, **(right | {field: value})))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20


def test_a_header_longer_than_any_is_refused_before_it_is_read() -> None:
    claimed = MAX_HEADER_NBYTES + 1
    plain = struct.pack("<8sIIQQ16s", MAGIC, 1, claimed, format_.round_up(claimed + 48), 2**40, bytes(16))
    with pytest.raises(DamagedRecord):
        read_prelude(plain, 2**40)


@pytest.mark.parametrize("version", [2, 3, 2**31, 2**32 - 1])
def test_a_newer_version_is_no_damage(version: int) -> None:
    data = file_of(point())
    length = struct.unpack_from("<I", data, 12)[0]
    newer = with_prelude(data, header_nbytes=length, payload_at=ALIGNMENT, nbytes=len(data), version=version)
    assert_refused(newer, NewerFormat)
    assert_refused(newer[:100], NewerFormat)


def test_version_0_has_never_been_written() -> None:
    data = file_of(point())
    length = struct.unpack_from("<I", data, 12)[0]
    assert_refused(with_prelude(data, header_nbytes=length, payload_at=ALIGNMENT, nbytes=len(data), version=0))


def forged(body: bytes, payload: bytes = b"") -> bytes:
    """A file with an arbitrary header and right sizes and checksums around it: what only malice makes."""
    start = format_.round_up(PRELUDE.size + len(body))
    padded = body + bytes(start - PRELUDE.size - len(body))
    plain = struct.pack("<8sIIQQ", MAGIC, 1, len(body), start, start + len(payload))
    return plain + xxhash.xxh3_128_digest(plain + padded) + padded + payload


def forged_from(head: Header, payload: bytes) -> bytes:
    return forged(msgspec.msgpack.encode(head), payload)


def test_another_codec_is_no_damage() -> None:
    record = point()
    head = msgspec.structs.replace(record.header, codec="zstd")
    assert_refused(forged_from(head, b"".join(record.payload)), NewerFormat)


def _entries(record: Encoded, i: int, **fields: object) -> Header:
    entries = list(record.header.tensors)
    entries[i] = msgspec.structs.replace(entries[i], **fields)
    return msgspec.structs.replace(record.header, tensors=tuple(entries))


HUGE = 2**63 - 1


def short(fields: dict[str, object]) -> str:
    """An id of at most 70 characters."""
    text = str(fields)
    return text if len(text) <= 70 else f"{text[:50]} ({len(text)} characters)"


FORGERIES: list[dict[str, object]] = [
    {"shape": (HUGE, HUGE)},
    {"shape": (2**32, 2**32)},
    {"shape": (2**64 - 1,)},
    {"shape": (-1, -6)},
    {"shape": (-2, -3)},
    {"shape": (0, HUGE)},
    {"shape": (3, 2)},
    {"shape": (6,)},
    {"shape": ()},
    {"shape": (2, 3, *[1] * 70)},
    {"shape": (1,) * 200_000},
    {"shape": (HUGE,) * 3000},
    {"axis": 0},
    {"axis": 3},
    {"axis": -1},
    {"axis": HUGE},
    {"rows": 0},
    {"rows": 1},
    {"rows": HUGE},
    {"rows": -2},
    {"offset": 1},
    {"offset": -8},
    {"offset": HUGE},
    {"length": 0},
    {"length": HUGE},
    {"length": -1},
    {"storage": "O"},
    {"storage": "|O"},
    {"storage": "<M8[s]"},
    {"storage": "<U3"},
    {"storage": "<f16"},
    {"storage": "f4,f4"},
    {"storage": ">f4"},
    {"storage": "<u2"},
    {"storage": "<f8"},
    {"storage": ""},
    {"dtype": "bfloat16"},
    {"kind": "opaque"},
    {"kind": "window"},
    {"size": 3},
    {"keep": -1},
    {"name": "w"},
    {"name": "kk"},
    {"checksum": b""},
    {"checksum": bytes(16)},
    {"checksum": bytes(17)},
]


@pytest.mark.parametrize("fields", FORGERIES, ids=short)
def test_a_forged_tensor_table_is_refused_without_allocating(fields: dict[str, object]) -> None:
    record = point()
    data = forged_from(_entries(record, 0, **fields), b"".join(record.payload))
    tracemalloc.start()
    assert_refused(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23


@pytest.mark.parametrize("fields", FORGERIES, ids=short)
def test_a_forged_tensor_table_of_a_block_is_refused_or_fills_the_payload(fields: dict[str, object]) -> None:
    """A block's table is not all of the layout; the store compares it with the layout that it asked for."""
    record = block()
    payload = b"".join(record.payload)
    tracemalloc.start()
    try:
        _, arrays = read(forged_from(_entries(record, 0, **fields), payload))
        assert [array.tobytes() for array in arrays.values()] == [payload]
        assert set(fields) & {"shape", "axis", "dtype", "size", "keep", "name"}
    except DamagedRecord:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23


@pytest.mark.parametrize(
    "fields",
    [{"size": 0}, {"size": 3}, {"size": HUGE}, {"keep": 6}, {"keep": -1}, {"rows": 5}, {"rows": 7}, {"kind": "rows"}],
    ids=str,
)
def test_a_forged_window_is_refused(fields: dict[str, object]) -> None:
    record = point()
    assert_refused(forged_from(_entries(record, 1, **fields), b"".join(record.payload)))


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "block"},
        {"key": b"k" * 32},
        {"key": b""},
        {"key": b"k" * 31},
        {"parent": b"k" * 32},
        {"parent": b""},
        {"fingerprint": b"f" * 33},
        {"layout": b"l" * 32},
        {"layout": b""},
        {"block_tokens": 0},
        {"block_tokens": -4},
        {"block_tokens": 3},
        {"block_tokens": 2},
        {"first": 4},
        {"first": 1},
        {"first": -8},
        {"first": 2**62},
        {"first": 2**63 - 4},
        {"first": 2**63},
        {"first": 2**64 - 8},
        {"tokens": b""},
        {"tokens": bytes(16)},
        {"tokens": bytes(15)},
        {"tokens": bytes(32)},
        {"tokens": bytes(8 * 4000)},
        {"valid_from": 3},
        {"valid_from": -1},
        {"valid_from": 2**64 - 1},
        {"tensors": ()},
        {"after": b""},
        {"after": b"a" * 31},
        {"after": b"a" * 32, "after_n": 8},
        {"after": b"a" * 32, "after_n": -1},
        {"after": b"a" * 32, "after_n": 10},
        {"after": b"a" * 32, "after_n": HUGE},
    ],
    ids=short,
)
def test_a_forged_header_is_refused(fields: dict[str, object]) -> None:
    record = point()
    head = msgspec.structs.replace(record.header, **fields)
    assert_refused(forged_from(head, b"".join(record.payload)))


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "point"},
        {"first": 0},
        {"first": 8},
        {"tokens": bytes(32)},
        {"tokens": bytes(24)},
        {"tokens": bytes(40)},
    ],
    ids=short,
)
def test_a_forged_block_is_refused(fields: dict[str, object]) -> None:
    record = block()
    head = msgspec.structs.replace(record.header, **fields)
    with_first = fields == {"first": 0} or fields == {"first": 8}
    if with_first:
        # A block's key does not say where it lies; its parent's does. The store compares it with what it asked for.
        assert read(forged_from(head, b"".join(record.payload)))[0].first == fields["first"]
    else:
        assert_refused(forged_from(head, b"".join(record.payload)))


BODIES = {
    "empty": b"",
    "nil": b"\xc0",
    "an empty map": b"\x80",
    "an array": b"\x90",
    "a map that says it has 2^32 entries": b"\xdf\xff\xff\xff\xff",
    "an array that says it has 2^32 items": b"\x81\xa7tensors\xdd\xff\xff\xff\xff",
    "a string that says it has 4 GiB": b"\x81\xa4kind\xdb\xff\xff\xff\xff",
    "bytes that say they have 4 GiB": b"\x81\xa6tokens\xc6\xff\xff\xff\xff",
    "deep": b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0",
    "deep maps": b"\x81\xa1x" + b"\x81\xa1y" * 100_000 + b"\xc0",
    "broken UTF-8": b"\x81\xa4kind\xa2\xff\xfe",
    "an extension": b"\xc7\x08\x05aaaaaaaa",
    "a number as the kind": b"\x81\xa4kind\x05",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_header_that_is_no_header_is_refused(body: bytes) -> None:
    tracemalloc.start()
    assert_refused(forged(body))
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(st.binary(max_size=200), st.binary(max_size=40))
def test_fuzz_the_header_behind_right_checksums(body: bytes, payload: bytes) -> None:
    with pytest.raises(RecordError):
        read(forged(body, payload))


VALUES = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([0, 1, 2, 3, 4, 8, 10, 2**31, 2**63 - 1]),
    st.binary(max_size=40),
    st.text(max_size=5),
    st.none(),
    st.booleans(),
    st.floats(),
    st.lists(st.integers(-1, 5), max_size=3),
)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_fuzz_fields_behind_right_checksums(data: st.DataObject) -> None:
    """A forged record is refused, or it says the same of everything that decides what its bytes mean."""
    record = data.draw(st.sampled_from([block(), point()]))
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(record.header))
    for _ in range(data.draw(st.integers(1, 3))):
        target = plain
        entries = plain.get("tensors")
        if isinstance(entries, list) and entries and data.draw(st.booleans()):
            target = data.draw(st.sampled_from(entries))
            if not isinstance(target, dict) or not target:
                continue
        field = data.draw(st.sampled_from(sorted(target)))
        if data.draw(st.integers(0, 9)) == 0:
            del target[field]
        else:
            target[field] = data.draw(VALUES)
    payload = b"".join(record.payload)
    try:
        head, arrays = read(forged(msgspec.msgpack.encode(plain), payload))
    except RecordError:
        return
    assert head.key == record.header.key
    assert head.tokens == record.header.tokens
    if head.kind == "point":
        assert head.layout == head.read_layout().digest
    assert b"".join(array.tobytes() for array in arrays.values()) == payload


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_fuzz_bytes_of_a_file(data: st.DataObject) -> None:
    """Any edit of a file is refused: bytes overwritten, cut out, doubled, moved."""
    whole = file_of(data.draw(st.sampled_from([block(), point()])))
    at = data.draw(st.integers(0, len(whole) - 1))
    length = data.draw(st.integers(1, 64))
    edit = data.draw(st.sampled_from(["overwrite", "cut", "double", "zero"]))
    if edit == "overwrite":
        new = data.draw(st.binary(min_size=length, max_size=length))
        edited = whole[:at] + new + whole[at + length :]
    elif edit == "cut":
        edited = whole[:at] + whole[at + length :]
    elif edit == "double":
        edited = whole[:at] + whole[at : at + length] + whole[at:]
    else:
        edited = whole[:at] + bytes(length) + whole[at + length :]
    if edited != whole:
        with pytest.raises(RecordError):
            read(edited)


def test_a_number_or_a_word_in_meta_comes_back_as_it_was() -> None:
    meta = {"i": 2**63 - 1, "j": -(2**63), "f": 1.0, "t": True, "s": "é", "n": None}
    head, _ = read(file_of(point(meta=meta)))
    assert head.meta == meta
    assert [type(value) for value in head.meta.values()] == [int, int, float, bool, str, type(None)]


@pytest.mark.parametrize("storage", ["|b1", "|i1", "|u1", "<i2", "<u4", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (2, 1, 3)], ids=str)
def test_every_element_type_and_shape_comes_back(storage: str, shape: tuple[int, ...]) -> None:
    spec = TensorSpec("k", Kind.ROWS, "any", storage, len(shape) and 1, shape)
    layout = Layout((spec,))
    array = (np.arange(np.prod(spec.shape_with(2))) % 2).astype(storage).reshape(spec.shape_with(2))
    head, arrays = read(file_of(encode(header("point", layout), [Part(spec, array)])))
    assert head.read_layout() == layout
    assert arrays["k"].dtype.str == storage
    np.testing.assert_array_equal(arrays["k"], array)


def test_nan_and_infinity_are_seen_in_every_float_type() -> None:
    for storage, dtype in (("<f2", "float16"), ("<f4", "float32"), ("<f8", "float64"), ("<c8", "complex64")):
        spec = dataclasses.replace(OPAQUE, storage=storage, dtype=dtype)
        for bad in (np.nan, np.inf, -np.inf):
            array = np.array([1.0, bad], dtype=storage)
            assert not finite(Part(spec, array))
        assert finite(Part(spec, np.array([1.0, -0.0], dtype=storage)))
    brain = dataclasses.replace(OPAQUE, storage="<u2", dtype="bfloat16")
    for bits in (0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF):
        assert not finite(Part(brain, np.array([0x3F80, bits], dtype="<u2")))
    assert finite(Part(brain, np.array([0x7F7F, 0xFF7F, 0], dtype="<u2")))
    for dtype, right, wrong in (
        ("float8_e4m3fn", (0x7E, 0xFE, 0x80), (0x7F, 0xFF)),
        ("float8_e5m2", (0x7B, 0xFB), (0x7C, 0xFC, 0xFF)),
        ("fp8_e4m3", (0x7E, 0xFE), (0x7F, 0xFF)),
        ("fp8_e5m2", (0x7B, 0xFB), (0x7C, 0xFC, 0xFF)),
        ("float8_e4m3", (0x7E, 0xFE), (0x7F, 0xFF)),
        ("of_an_unknown_name", (0x00, 0x7C, 0x7F, 0xFF), ()),
    ):
        spec = dataclasses.replace(OPAQUE, storage="|u1", dtype=dtype)
        assert finite(Part(spec, np.array(right, dtype="|u1")))
        for bits in wrong:
            assert not finite(Part(spec, np.array([0, bits], dtype="|u1")))
    # An element type of another width than its name says is any bits.
    assert finite(Part(dataclasses.replace(OPAQUE, storage="|u1", dtype="float32"), np.full(3, 255, "|u1")))
    assert finite(Part(brain, np.zeros((0, 4), "<u2")))
    last = np.zeros(300_000, "<u2")
    last[-1] = 0xFF80
    assert not finite(Part(brain, last.reshape(3, -1)))
    assert finite(Part(dataclasses.replace(OPAQUE, storage="<u2", dtype="uint16"), np.array([0x7F80], dtype="<u2")))


def test_fields_that_a_later_writer_adds_are_ignored() -> None:
    record = point()
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(record.header))
    plain["colour"] = {"any": ["thing"]}
    plain["tensors"][0]["colour"] = 1
    head, _ = read(forged(msgspec.msgpack.encode(plain), b"".join(record.payload)))
    assert head == record.header
