"""What went wrong for others, where no other test file is the place for it; named by the id of the report."""

from __future__ import annotations

import ast
import logging
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import platformdirs
import pytest

import rewarm
from rewarm.cache.prefix_cache import default_root
from rewarm.state.chain import Key
from rewarm.state.reason import Reason
from rewarm.store.evict import Need, choose
from rewarm.store.files import RecordName
from rewarm.store.index import Row
from rewarm.testing.driver import Driver, on_disk
from rewarm.testing.fake_engine import FakeEngine, Layer, pair, recurrent, window
from rewarm.testing.faults import Fault, FaultyDisk

LAYERS: dict[str, tuple[Layer, ...]] = {
    "rows": (pair(1, 2),),
    "window": (pair(1, 2), window(6, 1)),
    "hybrid": (pair(1, 2), recurrent()),
    "recurrent": (recurrent(),),
}


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    disk = FaultyDisk()
    yield disk
    disk.heal()


@pytest.fixture
def driver(tmp_path: Path, disk: FaultyDisk) -> Iterator[Driver]:
    driver = Driver(tmp_path / "kv", disk=disk, lossy=True)
    yield driver
    disk.heal()
    driver.close()


def test_b010_what_others_asked_before_changes_nothing(tmp_path: Path) -> None:
    """Whatever was saved and restored in between, a prompt's state is the one that its own tokens give."""
    driver = Driver(tmp_path / "kv", FakeEngine(layers=LAYERS["window"]), lossy=True)
    mine = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for others in ([1, 2, 3], [1, 2, 3, 4, 5, 60, 61], [9, 9, 9], mine[:7]):
        driver.save(others)
        driver.restore([*others, 1])
        driver.restore(mine)  # compares bit for bit
    driver.close()


@pytest.mark.parametrize("kind", LAYERS)
def test_b028_b030_every_turn_hits_from_the_second_on_and_repeats_write_nothing(tmp_path: Path, kind: str) -> None:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=LAYERS[kind]), lossy=True)
    tokens = [1, 2, 3, 4, 5]
    for turn in range(6):
        driver.save(tokens)
        driver.flush()
        tokens = [*tokens, 10 + turn, 11, 12]
        assert driver.restore(tokens).n_tokens == len(tokens) - 3
    driver.save(tokens)
    driver.flush()
    written = driver.cache.stats()["bytes_written"]
    for _ in range(5):
        driver.save(tokens)
        driver.flush()
        assert driver.restore([*tokens, 1]).n_tokens == len(tokens)
    assert driver.cache.stats()["bytes_written"] == written
    driver.close()


@pytest.mark.parametrize("kind", ["hybrid", "recurrent", "window"])
def test_b032_there_are_points_whatever_the_length(tmp_path: Path, kind: str) -> None:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=LAYERS[kind]), lossy=True)
    for first, n in ((100, 8), (200, 9), (300, 11)):
        driver.save(range(first, first + n))
        driver.flush()
        assert driver.restore([*range(first, first + n), 1]).n_tokens == n
    driver.close()


def test_b063_a_reader_sees_whole_records_or_none(driver: Driver, disk: FaultyDisk) -> None:
    disk.plant(Fault("write", "hang", times=1, after=2))
    driver.save(range(21))
    assert disk.hanging.wait(10)
    assert driver.namespace().find(range(22)).n_tokens == 0
    disk.heal()
    driver.flush()
    assert driver.restore(range(22)).n_tokens == 21


