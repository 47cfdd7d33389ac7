"""From slot files to states and back: every cut, restore points, streams, media, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_slots import SHAPES, Shape, data, slot
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarm.adapters.llama import codec, slot_file
from rewarm.adapters.llama.slot_parts import Checkpoint, KvSection, Media, Memory, SlotFile, Stream, UnknownLayout
from rewarm.state.sequence import Opaque, Rows, SequenceState, Window
from rewarm.testing.conformance import copy, cut, difference

DATA = Path(__file__).parent / "data"
REAL_SWA = 24
TOKENS = tuple(range(3, 23))


def states(raw: bytes | memoryview, n_swa: int = 6) -> codec.CodecState:
    return codec.to_state(slot_file.parse(memoryview(raw)), n_swa)


def built(state: SequenceState, tokens: Any, points: Any = (), n_streams: int = 1) -> bytes:
    return b"".join(codec.from_state(state, tokens, points, n_streams))


def in_order(shape: Shape) -> Shape:
    return replace(shape, shuffle=0, streams=1)


# Cuts.

ROWS_ONLY = [name for name, shape in SHAPES.items() if not shape.swa and not shape.rec]


@pytest.mark.parametrize("name", ROWS_ONLY)
def test_a_cut_state_is_the_file_of_the_shorter_conversation(name: str) -> None:
    shape = SHAPES[name]
    whole = copy(states(data(shape, TOKENS)).state)
    for k in range(1, len(TOKENS) + 1):
        assert built(cut(whole, k), TOKENS[:k]) == bytes(data(in_order(shape), TOKENS[:k]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=40), st.data(), st.sampled_from(ROWS_ONLY))
def test_any_cut_of_any_conversation(tokens: list[int], choice: st.DataObject, name: str) -> None:
    k = choice.draw(st.integers(1, len(tokens)))
    whole = states(data(SHAPES[name], tokens)).state
    assert built(cut(whole, k), tokens[:k]) == bytes(data(in_order(SHAPES[name]), tokens[:k]))


@pytest.mark.parametrize("path", sorted(DATA.glob("*.bin")), ids=lambda path: path.stem)
def test_real_files_come_back(path: Path) -> None:
    raw = path.read_bytes()
    found = states(raw, REAL_SWA)
    again = states(built(copy(found.state), found.tokens, found.points, found.n_streams), REAL_SWA)
    assert not difference(again.state, found.state)
    assert [p.n_tokens for p in again.points] == [p.n_tokens for p in found.points]
    assert not any(difference(a, b) for a, b in zip(again.points, found.points, strict=True))
    assert again.n_streams == found.n_streams
    np.testing.assert_array_equal(again.tokens, found.tokens)
    if found.state.layout().rows_only and "two-slots" not in path.stem:
        assert built(found.state, found.tokens) == raw


def test_a_file_of_the_second_slot_is_that_of_the_first_but_for_its_stream() -> None:
    found = states((DATA / "dense-second-of-two-slots.bin").read_bytes())
    assert found.n_streams == 2
    one = slot_file.parse(memoryview(built(found.state, found.tokens)))
    assert [len(s.positions) if s else 0 for s in one.memory.base.streams] == [found.state.n_tokens]
    two = slot_file.parse(memoryview(built(found.state, found.tokens, n_streams=2)))
    assert [s is None for s in two.memory.base.streams] == [False, True]
    assert not difference(states(built(found.state, found.tokens)).state, found.state)


# Names, kinds, axes.


def test_what_the_tensors_are() -> None:
    state = states(data(SHAPES["window, transposed"], TOKENS)).state
    assert sorted(state.tensors) == [
        *(f"attn.{part}.{i:03d}" for part in "kv" for i in range(2)),
        *(f"swa.{part}.{i:03d}" for part in "kv" for i in range(2)),
    ]
    assert isinstance(state.tensors["attn.k.001"], Rows)
    assert state.tensors["attn.k.001"].array.shape == (20, 32)
    assert state.tensors["attn.v.001"].array.shape == (32, 20)
    window = state.tensors["swa.v.000"]
    assert isinstance(window, Window)
    assert (window.array.shape, window.axis, window.size, window.keep) == ((32, 6), 1, 6, 0)
    assert window.dtype == "f16:v4w.rot0"
    state = states(data(SHAPES["recurrent"], TOKENS)).state
    assert isinstance(state.tensors["rec.r.001"], Opaque)
    assert state.tensors["rec.s.000"].dtype == "f32:v4w.of8"
    assert states(data(SHAPES["quantised"], TOKENS)).state.tensors["attn.v.000"].array.shape == (20, 36)


def test_the_layout_does_not_depend_on_length_slot_or_order() -> None:
    for name, shape in SHAPES.items():
        digests = {states(data(shape, TOKENS[:n])).state.layout().digest for n in (1, 6, 7, 20)}
        other = replace(shape, streams=3, shuffle=5)
        digests.add(states(data(other, TOKENS)).state.layout().digest)
        assert len(digests) == 1, name


# Restore points.

WITH_POINTS = [name for name, shape in SHAPES.items() if shape.points]


@pytest.mark.parametrize("name", WITH_POINTS)
def test_checkpoints_are_the_states_at_their_lengths(name: str) -> None:
    shape = SHAPES[name]
    found = states(data(shape, TOKENS))
    assert tuple(p.n_tokens for p in found.points) == shape.points
    for point in found.points:
        alone = states(data(replace(shape, points=()), TOKENS[: point.n_tokens])).state
        assert not difference(point, alone)


@pytest.mark.parametrize(
    ("name", "at_end", "between"),
    [
        ("window", (13, 20), (2, 8)),
        ("hybrid", (19, 19), (8, 8)),
        ("hybrid with a window", (13, 20), (8, 8)),
        ("recurrent", (19, 19), (8, 8)),
    ],
)
def test_positions_of_checkpoints_pass_the_servers_gate(
    name: str, at_end: tuple[int, int], between: tuple[int, int]
) -> None:
    """At the end: below all that the window of token 20 looks at, and going on at max(pos_min + 1, pos_max) = 20."""
    shape = SHAPES[name]
    found = states(data(shape, TOKENS))
    written = slot_file.parse(memoryview(built(found.state, found.tokens, found.points))).checkpoints
    assert written is not None
    assert [c.n_tokens for c in written] == [3, 9, 20]
    assert (written[-1].pos_min, written[-1].pos_max) == at_end
    assert (written[1].pos_min, written[1].pos_max) == between


def test_states_of_rows_alone_have_no_checkpoints() -> None:
    found = states(data(SHAPES["dense"], TOKENS))
    assert slot_file.parse(memoryview(built(found.state, found.tokens))).checkpoints is None


def test_checkpoints_of_a_draft_model_are_refused() -> None:
    whole = slot(SHAPES["window"], TOKENS)
    assert whole.checkpoints
    for part in ({"draft": b"1234"}, {"spec": b"1"}):
        drafted = tuple(replace(c, **part) for c in whole.checkpoints)
        with pytest.raises(UnknownLayout, match="draft"):
            codec.to_state(replace(whole, checkpoints=drafted), 6)


def test_checkpoints_at_the_end_or_behind_it_are_no_points() -> None:
    whole = slot(replace(SHAPES["window"], points=(3, 9, 15)), TOKENS)
    shorter = slot(SHAPES["window"], TOKENS[:15])
    found = codec.to_state(replace(shorter, checkpoints=whole.checkpoints), 6)
    assert [p.n_tokens for p in found.points] == [3, 9]
    found = codec.to_state(replace(slot(SHAPES["window"], TOKENS[:5]), checkpoints=whole.checkpoints), 6)
    assert [p.n_tokens for p in found.points] == [3]


# What does not fit.


def test_a_window_is_what_the_model_says() -> None:
    raw = data(SHAPES["window"], TOKENS)
    assert states(raw, 0).state.tensors["swa.k.000"].size == 6  # longer than the window: the file tells it
    for wrong in (5, 7, 20):
        with pytest.raises(UnknownLayout, match="window"):
            states(raw, wrong)
    short = data(SHAPES["window"], TOKENS[:6])
    with pytest.raises(UnknownLayout, match="nothing says"):
        states(short, 0)
    # Chunked attention holds what is left of a chunk: no standard window.
    with pytest.raises(UnknownLayout, match="window"):
        states(data(replace(SHAPES["window"], n_swa=3), TOKENS), 6)


def moved(positions: Any, shape: Shape = SHAPES["dense"], n: int = 20) -> SlotFile:
    whole = slot(shape, TOKENS[:n])
    assert whole.memory.base
    stream = whole.memory.base.streams[0]
    assert stream
    base = KvSection((replace(stream, positions=np.array(positions, np.int32)),))
    return replace(whole, memory=replace(whole.memory, base=base))


@pytest.mark.parametrize(
    "positions",
    [range(1, 21), [*range(19), 20], [0, *range(19)], [*range(10), *range(9, 19)], [-1, *range(1, 20)]],
    ids=["shifted", "gap", "twice at 0", "twice", "negative"],
)
def test_cells_that_are_not_the_tokens_positions_are_refused(positions: Any) -> None:
    for axes in (False, True):
        with pytest.raises(UnknownLayout):
            codec.to_state(moved(positions, replace(SHAPES["dense"], axes=axes)))


def test_fewer_or_more_cells_than_tokens_are_refused() -> None:
    whole = slot(SHAPES["dense"], TOKENS)
    for ids in (TOKENS[:-1], (*TOKENS, 5)):
        with pytest.raises(UnknownLayout, match="cells for"):
            codec.to_state(replace(whole, tokens=np.array(ids, np.int32)))


def test_two_sequences_in_one_file_are_refused() -> None:
    whole = slot(SHAPES["dense"], TOKENS)
    stream = whole.memory.base.streams[0]
    mixed = replace(stream, seq_ids=np.array([0] * 10 + [1] * 10, np.int32))
    for streams in ((stream, stream), (mixed,), (None,)):
        with pytest.raises(UnknownLayout, match="sequence"):
            codec.to_state(replace(whole, memory=Memory(KvSection(streams))))


def test_a_recurrent_state_after_another_token_is_refused() -> None:
    whole = slot(SHAPES["recurrent"], TOKENS)
    section = replace(whole.memory.recurrent, positions=np.array([18], np.int32))
    with pytest.raises(UnknownLayout, match="recurrent"):
        codec.to_state(replace(whole, memory=Memory(recurrent=section)))


def test_states_of_others_are_not_written() -> None:
    state = states(data(SHAPES["hybrid"], TOKENS)).state
    for wrong in (
        SequenceState(20, {"layers.000.keys": Rows(np.zeros((20, 4), np.float16), 0)}),
        SequenceState(20, {}),
        replace(state, tensors={**state.tensors, "x": Opaque(np.zeros(1))}),
        replace(state, tensors={k: v for k, v in state.tensors.items() if k != "attn.k.000"}),
        replace(state, tensors={k: v for k, v in state.tensors.items() if not k.startswith("rec.r")}),
        replace(state, tensors={**state.tensors, "attn.k.000": replace(state.tensors["attn.k.000"], dtype="f16")}),
        replace(state, tensors={**state.tensors, "attn.k.000": replace(state.tensors["attn.k.000"], dtype="f16:v3")}),
        replace(
            state, tensors={**state.tensors, "attn.k.000": replace(state.tensors["attn.k.000"], dtype="x9:v4w.rot0")}
        ),
    ):
        with pytest.raises(UnknownLayout):
            codec.from_state(wrong, TOKENS)
    for tokens in (TOKENS[:-1], (*TOKENS[:-1], 2**31), (*TOKENS[:-1], -5)):
        with pytest.raises(UnknownLayout):
            codec.from_state(state, tokens)


# Media.

IMAGE, SOUND = b"an image of 3 by 2", b"a sound"


def with_media(*runs: tuple[int, int, bytes], shared: bool, n: int = 20, after: int = 3) -> SlotFile:
    """Tokens of which `runs` (start, end, chunk) are media: at one shared position each, or counted one by one."""
    tokens, media = np.array(TOKENS[:n], np.int32), []
    positions, x = np.arange(n, dtype=np.int32), np.arange(n, dtype=np.int32)
    y = x.copy()
    for start, end, chunk in runs:
        tokens[start:end] = -1
        media.append(Media(start, chunk))
        if shared:
            at = positions[start]
            positions[start:end] = at
            x[start:end], y[start:end] = at + np.arange(end - start) % 3, at + np.arange(end - start) // 3
            positions[end:] = at + after + np.arange(n - end)
    whole = slot(replace(SHAPES["dense"], axes=shared), TOKENS[:n])
    stream = whole.memory.base.streams[0]
    extended = np.stack([x, y, np.maximum(tokens, 0)], axis=1) if shared else None
    base = KvSection((replace(stream, positions=positions, extended=extended),))
    return replace(whole, tokens=tokens, media=tuple(media), memory=Memory(base))


def shuffled(whole: SlotFile) -> SlotFile:
    stream = whole.memory.base.streams[0]
    order = np.random.default_rng(4).permutation(len(stream.positions))

    def moved_plane(plane: Any) -> Any:
        rows = np.frombuffer(plane.data, np.uint8).reshape(len(order), -1)[order]
        return replace(plane, data=np.ascontiguousarray(rows).tobytes())

    mixed: Stream = replace(
        stream,
        positions=stream.positions[order],
        extended=None if stream.extended is None else stream.extended[order],
        keys=tuple(moved_plane(p) for p in stream.keys),
        values=tuple(moved_plane(p) for p in stream.values),
    )
    return replace(whole, memory=Memory(KvSection((mixed,))))


@pytest.mark.parametrize("shared", [False, True])
def test_media_come_back_in_any_order_of_cells(shared: bool) -> None:
    whole = with_media((4, 10, IMAGE), (12, 18, SOUND), shared=shared)
    raw = b"".join(slot_file.write(whole))
    for source in (slot_file.parse(memoryview(raw)), shuffled(whole)):
        found = codec.to_state(source)
        assert (found.tokens < 0).tolist() == (whole.tokens < 0).tolist()
        assert built(copy(found.state), found.tokens) == raw


def test_tokens_of_media_name_their_content() -> None:
    def tokens(*runs: tuple[int, int, bytes]) -> list[int]:
        return codec.to_state(with_media(*runs, shared=False)).tokens.tolist()

    one = tokens((4, 10, IMAGE))
    assert one == tokens((4, 10, IMAGE))
    assert len(set(one)) == 20
    assert one[4:10] == tokens((4, 10, IMAGE), (12, 18, SOUND))[4:10]
    assert not set(one[4:10]) & set(tokens((4, 10, SOUND))[4:10])
    assert min(one) >= -(2**63)


def test_two_images_may_follow_each_other() -> None:
    whole = with_media((4, 10, IMAGE), (10, 16, IMAGE), shared=True)
    raw = b"".join(slot_file.write(whole))
    found = states(raw)
    assert found.tokens[4:10].tolist() == found.tokens[10:16].tolist()
    assert built(found.state, found.tokens) == raw


def test_a_state_without_its_media_is_not_written() -> None:
    """A state that was cut has no `meta`: before the image it is text, behind it the chunk is missing."""
    found = codec.to_state(with_media((4, 10, IMAGE), shared=False))
    assert built(cut(found.state, 4), found.tokens[:4]) == bytes(data(SHAPES["dense"], TOKENS[:4]))
    with pytest.raises(UnknownLayout, match="media"):
        codec.from_state(cut(found.state, 12), found.tokens[:12])
    with pytest.raises(UnknownLayout, match="media"):
        codec.from_state(replace(found.state, meta={"media.4": "not base64!"}), found.tokens)


def test_text_behind_an_image_stands_at_a_possible_position() -> None:
    for after in (1, 6):
        codec.to_state(with_media((4, 10, IMAGE), shared=True, after=after))
    for after in (0, 7):
        with pytest.raises(UnknownLayout):
            codec.to_state(with_media((4, 10, IMAGE), shared=True, after=after))


def test_media_chunks_must_fit_the_token_list() -> None:
    whole = with_media((4, 10, IMAGE), shared=False)
    for media in ((), (Media(5, IMAGE),), (Media(4, IMAGE), Media(11, IMAGE)), (Media(99, IMAGE),)):
        raw = b"".join(slot_file.write(replace(whole, media=media)))
        with pytest.raises(UnknownLayout, match="media"):
            slot_file.parse(memoryview(raw))


# The fallback.


def test_an_unknown_file_is_kept_whole() -> None:
    raw = bytes(data(SHAPES["dense"], TOKENS)) + b"another sub-cache"
    state = codec.opaque_state(memoryview(raw), 20)
    assert state.layout().digest == codec.opaque_state(memoryview(raw[:50]), 7).layout().digest
    assert not state.layout().rows_only
    whole = codec.whole_file(copy(state))
    assert whole is not None
    assert bytes(whole) == raw
    assert codec.whole_file(states(data(SHAPES["dense"], TOKENS)).state) is None


def test_a_checkpoint_is_of_its_states_layout() -> None:
    whole = slot(SHAPES["window"], TOKENS)
    other = slot(replace(SHAPES["window"], swa=2), TOKENS)
    with pytest.raises(UnknownLayout, match="another layout"):
        codec.to_state(replace(whole, checkpoints=other.checkpoints), 6)
    strange = Checkpoint(9, 0, 8, b"\0" * 40)
    with pytest.raises(UnknownLayout):
        codec.to_state(replace(whole, checkpoints=(strange,)), 6)
