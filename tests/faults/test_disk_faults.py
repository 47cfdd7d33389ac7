"""A disk that fails in every way: the caller goes on, reason and counter say why, and saving resumes by itself."""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import rewarm
from rewarm.state.reason import Dropped, Reason
from rewarm.store.settings import Limits
from rewarm.testing.driver import ROOMY, Driver, holes, on_disk
from rewarm.testing.fake_engine import FakeEngine, pair, recurrent, window
from rewarm.testing.faults import Fault, FaultyDisk

CODES = [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.ENODEV]
WRITING = ["create", "write", "close", "rename", "make_folder"]
READING = ["open", "stat", "read_into", "close"]


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def driver(tmp_path: Path, disk: FaultyDisk) -> Iterator[Driver]:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=(pair(),)), disk=disk)
    yield driver
    disk.heal()
    driver.assert_in_order()
    driver.close()


@pytest.mark.parametrize("operation", WRITING)
@pytest.mark.parametrize("code", CODES, ids=[errno.errorcode[code] for code in CODES])
def test_b044_b085_a_fault_while_writing_drops_the_save_and_no_more(
    driver: Driver, disk: FaultyDisk, operation: str, code: int
) -> None:
    # Where the disk is full, the least recently used may go, no more than is needed: these seven files.
    driver.save(range(500, 525))
    driver.flush()
    driver.save(range(6))
    driver.flush()
    disk.plant(Fault(operation, code=code))
    report = driver.save(range(100, 121))
    assert report.queued
    driver.flush()
    assert report.done
    assert report.reason is (Dropped.NO_SPACE if code == errno.ENOSPC else Dropped.UNAVAILABLE)
    dropped = driver.cache.stats()["dropped_saves"]
    assert dropped == {report.reason.value: 1}
    if operation == "close":  # which reading does too
        disk.heal()
    # What was stored before is served still, nothing half is found, nothing half is on the disk.
    driver.lossy = True
    assert driver.restore(range(7)).n_tokens == 6
    driver.restore(range(100, 122))
    assert holes(driver.root) == []
    disk.heal()
    assert driver.save(range(100, 121)).reason is None
    driver.flush()
    assert driver.restore(range(100, 122)).n_tokens == 21


@pytest.mark.parametrize("after", range(0, 40, 3))
def test_b047_a_save_that_fails_half_way_leaves_a_prefix_without_gaps(
    driver: Driver, disk: FaultyDisk, after: int
) -> None:
    disk.plant(Fault("write", code=errno.ENOSPC, after=after, after_write=True))
    driver.save(range(41))
    driver.flush()
    driver.lossy = True
    driver.restore(range(42))
    assert holes(driver.root) == []
    disk.heal()
    driver.save(range(41))
    driver.flush()
    assert driver.restore(range(42)).n_tokens == 41


@pytest.mark.parametrize("operation", READING)
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENODEV], ids=["EIO", "EACCES", "ENODEV"])
def test_b045_a_fault_while_reading_is_a_miss_and_moves_nothing(
    driver: Driver, disk: FaultyDisk, operation: str, code: int
) -> None:
    driver.save(range(11))
    driver.flush()
    before = on_disk(driver.root).records
    match = driver.find(range(12))
    disk.plant(Fault(operation, code=code))
    state = driver.namespace().restore(match)
    assert (state.n_tokens, state.tensors, state.reason) == (0, {}, Reason.UNAVAILABLE)
    assert driver.cache.stats()["misses"] == {"unavailable": 1}
    disk.heal()
    driver.flush()
    assert on_disk(driver.root).records == before
    # The fault is gone: what is there is found again, without a restart and without another save.
    assert driver.restore(range(12)).n_tokens == 11


def test_b041_a_restore_that_fails_half_way_leaves_less_but_right(driver: Driver, disk: FaultyDisk) -> None:
    driver.save(range(19))
    driver.flush()
    for after in range(12):
        disk.plant(Fault("read_into", code=errno.EIO, after=after, times=1))
        driver.lossy = True
        driver.restore(range(20))
        disk.heal()
    driver.lossy = False