def test_b065_arrays_are_touched_on_the_callers_thread_only(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines evaluate their arrays on one thread: other threads see copies, as plain bytes."""
    owner = threading.get_ident()
    touched: list[int] = []

    class Owned(np.ndarray):  # type: ignore[type-arg]
        def __array_finalize__(self, _: object) -> None:
            touched.append(threading.get_ident())

        def __array_ufunc__(self, *_: object, **__: object) -> object:
            raise AssertionError("computed with")

    state = driver.engine.state(range(21))
    owned = {
        name: rewarm.Rows(tensor.array.view(Owned), tensor.axis)  # type: ignore[union-attr]
        for name, tensor in state.tensors.items()
    }
    driver.namespace().save(range(21), rewarm.SequenceState(21, owned, state.meta))
    for tensor in owned.values():
        tensor.array.view(np.ndarray)[:] = 0  # what the engine does next
    driver.flush()
    assert set(touched) == {owner}
    restored = driver.namespace().restore(driver.namespace().find(range(22)))
    driver.engine.check(restored, range(21))


def test_b073_no_code_is_ever_read_from_a_file() -> None:
    """No pickle, no eval, nowhere in the package."""
    forbidden = {"pickle", "cPickle", "dill", "shelve", "marshal", "joblib", "cloudpickle"}
    for path in Path(rewarm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile"}, path
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
            assert not forbidden.intersection(names), path


def test_b100_choosing_what_goes_is_one_ordered_pass() -> None:
    def looked_at(n: int) -> int:
        rows = [
            Row(RecordName(bytes(32), Key(i.to_bytes(32, "big")), is_point=True), Key(bytes(32)), 1, 4096, i)
            for i in range(n)
        ]
        looks = 0

        def each() -> Iterator[Row]:
            nonlocal looks
            for row in rows:
                looks += 1
                yield row

        assert len(choose(each, Need(0, n // 2), (), (), lambda _: ())) == n // 2
        return looks

    assert looked_at(20_000) <= 2.1 * looked_at(10_000)


@pytest.mark.parametrize(
    "name", ["Кириллица", "漢字 かな", "🦙 emoji", "with  spaces", "trailing.", "quote'\"%s", "a" * 240], ids=ascii
)
def test_b101_folders_of_any_name_work(tmp_path: Path, name: str) -> None:
    driver = Driver(tmp_path / name / "kv", lossy=True)
    driver.save(range(11))
    driver.flush()
    driver.reopen()
    assert driver.restore(range(12)).n_tokens == 11
    driver.cache.forget(driver.cache.entries()[0])
    assert on_disk(driver.root).n_files == 0
    driver.close()


def test_b106_the_default_folder_is_a_cache_and_says_so(driver: Driver) -> None:
    assert default_root() == Path(platformdirs.user_cache_dir("rewarm")) / "kv"
    tag = (driver.root / "CACHEDIR.TAG").read_text()
    assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55")


def test_b107_saving_and_restoring_need_little_more_than_the_state(tmp_path: Path) -> None:
    layers = tuple(pair(4, 64) for _ in range(16))
    driver = Driver(tmp_path / "kv", FakeEngine(layers=layers), block_tokens=64)
    tokens = list(range(640))
    state = driver.engine.state(tokens)
    size = sum(tensor.array.nbytes for tensor in state.tensors.values())
    assert size >= 20 * 2**20
    tracemalloc.start()
    try:
        driver.namespace().save(tokens, state)
        driver.flush()
        assert tracemalloc.get_traced_memory()[1] < 1.3 * size
        match = driver.namespace().find([*tokens, 1])
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        restored = driver.namespace().restore(match)
        assert tracemalloc.get_traced_memory()[1] - before < 1.6 * size
    finally:
        tracemalloc.stop()
    driver.engine.check(restored, tokens)
    driver.close()


@pytest.mark.parametrize(
    ("limits", "effect"),
    [
        (rewarm.Limits(max_bytes=0), lambda d: d.n_files == 0),
        (rewarm.Limits(max_files=3), lambda d: d.n_files <= 3),
        (rewarm.Limits(max_files=0), lambda d: d.n_files == 0),
        (rewarm.Limits(min_free_bytes=2**62), lambda d: d.n_files == 0),
    ],
    ids=["bytes", "files", "no files", "free"],
)
def test_b108_b120_a_changed_setting_takes_effect_and_caching_goes_on(
    tmp_path: Path, limits: rewarm.Limits, effect: Callable[[object], bool]
) -> None:
    driver = Driver(tmp_path / "kv", lossy=True)
    for i in range(4):
        driver.save(range(100 * i, 100 * i + 11))
    driver.flush()
    before = driver.cache.settings().limits
    driver.cache.set_limits(limits)
    assert effect(on_disk(driver.root))
    driver.save(range(1000, 1011))
    driver.flush()
    assert effect(on_disk(driver.root))
    driver.reopen()
    assert effect(on_disk(driver.root))
    driver.cache.set_limits(before)
    driver.save(range(2000, 2011))
    driver.flush()
    assert driver.restore(range(2000, 2012)).n_tokens == 11
    driver.close()


@pytest.mark.parametrize("kind", LAYERS)
def test_b116_what_is_saved_is_found_by_the_same_look_up(tmp_path: Path, kind: str) -> None:
    """Also when another conversation was there first in the same process, and after a restart."""
    driver = Driver(tmp_path / "kv", FakeEngine(layers=LAYERS[kind]), lossy=True)
    driver.save(range(500, 513))
    driver.save([500, 501, *range(600, 611)])
    driver.flush()
    driver.reopen()
    assert driver.restore([500, 501, *range(600, 611), 7, 8]).n_tokens == 13
    assert driver.restore([*range(500, 513), 7]).n_tokens == 13
    driver.close()


@pytest.mark.parametrize("n", range(1, 13))
def test_b122_nothing_is_rounded_down(driver: Driver, n: int) -> None:
    driver.save(range(n))
    driver.flush()
    assert driver.restore([*range(n), 99]).n_tokens == n


def test_b134_a_record_that_fails_is_not_recent(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv", limits=rewarm.Limits(max_files=4, max_bytes=2**40, min_free_bytes=0), lossy=True)
    for i in range(2):
        driver.save(range(100 * i, 100 * i + 6))  # a block and a point each
        driver.flush()
    bad = next(path for path in on_disk(driver.root).records if path.suffix == ".point")
    bad.write_bytes(bytes(bad.stat().st_size))
    lengths = {i: [driver.restore([*range(100 * i, 100 * i + 6), 1]).n_tokens for _ in range(10)][-1] for i in range(2)}
    assert sorted(lengths.values()) == [4, 6]
    driver.flush()
    driver.save(range(900, 903))
    driver.flush()
    whole = next(i for i, n in lengths.items() if n == 6)
    assert driver.restore([*range(100 * whole, 100 * whole + 6), 1]).n_tokens == 6
    driver.close()


def test_b153_opening_and_closing_say_little(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(tmp_path / "kv", lossy=True)
    for i in range(60):
        driver.save(range(100 * i, 100 * i + 11))
    driver.flush()
    with caplog.at_level(logging.INFO):
        driver.reopen()
        driver.close()
        (driver.root / "index.db").unlink()
        driver.open()
        driver.close()
    assert len(caplog.records) <= 5


def test_b155_after_clear_a_repeat_is_cold(driver: Driver) -> None:
    driver.save(range(21))
    driver.flush()
    told = driver.cache.clear(dry_run=True)
    assert (told.n_files, driver.restore(range(22)).n_tokens) == (6, 21)
    assert driver.cache.clear() == told
    match = driver.namespace().find(range(22))
    assert (match.n_tokens, match.reason) == (0, Reason.NOTHING_STORED)
