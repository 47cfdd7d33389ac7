"""Records of every format version that was ever written: today's code reads them, and writes the newest so.

The folders `v1`, ... hold one small file of each kind. They are never changed: a new format version adds a
folder. `docs/format.md` takes its worked example from `v1/example.point`.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

from rewarm.format.record import (
    PRELUDE,
    Encoded,
    Header,
    Part,
    encode,
    read_header,
    read_payload,
    read_prelude,
)
from rewarm.state.chain import Chain, as_tokens, root_key
from rewarm.state.layout import Kind, Layout, TensorSpec
from rewarm.state.sequence import Array, MetaValue, Opaque, Rows, SequenceState, Window
from rewarm.testing.fake_engine import FakeEngine, pair, recurrent, window

HERE = Path(__file__).parent
DOC = HERE.parents[1] / "docs" / "format.md"
FINGERPRINT, TENANT = bytes(range(32)), b""


@dataclass(frozen=True)
class Golden:
    """A record made of known things: an engine, tokens, and what its header says beside them."""

    engine: FakeEngine
    tokens: tuple[int, ...]
    block_tokens: int
    kind: str
    label: str | None = None
    meta: tuple[tuple[str, MetaValue], ...] = ()
    after: int | None = None

    def encoded(self) -> Encoded:
        """The record, put together from the engine's state without the store."""
        state = self.engine.state(self.tokens)
        layout = state.layout()
        root = root_key(self.block_tokens, FINGERPRINT, layout.digest, TENANT)
        chain = Chain(root, as_tokens(self.tokens), self.block_tokens)
        n, i = len(self.tokens), len(self.tokens) // self.block_tokens
        first = (i - 1) * self.block_tokens if self.kind == "block" else i * self.block_tokens
        common = {"fingerprint": FINGERPRINT, "layout": layout.digest, "block_tokens": self.block_tokens}
        common |= {"first": first, "tokens": chain.tokens[first:n].tobytes(), "valid_from": layout.valid_from}
        common |= {"created_s": 1_800_000_000.0}
        if self.kind == "block":
            header = Header(kind="block", key=chain.block(i - 1), parent=chain.parent(i - 1), **common)
            specs = layout.rows
        else:
            common |= {"entry": bytes(range(16)), "label": self.label, "boundary": "assistant", "meta": dict(self.meta)}
            if self.after is not None:
                common |= {"after": chain.point(self.after), "after_n": self.after}
            header = Header(kind="point", key=chain.point(n), parent=chain.parent(i), **common)
            specs = layout.tensors
        return encode(header, [Part(spec, part_of(state, spec, first, self.after or 0)) for spec in specs])


def part_of(state: SequenceState, spec: TensorSpec, first: int, after: int) -> Array:
    """What a record that begins at `first` holds of one tensor."""
    tensor = state.tensors[spec.name]
    if isinstance(tensor, Opaque):
        return np.ascontiguousarray(tensor.array)
    rows = np.moveaxis(tensor.array, tensor.axis, 0)
    if isinstance(tensor, Rows):
        rows = rows[first:]
    else:
        assert isinstance(tensor, Window)
        kept, start = spec.window_span(state.n_tokens)
        rows = np.concatenate([rows[:kept], rows[kept + max(0, after - start) :]])
    return np.ascontiguousarray(np.moveaxis(rows, 0, tensor.axis))


SMALL = FakeEngine(1, ((pair(1, 2, "float16", axis=1)[0],),))
HYBRID = FakeEngine(1, (pair(2, 2), window(5, 1, 2, "bfloat16"), recurrent((2,))))
TOKENS = (1, 2, 3, 2**40, -7, 9)

GOLDEN = {
    "example.point": Golden(SMALL, (7, 300), 4, "point", "chat 1", (("offset", 2),)),
    "rows.block": Golden(SMALL, TOKENS[:4], 4, "block"),
    "hybrid.block": Golden(HYBRID, TOKENS[:4], 2, "block"),
    "hybrid.point": Golden(
        HYBRID, TOKENS[:5], 2, "point", None, (("a", 1), ("b", "x"), ("c", None), ("d", 0.5), ("e", True))
    ),
    "hybrid-after.point": Golden(HYBRID, TOKENS, 4, "point", "Grüße", (), 4),
    "edge.point": Golden(SMALL, TOKENS[:4], 4, "point"),
    "opaque.block": Golden(FakeEngine(1, (recurrent(),)), TOKENS[:4], 4, "block"),
    "opaque.point": Golden(FakeEngine(1, (recurrent(),)), TOKENS[:5], 4, "point"),
}