@pytest.mark.parametrize("operation", ["write", "rename", "create"])
def test_b095_a_disk_that_hangs_holds_nobody_up(driver: Driver, disk: FaultyDisk, operation: str) -> None:
    driver.save(range(9))
    driver.flush()
    disk.plant(Fault(operation, "hang", times=1))
    driver.save(range(100, 109))
    assert disk.hanging.wait(10)
    # Others find, restore and save while the writer hangs.
    assert driver.restore(range(10)).n_tokens == 9
    report = driver.save(range(200, 209))
    assert report.queued
    assert not driver.cache.flush(0.2)
    assert not report.done
    disk.heal()
    driver.flush()
    assert report.done
    assert driver.restore(range(200, 210)).n_tokens == 9


def test_b097_closing_a_cache_whose_disk_hangs_ends_at_its_deadline(tmp_path: Path, disk: FaultyDisk) -> None:
    driver = Driver(tmp_path / "kv", disk=disk)
    disk.plant(Fault("write", "hang"))
    reports = [driver.save(range(i * 100, i * 100 + 9)) for i in range(5)]
    assert disk.hanging.wait(10)
    closed = threading.Event()
    unwritten: list[int] = []

    def close() -> None:
        unwritten.append(driver.cache.close(0.3).unwritten)
        closed.set()

    closer = threading.Thread(target=close)
    closer.start()
    assert closed.wait(20), "close waits for a disk that hangs"
    disk.heal()
    closer.join()
    assert unwritten == [5]
    assert all(report.wait(20) for report in reports)
    assert {report.reason for report in reports} == {Dropped.CLOSED}


def test_b103_a_disk_that_goes_away_and_comes_back(driver: Driver, disk: FaultyDisk) -> None:
    driver.save(range(9))
    driver.flush()
    disk.plant(Fault(None, code=errno.ENODEV))
    for i in range(3):
        driver.namespace().save(range(i * 50, i * 50 + 9), driver.engine.state(range(i * 50, i * 50 + 9)))
        driver.cache.flush(20)
        match = driver.namespace().find(range(10))
        assert driver.namespace().restore(match).n_tokens == 0
    disk.heal()
    assert driver.restore(range(10)).n_tokens == 9
    driver.save(range(300, 311))
    driver.flush()
    assert driver.restore(range(300, 312)).n_tokens == 11


def test_b103_b105_a_root_that_was_removed_is_a_miss_and_nothing_is_made_elsewhere(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "drive" / "kv")
    driver.save(range(9))
    driver.flush()
    shutil.move(tmp_path / "drive", tmp_path / "unplugged")
    match = driver.namespace().find(range(10))
    assert driver.namespace().restore(match).n_tokens == 0
    report = driver.namespace().save(range(50, 59), driver.engine.state(range(50, 59)))
    assert report.wait(20)
    assert report.reason is not None
    assert not (tmp_path / "drive").exists()
    shutil.move(tmp_path / "unplugged", tmp_path / "drive")
    driver.flush()  # what could not be looked at is looked at again
    assert driver.restore(range(10)).n_tokens == 9
    driver.save(range(70, 79))
    driver.flush()
    assert driver.restore(range(70, 80)).n_tokens == 9
    driver.close()


def test_b081_writing_stops_at_the_floor_of_free_space(tmp_path: Path, disk: FaultyDisk) -> None:
    limits = Limits(max_bytes=ROOMY.max_bytes, max_files=10**6, min_free_bytes=10**9)
    driver = Driver(tmp_path / "kv", limits=limits, disk=disk)
    disk.free = 10**10
    driver.save(range(9))
    driver.flush()
    assert driver.restore(range(10)).n_tokens == 9
    disk.free = 10**9 + 100
    report = driver.save(range(100, 109))
    driver.flush()
    # Room is made out of what is stored; when that cannot lift the floor, the save is dropped.
    driver.lossy = True
    assert report.reason is Dropped.NO_SPACE or driver.restore(range(100, 110)).n_tokens == 9
    disk.free = 10**8
    report = driver.save(range(200, 209))
    driver.flush()
    assert report.reason is Dropped.NO_SPACE
    disk.free = 10**10
    assert driver.save(range(200, 209)).reason is None
    driver.flush()
    assert driver.restore(range(200, 210)).n_tokens == 9
    driver.assert_in_order()
    driver.close()


