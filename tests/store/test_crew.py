"""Work in two: in order, each item once, and nothing more is begun after a failure."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewarm.state.reason import Dropped
from rewarm.store import commit
from rewarm.store.crew import Crew
from rewarm.testing.driver import Driver, holes, on_disk
from rewarm.testing.fake_engine import FakeEngine, pair
from rewarm.testing.faults import Fault, FaultyDisk


def test_each_item_is_worked_on_once_by_two() -> None:
    crew, met, threads = Crew(), [], set()
    both = threading.Barrier(2, timeout=30)

    def work(item: int) -> bool:
        if item < 2:
            both.wait()  # passes only when two are at work
        met.append(item)
        threads.add(threading.get_ident())
        return True

    for _ in range(3):
        met.clear()
        crew.run(work, range(50))
        assert sorted(met) == list(range(50))
    assert len(threads) == 2
    crew.close()
    crew.close()


def test_nothing_is_begun_after_a_failure() -> None:
    crew, begun = Crew(), []

    def work(item: int) -> bool:
        begun.append(item)
        return item != 3

    crew.run(work, range(1000))
    assert 3 in begun
    assert len(begun) < 1000
    crew.run(work, [])
    crew.close()


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    disk = FaultyDisk()
    yield disk
    disk.heal()


@pytest.fixture
def driver(tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setattr(commit, "WORTH_A_HELPER_NBYTES", 0)
    driver = Driver(tmp_path / "kv", FakeEngine(layers=(pair(width=64),)), disk=disk, lossy=True)
    yield driver
    disk.heal()
    driver.assert_in_order()
    driver.close()


def test_records_that_two_write_are_right(driver: Driver) -> None:
    for turn in range(4):
        driver.save(range(40 * (turn + 1)))
        driver.flush()
        assert driver.restore(range(40 * (turn + 1) + 1)).n_tokens == 40 * (turn + 1)
    driver.reopen()
    assert driver.restore(range(500)).n_tokens == 160


@pytest.mark.parametrize("operation", ["create", "write", "close", "rename"])
@pytest.mark.parametrize("after", [2, 4, 6, 8])
def test_b044_a_failure_in_the_middle_leaves_no_hole_and_no_orphan(
    driver: Driver, disk: FaultyDisk, operation: str, after: int
) -> None:
    disk.plant(Fault(operation, code=errno.EIO, after=after, times=1))
    report = driver.save(range(41))
    assert report.wait(30)
    driver.flush()
    assert report.reason is Dropped.UNAVAILABLE
    assert holes(driver.root) == []
    assert on_disk(driver.root).leftovers == ()
    report = driver.cache.verify()
    assert report.unknown == []
    assert report.is_clean
    disk.heal()
    driver.save(range(41))
    driver.flush()
    assert driver.restore(range(42)).n_tokens == 41


def test_nan_far_behind_is_seen(driver: Driver) -> None:
    state = driver.engine.state(range(41))
    next(iter(state.tensors.values())).array[:, -1] = float("nan")
    report = driver.namespace().save(range(41), state)
    assert report.wait(30)
    assert report.reason is Dropped.NOT_FINITE
    assert on_disk(driver.root).n_files == 0