def read(data: bytes) -> tuple[Header, dict[str, Array]]:
    prelude = read_prelude(data[: PRELUDE.size], len(data))
    header = read_header(data[: prelude.payload_at], prelude)
    return header, read_payload(header, memoryview(data)[prelude.payload_at :])


def file_of(record: Encoded) -> bytes:
    return record.head + b"".join(record.payload)


@pytest.mark.parametrize("name", GOLDEN)
def test_version_1_is_written_byte_for_byte(name: str) -> None:
    assert file_of(GOLDEN[name].encoded()) == (HERE / "v1" / name).read_bytes()


@pytest.mark.parametrize("name", GOLDEN)
def test_version_1_is_read(name: str) -> None:
    golden = GOLDEN[name]
    header, arrays = read((HERE / "v1" / name).read_bytes())
    wanted = golden.encoded()
    assert header == wanted.header
    assert header.kind == golden.kind == name.partition(".")[2]
    for data, array in zip(wanted.payload, arrays.values(), strict=True):
        assert array.tobytes() == bytes(data)


def test_every_golden_file_is_read_by_some_test() -> None:
    assert {path.name for path in (HERE / "v1").iterdir()} == set(GOLDEN)


def _dump() -> dict[int, bytes]:
    """The hex dump in `docs/format.md`: offset -> the line's bytes."""
    text = DOC.read_text()
    block = text.split("<!-- dump -->")[1].split("```")[1]
    lines = re.findall(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} +)+)", block, flags=re.MULTILINE)
    return {int(offset, 16): bytes.fromhex(data) for offset, data in lines}


def test_the_documents_worked_example_is_the_golden_file() -> None:
    """The dump, with zeros where it leaves lines out, is the file; so nothing in it is out of date."""
    data = bytearray(len((HERE / "v1" / "example.point").read_bytes()))
    for offset, line in _dump().items():
        data[offset : offset + len(line)] = line
    assert bytes(data) == (HERE / "v1" / "example.point").read_bytes()


def test_the_documents_worked_example_decodes_as_it_says() -> None:
    """A reader made from the document alone: struct, msgpack, XXH3, numpy, and no code of rewarm's."""
    data = bytearray((HERE / "v1" / "example.point").stat().st_size)
    for offset, line in _dump().items():
        data[offset : offset + len(line)] = line
    magic, version, header_nbytes, payload_at, nbytes, checksum = struct.unpack_from("<8sIIQQ16s", data)
    assert (magic, version) == (b"\x8frewarm\n", 1)
    assert (payload_at, nbytes) == (4096, len(data))
    assert checksum == xxhash.xxh3_128_digest(bytes(data[:32] + data[48:payload_at]))
    header = msgspec.msgpack.decode(data[48 : 48 + header_nbytes])
    text = DOC.read_text()
    table = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", text.split("<!-- decoded -->")[1], flags=re.MULTILINE)
    told = dict(table)
    shown = {key: value.hex() if isinstance(value, bytes) else str(value) for key, value in header.items()}
    assert told == {key: value for key, value in shown.items() if key != "tensors"}
    (tensor,) = header["tensors"]
    rows = np.frombuffer(data, "<f2", offset=payload_at + tensor["offset"], count=4).reshape(1, 2, 1, 2)
    assert np.frombuffer(header["tokens"], "<i8").tolist() == [7, 300]
    numbers = [float(x) for x in re.findall(r"-?\d\.\d+(?:e-?\d+)?", text.split("<!-- rows -->")[1].split("\n\n")[0])]
    np.testing.assert_array_equal(np.array(numbers, dtype="<f2"), rows.reshape(-1))


def test_the_document_names_every_field() -> None:
    text = DOC.read_text()
    header, _ = read((HERE / "v1" / "example.point").read_bytes())
    for name in (*header.__struct_fields__, *header.tensors[0].__struct_fields__):
        assert f"| `{name}` |" in text, name


def test_a_layout_of_each_kind_is_among_them() -> None:
    kinds = set()
    for golden in GOLDEN.values():
        kinds |= {spec.kind for spec in golden.engine.state(golden.tokens).layout().tensors}
    assert kinds == set(Kind)
    assert Layout(()).digest