def test_b085_a_floor_that_cannot_be_reached_does_not_empty_the_cache(tmp_path: Path, disk: FaultyDisk) -> None:
    """Somebody else fills the disk: our records are no remedy, and throwing all of them away helps nobody."""
    limits = Limits(max_bytes=ROOMY.max_bytes, max_files=10**6, min_free_bytes=10**9)
    driver = Driver(tmp_path / "kv", limits=limits, disk=disk)
    disk.free = 10**10
    for i in range(20):
        driver.save(range(i * 100, i * 100 + 9))
    driver.flush()
    n_files = on_disk(driver.root).n_files
    disk.free = 1000
    report = driver.save(range(5000, 5009))
    driver.flush()
    assert report.reason is Dropped.NO_SPACE
    assert on_disk(driver.root).n_files == n_files
    driver.close()


@pytest.mark.parametrize("operation", ["unlink"])
def test_files_that_cannot_be_removed_are_skipped(tmp_path: Path, disk: FaultyDisk, operation: str) -> None:
    limits = Limits(max_bytes=ROOMY.max_bytes, max_files=8, min_free_bytes=0)
    driver = Driver(tmp_path / "kv", limits=limits, disk=disk, lossy=True)
    driver.save(range(9))
    driver.save(range(100, 109))
    driver.flush()
    disk.plant(Fault(operation, code=errno.EACCES, times=1))
    driver.save(range(200, 209))
    driver.flush()
    disk.heal()
    driver.save(range(300, 309))
    driver.flush()
    assert driver.restore(range(300, 310)).n_tokens == 9
    driver.assert_in_order()
    driver.close()


def test_a_fault_of_the_quarantine_is_no_exception(driver: Driver, disk: FaultyDisk) -> None:
    driver.save(range(9))
    driver.flush()
    path = next(path for path in on_disk(driver.root).records if path.suffix == ".block")
    path.write_bytes(path.read_bytes()[:-1])
    disk.plant(Fault("rename", code=errno.EACCES))
    driver.lossy = True
    assert driver.restore(range(10)).n_tokens < 9
    driver.cache.flush(0.5)
    disk.heal()
    # Tried again when the record is met again.
    for _ in range(3):
        driver.restore(range(10))
        driver.flush()
        driver.save(range(9))
        driver.flush()
    assert driver.restore(range(10)).n_tokens == 9


def test_flush_durable_syncs_what_was_written(driver: Driver, disk: FaultyDisk) -> None:
    driver.save(range(9))
    driver.flush()
    assert disk.counts["sync"] == 0
    driver.save(range(100, 109))
    assert driver.cache.flush(20, durable=True)
    # Two blocks and a point each, and their folders.
    assert disk.counts["sync"] >= 2 * 3
    disk.plant(Fault("sync"))
    driver.save(range(200, 209))
    assert not driver.cache.flush(20, durable=True)


@pytest.mark.parametrize("code", CODES, ids=[errno.errorcode[code] for code in CODES])
@pytest.mark.parametrize("operation", ["create", "write", "rename", "link", "make_folder"])
def test_a_root_that_cannot_be_made_is_a_clear_error(tmp_path: Path, operation: str, code: int) -> None:
    disk = FaultyDisk()
    disk.plant(Fault(operation, code=code))
    try:
        cache = rewarm.open(tmp_path / "kv", disk=disk)
    except rewarm.RootError as error:
        assert str(tmp_path / "kv") in str(error)
        assert "Nothing was changed" in str(error) or "untouched" in str(error)
    else:
        # What is not needed to open may fail later.
        disk.heal()
        cache.close()
    disk.heal()
    rewarm.open(tmp_path / "kv", disk=disk).close()


