"""The writer's queue: bounded in bytes, never in the way, and what it cannot hold is saved later."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewarm.cache.prefix_cache import PrefixCache
from rewarm.state.reason import Dropped
from rewarm.testing.driver import Driver, on_disk
from rewarm.testing.fake_engine import FakeEngine, pair, recurrent
from rewarm.testing.faults import Fault, FaultyDisk


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


def bound(cache: PrefixCache, nbytes: int) -> None:
    """Let the queue take `nbytes` bytes."""
    cache._writer._max_bytes = nbytes


def test_b114_a_queue_that_is_full_keeps_its_bound_and_counts(driver: Driver, disk: FaultyDisk) -> None:
    one = driver.engine.state(range(40))
    size = sum(tensor.array.nbytes for tensor in one.tensors.values())
    bound(driver.cache, 2 * size)
    disk.plant(Fault("create", "hang", times=1))
    reports = []
    for i in range(6):
        reports.append(driver.save(range(1000 * i, 1000 * i + 40)))
        assert driver.cache.stats()["queue_bytes"] <= 2 * size  # type: ignore[operator]
    full = [report for report in reports if report.reason is Dropped.QUEUE_FULL]
    assert full
    disk.heal()
    driver.flush()
    assert driver.cache.stats()["dropped_saves"] == {"queue_full": len(full)}
    assert all(report.done for report in reports)
    assert driver.restore([*range(40), 1]).n_tokens == 40


def test_a_state_that_no_queue_holds_is_saved_in_parts(driver: Driver) -> None:
    """Oldest rows first: each time the same state is saved, more of it is there."""
    tokens = range(60_000, 60_400)
    size = sum(tensor.array.nbytes for tensor in driver.engine.state(tokens).tensors.values())
    bound(driver.cache, size // 5)
    seen = []
    for _ in range(12):
        report = driver.save(tokens)
        driver.flush()
        seen.append(driver.restore([*tokens, 1]).n_tokens)
        if report.reason is None:
            break
        assert report.reason is Dropped.QUEUE_FULL
    assert seen == sorted(seen)
    assert len(seen) > 3
    assert seen[-1] == 400


@pytest.mark.parametrize("kind", ["rows", "hybrid"])
def test_b114_a_cold_save_of_60000_tokens_that_no_queue_holds_is_completed_later(tmp_path: Path, kind: str) -> None:
    """The caller is told what was refused, keeps no copy, and saves the same state again whenever there is room."""
    layers = (pair(1, 2),) if kind == "rows" else (pair(1, 2), recurrent())
    driver = Driver(tmp_path / "kv", FakeEngine(layers=layers), block_tokens=256, lossy=True)
    tokens = range(60_000)
    state = driver.engine.state(tokens)
    driver.perfect.save((0, b""), tokens, state)
    size = sum(tensor.array.nbytes for tensor in state.tensors.values())
    bound(driver.cache, size // 6)
    refused = []
    while not refused or refused[-1]:
        assert driver.cache.queue_free_bytes == size // 6
        report = driver.namespace().save(tokens, state)
        assert report.nbytes <= size // 6
        assert (report.reason is Dropped.QUEUE_FULL) == bool(report.refused_tokens)
        refused.append(report.refused_tokens)
        driver.flush()
        assert len(refused) < 20
    assert refused == sorted(refused, reverse=True)
    assert refused[0] > 40_000
    assert driver.restore([*tokens, 1]).n_tokens == 60_000
    assert [entry.n_tokens for entry in driver.cache.entries()] == [60_000]
    driver.assert_in_order()
    driver.close()


def test_a_waiting_save_is_absorbed_by_the_next_turn(driver: Driver, disk: FaultyDisk) -> None:
    disk.plant(Fault("create", "hang", times=1))
    driver.save(range(5000, 5009))  # holds the writer up
    assert disk.hanging.wait(10)
    tokens: list[int] = []
    for turn in range(6):
        tokens += [turn, 7, 8, 9, 10]
        driver.save(tokens)
    disk.heal()
    driver.flush()
    points = [path for path in on_disk(driver.root).records if path.suffix == ".point"]
    assert len(points) == 2
    assert len(driver.cache.entries()) == 2
    assert driver.restore([*tokens, 1]).n_tokens == 30
    driver.assert_in_order()


def test_a_system_prompt_that_waits_is_not_absorbed(driver: Driver, disk: FaultyDisk) -> None:
    disk.plant(Fault("create", "hang", times=1))
    driver.save(range(5000, 5009))
    assert disk.hanging.wait(10)
    driver.save(range(6), "system")
    driver.save(range(20))
    disk.heal()
    driver.flush()
    assert sorted(entry.n_tokens for entry in driver.cache.entries()) == [6, 9, 20]


def test_points_of_layouts_that_cannot_be_cut_are_never_absorbed(tmp_path: Path, disk: FaultyDisk) -> None:
    driver = Driver(tmp_path / "hybrid", FakeEngine(layers=(pair(), recurrent())), disk=disk)
    disk.plant(Fault("create", "hang", times=1))
    driver.save(range(5000, 5009))
    assert disk.hanging.wait(10)
    for n in (6, 9, 13):
        driver.save(range(n))
    disk.heal()
    driver.flush()
    for n in (6, 9, 13):
        assert driver.restore([*range(n), 99]).n_tokens == n
    driver.close()


def test_rows_that_wait_already_are_not_copied_again(driver: Driver, disk: FaultyDisk) -> None:
    disk.plant(Fault("create", "hang", times=1))
    driver.save(range(5000, 5009))
    assert disk.hanging.wait(10)
    first = driver.save(range(400))
    second = driver.save(range(404))
    assert second.nbytes < first.nbytes / 50
    disk.heal()
    driver.flush()
    assert driver.restore(range(405)).n_tokens == 404


def test_b097_close_has_a_deadline_and_says_what_is_left(tmp_path: Path, disk: FaultyDisk) -> None:
    driver = Driver(tmp_path / "slow", disk=disk, lossy=True)
    driver.save(range(9))
    driver.flush()
    disk.plant(Fault("create", "hang"))
    reports = [driver.save(range(100 * i, 100 * i + 9)) for i in range(1, 4)]
    report = driver.cache.close(timeout=0.3)
    assert report.unwritten == 3
    assert [each.reason for each in reports] == [Dropped.CLOSED] * 3
    disk.heal()
    driver.open()
    assert driver.restore(range(10)).n_tokens == 9
    driver.close()


def test_saving_goes_on_after_a_fault(driver: Driver, disk: FaultyDisk) -> None:
    disk.plant(Fault("write", code=errno.EIO))
    assert driver.save(range(9)).queued
    driver.flush()
    disk.heal()
    driver.save(range(9))
    driver.flush()
    assert driver.restore(range(10)).n_tokens == 9
