"""The parser: every byte of real files, and nothing but `UnknownLayout` for whatever is wrong."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_slots import SHAPES, data
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarm.adapters.llama import codec, slot_file
from rewarm.adapters.llama.slot_parts import KvSection, Plane, SlotFile, UnknownLayout

DATA = Path(__file__).parent / "data"
REAL = {path.stem: path.read_bytes() for path in sorted(DATA.glob("*.bin"))}
"""Files that llama-server b11549 wrote for the models of `tiny_ggufs`."""

FAKE = {name: bytes(data(shape, range(3, 15))) for name, shape in SHAPES.items()}
ALL = {**REAL, **FAKE}
N_SWA = {name: SHAPES[name].n_swa for name in FAKE} | dict.fromkeys(REAL, 24)

REFUSED = "refused"


def read(name: str, raw: bytes) -> SlotFile | str:
    """The file taken apart down to its states, as before a save; or that it was refused."""
    try:
        slot = slot_file.parse(memoryview(raw))
        if len(slot.tokens):
            codec.to_state(slot, N_SWA[name])
    except UnknownLayout:
        return REFUSED
    return slot


def planes(slot: SlotFile) -> list[Plane]:
    found: list[Plane] = []
    memories = [
        slot.memory,
        *(slot_file.parse_partial(memoryview(c.target), slot.version) for c in slot.checkpoints or ()),
    ]
    for memory in memories:
        for section in (memory.base, memory.swa):
            if section is not None:
                found += [p for s in section.streams if s is not None for p in (*s.keys, *s.values)]
        if memory.recurrent is not None:
            found += [*memory.recurrent.r, *memory.recurrent.s]
    return found


def essence(slot: SlotFile) -> Any:
    """What decides which row goes where: all lengths and positions, but no token, no type's name, no row's bits."""
    shapes = [(p.row_nbytes, p.n_columns, len(p.data)) for p in planes(slot)]
    positions: list[Any] = []
    for section in (slot.memory.base, slot.memory.swa):
        if isinstance(section, KvSection):
            positions += [None if s is None else s.positions.tolist() for s in section.streams]
    checkpoints = [c.n_tokens for c in slot.checkpoints or ()]
    # Versions 2 and 3 have one structure.
    return len(slot.tokens), slot.version > 3, slot.wrapped, shapes, positions, checkpoints


def row_bytes(raw: bytes) -> np.ndarray[Any, Any]:
    """Which bytes of a file lie in rows."""
    start = np.frombuffer(raw, np.uint8).ctypes.data
    inside = np.zeros(len(raw), bool)
    for plane in planes(slot_file.parse(memoryview(raw))):
        if len(plane.data):
            at = np.frombuffer(plane.data, np.uint8).ctypes.data - start
            inside[at : at + len(plane.data)] = True
    return inside


def test_there_are_real_files() -> None:
    assert len(REAL) == 10
    assert sum(len(raw) for raw in REAL.values()) < 100 * 1024


@pytest.mark.parametrize("name", ALL)
def test_what_is_written_again_is_the_same_file(name: str) -> None:
    raw = ALL[name]
    assert b"".join(slot_file.write(slot_file.parse(memoryview(raw)))) == raw


@pytest.mark.parametrize("name", ALL)
def test_the_token_list_can_be_read_alone(name: str) -> None:
    raw = ALL[name]
    tokens = slot_file.parse(memoryview(raw)).tokens
    cut_behind = 12 + 4 * struct.unpack_from("<I", raw, 8)[0]
    np.testing.assert_array_equal(slot_file.parse_tokens(memoryview(raw[:cut_behind])), tokens)


@pytest.mark.parametrize("name", ALL)
def test_no_part_of_a_file_is_a_file(name: str) -> None:
    raw = ALL[name]
    lengths = {len(raw) * i // 16 for i in range(16)} | {len(raw) - 1} | set(range(120))
    assert all(read(name, raw[:n]) == REFUSED for n in lengths if n < len(raw) and not _whole_without_appendix(raw, n))


def _whole_without_appendix(raw: bytes, n: int) -> bool:
    """Cut exactly where the checkpoints begin, a file is one of a server without checkpoints."""
    return raw[n : n + 12] == struct.pack("<II", 0x504B4353, 1) + raw[n + 8 : n + 12]


@pytest.mark.parametrize("name", ALL)
def test_more_behind_the_end_is_refused(name: str) -> None:
    for more in (b"\0", b"\0" * 12, b"SCKP", ALL[name][:40]):
        assert read(name, ALL[name] + more) == REFUSED


@pytest.mark.parametrize("n_bits", [2, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [*FAKE, "dense-q8_0-q4_0", "dense-second-of-two-slots"])
def test_a_flipped_bit_in_the_structure_never_moves_a_row(name: str, n_bits: int) -> None:
    """Refused, or a change in what no length hangs on: a token, a type of the same width, a rotation."""
    raw = ALL[name]
    want = essence(slot_file.parse(memoryview(raw)))
    n_refused = 0
    for at in np.flatnonzero(~row_bytes(raw)).tolist():
        for bit in ((3 * at + i * 8 // n_bits) % 8 for i in range(n_bits)):
            flipped = bytearray(raw)
            flipped[at] ^= 1 << bit
            slot = read(name, bytes(flipped))
            if isinstance(slot, str):
                n_refused += 1
            else:
                assert essence(slot) == want, f"bit {bit} of byte {at}"
    assert n_refused > 25 * n_bits


ABSURD = st.sampled_from([0, 1, 2, 255, 256, 257, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1])


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    name = draw(st.sampled_from(sorted(ALL)))
    raw = bytearray(ALL[name])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw) - 1)) if draw(st.booleans()) else draw(st.integers(0, min(400, len(raw) - 1)))
        match draw(st.sampled_from(["flip", "number", "cut", "remove", "insert", "copy"])):
            case "flip":
                raw[at] ^= 1 << draw(st.integers(0, 7))
            case "number":
                raw[at : at + 4] = struct.pack("<I", draw(ABSURD))
            case "cut":
                del raw[max(1, at) :]
            case "remove":
                del raw[at : at + draw(st.integers(1, 40))]
            case "insert":
                raw[at:at] = draw(st.binary(min_size=1, max_size=40))
            case "copy":
                raw[at:at] = raw[at : at + draw(st.integers(1, 200))]
        if not raw:
            break
    return name, bytes(raw)


@settings(max_examples=400, deadline=None)
@given(damaged())
def test_damage_is_refused_or_harmless_and_costs_no_memory(case: tuple[str, bytes]) -> None:
    name, raw = case
    tracemalloc.start()
    try:
        slot = read(name, raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    if isinstance(slot, SlotFile):
        assert b"".join(slot_file.write(slot)) == raw


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([3, 4]))
def test_noise_is_refused(noise: bytes, version: int) -> None:
    for head in (b"", struct.pack("<III", slot_file.FILE_MAGIC, version, 0)):
        slot = read("dense", head + noise)
        if isinstance(slot, SlotFile):
            assert b"".join(slot_file.write(slot)) == head + noise


@pytest.mark.parametrize("version", [0, 1, 5, 2**31])
def test_other_versions_are_refused(version: int) -> None:
    raw = bytearray(FAKE["dense"])
    raw[4:8] = struct.pack("<I", version)
    with pytest.raises(UnknownLayout, match="version"):
        slot_file.parse(memoryview(raw))


def test_another_sub_cache_behind_the_known_ones_is_refused() -> None:
    """Sparse attention: an indexer's cache, keys only, follows the recurrent section."""
    hybrid = bytes(data(SHAPES["hybrid"], range(3, 15)))
    without = hybrid[: hybrid.index(b"SCKP")]
    raw = bytes(data(SHAPES["no values"], range(3, 15)))
    indexer = raw[12 + 4 * struct.unpack_from("<I", raw, 8)[0] :]
    assert isinstance(read("hybrid", without), SlotFile)
    assert read("hybrid", without + indexer) == REFUSED