def test_a_root_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "kv").write_bytes(b"")
    with pytest.raises(rewarm.RootError, match="cannot be used"):
        rewarm.open(tmp_path / "kv")
    with pytest.raises(rewarm.RootError, match="cannot be used"):
        rewarm.open(tmp_path / "kv" / "below")


def test_b091_a_state_that_cannot_be_stored_harms_nobody(driver: Driver) -> None:
    """NaN is refused and counted; the next save goes on."""
    state = driver.engine.state(range(9))
    bad = dict(state.tensors)
    array = bad["00.keys"].array.copy()
    array[0, 3, 0, 0] = float("nan")
    bad["00.keys"] = rewarm.Rows(array, 1)
    report = driver.namespace().save(range(9), rewarm.SequenceState(9, bad, state.meta))
    driver.flush()
    assert report.reason is Dropped.NOT_FINITE
    assert driver.restore(range(10)).n_tokens == 0
    driver.save(range(9))
    driver.flush()
    assert driver.restore(range(10)).n_tokens == 9


@pytest.mark.parametrize(
    "meta",
    [{"a": 2**70}, {"a": b"x"}, {"a": [1]}, {"a": object()}, {1: "a"}, {"a": float("nan")}, {"a\ud800": 1}],
    ids=repr,
)
def test_meta_that_cannot_be_stored_never_stops_the_writer(driver: Driver, meta: dict) -> None:  # type: ignore[type-arg]
    state = driver.engine.state(range(9))
    with contextlib.suppress(ValueError):
        driver.namespace().save(range(9), rewarm.SequenceState(9, state.tensors, meta))
    driver.cache.flush(20)
    driver.save(range(100, 109))
    driver.flush()
    assert driver.restore(range(100, 110)).n_tokens == 9


@pytest.mark.parametrize("label", ["x" * 100_000, "\ud800", "\0", ""], ids=["long", "surrogate", "nul", "empty"])
def test_labels_of_any_text_never_stop_the_writer(driver: Driver, label: str) -> None:
    with contextlib.suppress(ValueError):
        driver.namespace().save(range(9), driver.engine.state(range(9)), label=label)
    driver.cache.flush(20)
    driver.save(range(100, 109))
    driver.flush()
    assert driver.restore(range(100, 110)).n_tokens == 9


def test_b124_b153_drops_are_counted_and_logged_once_not_once_a_record(
    driver: Driver, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.plant(Fault("write", code=errno.ENOSPC))
    with caplog.at_level(logging.WARNING):
        driver.save(range(41))
        driver.flush()
    # A line for the try and one for the second try, of a save of eleven records.
    assert 1 <= len(caplog.records) <= 2
    assert driver.cache.stats()["dropped_saves"] == {"no_space": 1}


@pytest.mark.parametrize("layers", [(pair(), window(6, 1)), (pair(), recurrent())], ids=["window", "hybrid"])
@pytest.mark.parametrize("operation", ["create", "write", "close", "rename"])
def test_every_step_of_every_layout_may_fail(tmp_path: Path, layers: tuple, operation: str) -> None:  # type: ignore[type-arg]
    disk = FaultyDisk()
    driver = Driver(tmp_path / "kv", FakeEngine(layers=layers), disk=disk, lossy=True)
    for after in range(6):
        disk.plant(Fault(operation, after=after))
        tokens = list(range(after * 100, after * 100 + 18))
        driver.save(tokens[:7])
        driver.save(tokens)
        driver.flush()
        driver.restore([*tokens, 1])
        disk.heal()
        driver.save(tokens)
        driver.flush()
        assert driver.restore([*tokens, 1]).n_tokens == 18
    driver.assert_in_order()
    driver.close()
