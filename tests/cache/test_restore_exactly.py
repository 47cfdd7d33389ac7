"""What is saved comes back bit for bit, at every length, in every layout: through the public face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rewarm
from rewarm.cache.policy import Policy
from rewarm.state.layout import Kind
from rewarm.state.reason import Reason
from rewarm.state.sequence import Opaque, Rows, SequenceState
from rewarm.testing.driver import Driver, header_of, holes, on_disk
from rewarm.testing.fake_engine import FakeEngine, Layer, latent, pair, recurrent, triple, window

KINDS: dict[str, tuple[Layer, ...]] = {
    "pair": (pair(), pair(axis=2, dtype="float16")),
    "latent": (latent(), latent(axis=1)),
    "triple": (triple(), triple(1, 3)),
    "window": (pair(), window(6, 0)),
    "sinks": (window(7, 2), window(3, 1, dtype="bfloat16"), window(1)),
    "hybrid": (pair(), recurrent(), window(5), latent()),
    "recurrent": (recurrent(),),
    # Rows long enough to be read straight to where they belong.
    "long": (pair(width=512), latent(2048)),
    "long_hybrid": (pair(width=512), window(6, 1, width=512), recurrent((64, 64))),
}
ROWS_ONLY = ("pair", "latent", "triple", "long")


@pytest.fixture(params=KINDS)
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=KINDS[request.param]))
    yield driver
    driver.assert_in_order()
    driver.close()


def test_b012_b089_a_state_comes_back_at_its_own_length(driver: Driver) -> None:
    for n in (1, 2, 3, 4, 5, 8, 9, 17):
        tokens = list(range(n * 100, n * 100 + n))
        driver.save(tokens)
    driver.flush()
    for n in (1, 2, 3, 4, 5, 8, 9, 17):
        tokens = list(range(n * 100, n * 100 + n))
        state = driver.restore([*tokens, 7])
        assert state.n_tokens == n
        # The meta of a point comes with it.
        driver.engine.check(state, tokens, exact=True)


def test_b118_what_was_saved_is_there_in_the_next_process(driver: Driver) -> None:
    driver.save(range(11))
    driver.reopen()
    assert driver.restore(range(20)).n_tokens == 11


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", range(1, 9))
def test_cuts_at_every_offset_around_block_edges(tmp_path: Path, kind: str, size: int) -> None:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=KINDS[kind]), block_tokens=size)
    tokens = list(range(50, 50 + 2 * size + 3))
    for n in sorted({1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, len(tokens)} - {0}):
        driver.save(tokens[:n])
    driver.flush()
    for cut in range(len(tokens) + 1):
        driver.restore(tokens, at_most=cut)
        driver.restore([*tokens[:cut], 1, 2, 3])
    driver.assert_in_order()
    driver.reopen()
    for cut in range(len(tokens) + 1):
        driver.restore([*tokens[:cut], 1, 2, 3])
    driver.close()


def test_b006_b007_one_token_is_left_to_evaluate(driver: Driver) -> None:
    for tokens in ([1], [1, 2], [1, 2, 3], [1, 2, 3, 4], list(range(8))):
        driver.save(tokens)
        driver.flush()
        match = driver.namespace().find(tokens)
        assert match.n_tokens <= len(tokens) - 1


def test_b037_an_exact_repeat_is_never_given_whole(driver: Driver) -> None:
    tokens = list(range(9))
    driver.save(tokens)
    driver.flush()
    assert driver.restore(tokens).n_tokens < 9
    assert driver.restore([*tokens, 1]).n_tokens == 9


def test_b035_a_repeat_with_one_token_more_hits_on_every_layout(driver: Driver) -> None:
    for n in range(1, 12):
        driver.save(range(n))
        driver.flush()
        assert driver.restore(range(n + 1)).n_tokens == n


def test_restore_then_extend_gives_the_uninterrupted_state(driver: Driver) -> None:
    tokens = list(range(30))
    for start, end in ((5, 9), (8, 16), (16, 17), (17, 30)):
        driver.save(tokens[:start])
        driver.flush()
        state = driver.restore(tokens[:end])
        extended = driver.engine.extend(state, tokens[:end])
        driver.engine.check(extended, tokens[:end], exact=True)
        driver.namespace().save(tokens[:end], extended)
        driver.perfect.save((0, b""), tokens[:end], extended)
        driver.flush()
        assert driver.restore([*tokens[:end], 1]).n_tokens == end


def test_b003_a_borrower_that_writes_harms_nobody(driver: Driver) -> None:
    tokens = list(range(10))
    driver.save(tokens)
    driver.flush()
    state = driver.restore([*tokens, 1])
    for tensor in state.tensors.values():
        tensor.array.view(np.uint8)[...] = 0xAB
    driver.restore([*tokens, 1])


def test_nothing_handed_in_is_kept(driver: Driver) -> None:
    """The engine goes on writing into its arrays as soon as save has returned."""
    tokens = list(range(10))
    state = driver.engine.state(tokens)
    own = {
        name: type(t)(**{f: getattr(t, f) for f in t.__dataclass_fields__} | {"array": np.array(t.array, order="C")})
        for name, t in state.tensors.items()
    }
    meta = dict(state.meta)
    driver.namespace().save(tokens, SequenceState(10, own, meta))
    driver.perfect.save((0, b""), tokens, state)
    for tensor in own.values():
        tensor.array.view(np.uint8)[...] = 0
    own.clear()
    meta["offset"] = 4711
    tokens[0] = 99
    driver.flush()
    restored = driver.restore([*range(10), 1])
    driver.engine.check(restored, range(10), exact=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [3, 4, 11, 12])
def test_into_fills_buffers_whose_token_axis_is_longer(tmp_path: Path, kind: str, n: int) -> None:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=KINDS[kind]))
    for end in (n // 2, n):
        driver.save(range(end))
    driver.flush()
    buffers, into = engine_buffers(driver.engine.state(range(n)))
    state = driver.namespace().restore(driver.namespace().find([*range(n), 1]), into=into)
    assert state.n_tokens == n
    driver.engine.check(cut_to_length(state, driver.engine.state(range(n)), buffers), range(n), exact=True)
    driver.close()


@pytest.mark.parametrize("kind", KINDS)
def test_damage_in_the_middle_leaves_what_lies_before_it_right(tmp_path: Path, kind: str) -> None:
    """Rows of records behind the damage may be in their place already when it is found."""
    driver = Driver(tmp_path / "kv", FakeEngine(layers=KINDS[kind]))
    for end in (7, 22):
        driver.save(range(end))
    driver.flush()
    bad = next(path for path in on_disk(driver.root).records if header_of(path).n == 12)
    data = bytearray(bad.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    buffers, into = engine_buffers(driver.engine.state(range(22)))
    state = driver.namespace().restore(driver.namespace().find([*range(22), 1]), into=into)
    assert state.reason is Reason.CORRUPT
    assert state.n_tokens == (8 if kind in ROWS_ONLY else 7)
    expected = driver.engine.state(range(state.n_tokens))
    driver.engine.check(cut_to_length(state, expected, buffers), range(state.n_tokens))
    driver.close()


@pytest.mark.parametrize("fault", ["element type", "too short", "read only", "another shape"])
def test_a_buffer_that_does_not_fit_is_a_wrong_call(tmp_path: Path, fault: str) -> None:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=KINDS["long"]))
    driver.save(range(11))
    driver.flush()

    def into(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        made = np.empty(shape, dtype)
        if fault == "element type":
            return made.view(f"<i{made.itemsize}")
        if fault == "read only":
            made.flags.writeable = False
        return {"too short": made[..., :3], "another shape": made[None]}.get(fault, made)

    namespace = driver.namespace()
    with pytest.raises(ValueError, match="buffer"):
        namespace.restore(namespace.find(range(12)), into=into)
    assert driver.restore(range(12)).n_tokens == 11
    driver.close()


def engine_buffers(
    expected: SequenceState,
) -> tuple[dict[str, np.ndarray], Callable[[str, tuple[int, ...], np.dtype], np.ndarray]]:
    """Buffers as an engine has them, longer than what is asked and never fresh, by name; what makes them."""
    specs = expected.layout().by_name
    buffers: dict[str, np.ndarray] = {}

    def into(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        longer = [*shape]
        if specs[name].kind is not Kind.OPAQUE:
            longer[specs[name].axis] += 5
        buffers[name] = np.full(longer, 7, dtype=dtype)
        return buffers[name]

    return buffers, into


def cut_to_length(state: SequenceState, expected: SequenceState, buffers: dict[str, np.ndarray]) -> SequenceState:
    """`state` with its arrays cut to the rows that it has; what lies behind them must be untouched."""
    cut = {}
    for name, tensor in state.tensors.items():
        assert tensor.array is buffers[name]
        if isinstance(tensor, Opaque):
            cut[name] = tensor
            continue
        n_rows = expected.tensors[name].array.shape[tensor.axis]
        lead = (slice(None),) * tensor.axis
        assert (tensor.array[(*lead, slice(n_rows, None))] == 7).all()
        cut[name] = replace(tensor, array=np.ascontiguousarray(tensor.array[(*lead, slice(0, n_rows))]))
    return replace(state, tensors=cut)


def test_big_endian_and_strided_arrays_are_taken(tmp_path: Path) -> None:
    cache = rewarm.open(tmp_path / "kv", block_tokens=4)
    ns = cache.namespace(rewarm.Identity({"a": 1}))
    big = np.arange(60, dtype=">f4").reshape(10, 6)[::2, ::-1]
    ns.save(range(5), SequenceState(5, {"x": Rows(big, 0)}))
    assert cache.flush()
    state = ns.restore(ns.find(range(6)))
    np.testing.assert_array_equal(state.tensors["x"].array, big)
    assert state.tensors["x"].array.dtype == np.dtype("<f4")
    cache.close()


@pytest.mark.parametrize("n", [4, 5, 6, 11])
def test_b018_kv_that_is_quantised_from_a_length_on(tmp_path: Path, n: int) -> None:
    """Two layouts under one identity: chains of their own, no mixed state, nothing below the start."""
    driver = Driver(tmp_path / "kv", FakeEngine(layers=(pair(),), quantise_from=5, quantised=(triple(),)))
    for end in (2, 4, 7, 12):
        driver.save(range(end))
    driver.flush()
    for prompt in ([*range(n), 99], range(n), [*range(3), 99]):
        driver.restore(list(prompt))
    driver.reopen()
    assert driver.restore([*range(12), 99]).n_tokens == 12
    assert driver.restore([*range(6), 99]).n_tokens == 6
    assert driver.restore([*range(5), 99]).n_tokens == 5
    # Below the start there is only what was saved in the other layout.
    assert driver.restore([*range(5)]).n_tokens == 4
    assert driver.restore([*range(4)]).n_tokens == 3
    driver.assert_in_order()
    driver.close()


def test_b015_b071_nothing_is_shared_between_models_and_tenants(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv")
    tokens = list(range(9))
    owners = [(0, b""), (1, b""), (0, b"a"), (0, b"b"), (1, b"a")]
    for i, owner in enumerate(owners):
        assert driver.restore([*tokens, 1], owner=owner).n_tokens == 0
        driver.save(tokens[: 4 + i], owner=owner)
        driver.flush()
        for j, other in enumerate(owners):
            n = driver.restore([*tokens, 1], owner=other).n_tokens
            assert n == (4 + j if j <= i else 0)
    assert b"tenant-name" not in b"".join(path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file())
    driver.close()


def test_tenants_are_written_nowhere(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv")
    driver.save(range(9), owner=(0, b"a tenant's name"))
    driver.reopen()
    driver.close()
    for path in (tmp_path / "kv").rglob("*"):
        if path.is_file():
            assert b"a tenant's name" not in path.read_bytes()


def test_a_shared_prefix_is_on_disk_once(driver: Driver) -> None:
    system = list(range(20))
    driver.save(system, "system")
    driver.flush()
    before = {path.name for path in on_disk(driver.root).records if path.suffix == ".block"}
    assert len(before) == 5
    for i in range(4):
        driver.save([*system, 100 + i, 1, 2])
    driver.flush()
    after = [path.name for path in on_disk(driver.root).records if path.suffix == ".block"]
    assert set(after) == before


def test_b112_a_turn_writes_its_new_tokens_only(tmp_path: Path) -> None:
    """Thirty turns write at most the blocks once and one point a turn, of rows alone."""
    driver = Driver(tmp_path / "kv", FakeEngine(layers=(pair(),)), block_tokens=8)
    tokens: list[int] = []
    for turn in range(30):
        tokens += range(turn * 1000, turn * 1000 + 10)
        written = driver.cache.stats()["bytes_written"]
        driver.save(tokens)
        driver.flush()
        new = driver.cache.stats()["bytes_written"] - written  # type: ignore[operator]
        # At most two new blocks and a tail; each is its header's page and some rows.
        assert new <= 3 * (4096 + 8 * 64)
    assert driver.restore([*tokens, 1]).n_tokens == 300
    # Of rows alone, only the last point stays: 37 blocks and the tail.
    assert on_disk(driver.root).n_files == 38
    driver.close()


@pytest.mark.parametrize("kind", ["rows", "window", "hybrid"])
def test_b112_thirty_turns_write_little_more_than_their_final_size(tmp_path: Path, kind: str) -> None:
    """Rows alone: 1.05 times the final size and a block a turn. Other layouts: the bytes of each restore point too."""
    wide = tuple(replace(part, shape=(4, 64)) for part in pair())
    layers = {"rows": (wide,), "window": (wide, window(96, 4, 64)), "hybrid": (wide, recurrent((64, 64)))}[kind]
    driver = Driver(tmp_path / "kv", FakeEngine(layers=layers), block_tokens=64, policy=Policy())
    tokens: list[int] = []
    points = 0
    for turn in range(30):
        tokens += range(turn * 1000, turn * 1000 + 150)
        driver.save(tokens)
        driver.flush()
        if kind != "rows":
            points += max(path.stat().st_size for path in on_disk(driver.root).records if path.suffix == ".point")
    written, final = driver.cache.stats()["bytes_written"], sum(p.stat().st_size for p in on_disk(driver.root).records)
    a_block = max(path.stat().st_size for path in on_disk(driver.root).records if path.suffix == ".block")
    assert isinstance(written, int)
    assert final <= written <= 1.05 * final + 30 * a_block + points
    driver.close()


def test_a_tensor_that_comes_and_goes_has_chains_of_its_own(tmp_path: Path) -> None:
    """A draft model that is loaded for some turns: each kind of state is restored whole, never a mixture."""
    alone, both = FakeEngine(layers=(pair(),)), FakeEngine(layers=(pair(), pair(1, 2)))
    driver = Driver(tmp_path / "kv", lossy=True)
    space = driver.namespace()
    longest: dict[int, tuple[FakeEngine, int]] = {}
    for turn, engine in enumerate([alone, both, both, alone, both]):
        tokens = range(7 * (turn + 1))
        assert space.save(tokens, engine.state(tokens)).wait(20)
        driver.flush()
        longest[len(engine.layers)] = (engine, len(tokens))
    state = space.restore(space.find(range(36)))
    assert state.n_tokens == 35
    both.check(state, range(36))
    match = space.find(range(36), at_most=28)
    state = space.restore(match)
    (alone if len(state.tensors) == 2 else both).check(state, range(36))
    assert state.n_tokens == 28
    driver.close()


def test_saving_what_is_there_writes_nothing(driver: Driver) -> None:
    driver.save(range(10))
    driver.flush()
    written, files = driver.cache.stats()["bytes_written"], on_disk(driver.root)
    for _ in range(3):
        report = driver.save(range(10))
        driver.flush()
        assert report.queued and report.done and report.reason is None
    assert driver.cache.stats()["bytes_written"] == written
    assert on_disk(driver.root).records == files.records


def test_bytes_written_is_what_is_on_disk(driver: Driver) -> None:
    driver.save(range(21))
    driver.flush()
    sizes = sum(path.stat().st_size for path in on_disk(driver.root).records)
    assert driver.cache.stats()["bytes_written"] == sizes


def test_window_points_follow_one_another(tmp_path: Path) -> None:
    """Points closer than a window: each is restorable, whatever runs it was written with."""
    driver = Driver(tmp_path / "kv", FakeEngine(layers=(window(8, 2), window(5), pair())))
    for n in range(1, 24):
        driver.save(range(n))
        driver.flush()
    for n in range(1, 24):
        assert driver.restore([*range(n), 99]).n_tokens == n
    assert holes(driver.root) == []
    driver.close()


def test_every_record_says_where_it_belongs(driver: Driver) -> None:
    driver.save(range(10), "system", "a label")
    driver.flush()
    headers = [header_of(path) for path in on_disk(driver.root).records]
    point = next(h for h in headers if h.kind == "point")
    assert (point.label, point.boundary, point.n) == ("a label", "system", 10)
    assert len(point.entry) == 16
    assert point.read_layout() == driver.engine.state(range(10)).layout()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(list(KINDS)),
    st.integers(1, 8),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=6),
    st.lists(st.lists(st.integers(0, 2), max_size=16), min_size=1, max_size=6),
)
def test_any_conversations_are_found_as_the_perfect_model_finds_them(
    tmp_path_factory: pytest.TempPathFactory, kind: str, size: int, saved: list[list[int]], prompts: list[list[int]]
) -> None:
    driver = Driver(tmp_path_factory.mktemp("kv"), FakeEngine(layers=KINDS[kind]), block_tokens=size)
    for tokens in saved:
        driver.save(tokens)
    driver.flush()
    for prompt in [*prompts, *saved, *([*tokens, 9] for tokens in saved)]:
        driver.restore(prompt)
    driver.assert_in_order()
    driver.close()