def test_a_second_row_of_recurrent_states_is_refused() -> None:
    """Some models keep a history beside each R: a row with a size but no type."""
    raw = FAKE["recurrent"]
    raw = raw[: raw.index(b"SCKP")]
    first_r = raw.index(struct.pack("<iQ", 0, 64)) + 12 + 64
    assert read("recurrent", raw[:first_r] + struct.pack("<Q", 16) + bytes(16) + raw[first_r:]) == REFUSED


def test_a_file_that_can_be_read_in_two_ways_is_refused() -> None:
    """The values of 40 cells whose bytes are, together with their header, a window section of two cells."""
    n, row = 40, 2
    cells = np.stack([np.arange(n), np.ones(n), np.zeros(n)], axis=1).astype("<i4").tobytes()
    keys = struct.pack("<iQ", 1, row) + bytes(n * row)
    window = struct.pack("<IIiIi", 1, 0, 1, 1, 0) + struct.pack("<II", 0, 1) + struct.pack("<iQ", 1, 20) + bytes(40)
    values = struct.pack("<iQ", 1, row) + window
    assert len(values) == 12 + n * row
    head = struct.pack("<III", slot_file.FILE_MAGIC, 3, n) + np.arange(3, 3 + n, dtype="<i4").tobytes()
    base = struct.pack("<II", 1, n) + cells + struct.pack("<II", 0, 1) + keys
    with pytest.raises(UnknownLayout, match="more than one way"):
        slot_file.parse(memoryview(head + base + values))
    other = bytearray(values)
    other[12] = 2  # no cell of one sequence any more: values and nothing else
    assert len(slot_file.parse(memoryview(head + base + bytes(other))).memory.base.streams) == 1
