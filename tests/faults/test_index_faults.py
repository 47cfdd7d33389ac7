"""Faults of the index, whose I/O is SQLite's own: the caller goes on, and so does the cache when the fault is over."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewarm.errors import RootError
from rewarm.state.reason import Dropped, Reason
from rewarm.store import rebuild as rebuilding
from rewarm.store import root as opening
from rewarm.testing.driver import Driver, on_disk
from waiting import until


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path / "kv", lossy=True)
    driver.save(range(11))
    driver.flush()
    yield driver
    driver.cache.close()


def again(driver: Driver, first: int) -> int:
    """Save a conversation and restore it; how much of it came back."""
    tokens = range(first, first + 9)
    driver.save(tokens)
    driver.cache.flush(5)
    return driver.restore([*tokens, 1]).n_tokens


def test_a_second_process_that_holds_the_index_delays_no_find(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.cache.store._root.index.execute("PRAGMA busy_timeout = 100")
    other = sqlite3.connect(driver.root / "index.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        assert driver.restore(range(12)).n_tokens == 11
        report = driver.save(range(100, 109))
        assert report.wait(10)
        assert report.reason is Dropped.UNAVAILABLE
    finally:
        other.execute("ROLLBACK")
        other.close()
    assert again(driver, 200) == 9


def test_an_index_that_may_not_grow_drops_saves_and_serves_what_is_there(driver: Driver) -> None:
    index = driver.cache.store._root.index
    pages = index.one("PRAGMA page_count")[0]
    index.execute(f"PRAGMA max_page_count = {pages}")
    dropped = 0
    for i in range(60):
        report = driver.save(range(1000 * i, 1000 * i + 41))
        driver.cache.flush(5)
        dropped += report.reason is Dropped.UNAVAILABLE
    assert dropped
    assert driver.restore(range(12)).n_tokens == 11
    index.execute("PRAGMA max_page_count = 1073741823")
    assert again(driver, 500_000) == 9
    driver.reopen()
    assert driver.cache.verify().is_clean


def test_an_index_on_a_small_file_system_of_its_own(tmp_path: Path) -> None:
    """The index alone fills a file system in memory: saves are dropped, what is there is served, then all goes on."""
    if not _can_mount(tmp_path):
        pytest.skip("needs the right to mount a file system; the test above limits the index by its pages")
    small = tmp_path / "small"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)], check=True)
    try:
        driver = Driver(small / "kv", lossy=True)
        driver.save(range(11))
        driver.flush()
        filler = small / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        dropped = {driver_drops(driver, first) for first in range(1000, 1020)}
        assert dropped & {Dropped.UNAVAILABLE, Dropped.NO_SPACE}
        assert dropped <= {Dropped.UNAVAILABLE, Dropped.NO_SPACE, None}
        # Right, and there, unless it was what made room, once, for a record on a disk that had said it had some.
        assert driver.restore(range(12)).n_tokens in (0, 4, 8, 11)
        filler.unlink()
        until(lambda: again(driver, 500_000) == 9)
        driver.reopen()
        assert driver.cache.verify().is_clean
        driver.close()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def driver_drops(driver: Driver, first: int) -> Dropped | None:
    """What becomes of a save."""
    report = driver.save(range(first * 100, first * 100 + 41))
    assert report.wait(20)
    return report.reason


def _can_mount(folder: Path) -> bool:
    """Whether a file system in memory can be mounted here; it is tried."""
    (folder / "small").mkdir()
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    tried = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder / "small")])
    return tried.returncode == 0 and subprocess.run(["umount", str(folder / "small")]).returncode == 0


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_something_else_under_the_indexs_name_is_said_and_left_alone(driver: Driver, kind: str, tmp_path: Path) -> None:
    """Also while it is open; when it has gone, everything goes on by itself."""
    for name in ("index.db", "index.db-wal", "index.db-shm"):
        (driver.root / name).unlink(missing_ok=True)
    path = driver.root / "index.db"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "elsewhere.db").write_bytes(b"")
        path.symlink_to(tmp_path / "elsewhere.db")
    else:
        os.mkfifo(path)
    assert driver_drops(driver, 3) is Dropped.UNAVAILABLE
    match = driver.namespace().find(range(12))
    assert (match.n_tokens, match.reason) == (0, Reason.UNAVAILABLE)
    assert "index.db is no plain file" in str(match.detail["error"])
    assert ".." not in str(match.detail["error"])
    with pytest.raises(RootError, match="is no plain file"):
        Driver(driver.root, lossy=True)
    assert os.path.lexists(path)
    if kind == "folder":
        path.rmdir()
    else:
        path.unlink()
    until(lambda: driver.namespace().find(range(12)).n_tokens == 11)
    assert again(driver, 300) == 9
    if kind == "link":
        assert (tmp_path / "elsewhere.db").read_bytes() == b""


def test_an_index_that_is_deleted_while_open_is_built_anew(driver: Driver) -> None:
    for name in ("index.db", "index.db-wal", "index.db-shm"):
        (driver.root / name).unlink(missing_ok=True)
    assert again(driver, 300) == 9
    until(lambda: driver.restore(range(12)).n_tokens == 11)  # the index is built beside what is asked and saved
    assert driver.cache.verify().is_clean


def test_an_index_that_breaks_while_open_is_built_anew(driver: Driver) -> None:
    for i in range(40):
        driver.save(range(10_000 * i, 10_000 * i + 30))
    driver.flush()
    index = driver.cache.store._root.index
    index.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path = driver.root / "index.db"
    noise = random.Random(0).randbytes(path.stat().st_size - 8192)
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(noise)

    def well() -> bool:
        match = driver.namespace().find(range(12))
        assert match.n_tokens in (0, 11)
        return match.n_tokens == 11 and again(driver, 77_000_000) == 9

    until(well)
    assert driver.restore([*range(20_000, 20_030), 1]).n_tokens == 30
    assert driver.cache.verify().is_clean


def test_a_large_index_is_built_in_the_background(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is there, find sees what has been read so far, and saving goes on."""
    for i in range(30):
        driver.save(range(10_000 * i, 10_000 * i + 30))
    driver.flush()
    driver.close()
    for leftover in driver.root.glob("index.db*"):
        leftover.unlink()
    slowly = rebuilding._enter

    def enter(*arguments: object) -> bool:
        time.sleep(0.01)
        return slowly(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rebuilding, "_enter", enter)
    monkeypatch.setattr(rebuilding, "BATCH", 5)
    monkeypatch.setattr(opening, "REBUILD_WAIT_S", 0.01)
    driver.open()
    match = driver.namespace().find([*range(290_000, 290_030), 1])
    assert match.reason in (Reason.HIT, Reason.NOTHING_STORED, Reason.DIVERGED)
    assert again(driver, 5_000_000) == 9
    until(lambda: driver.cache.store.rebuilt)
    driver.flush()
    assert len(driver.cache.entries()) == 31
    for i in range(30):
        assert driver.restore([*range(10_000 * i, 10_000 * i + 30), 1]).n_tokens == 30
    assert driver.cache.verify().is_clean


def test_a_build_that_was_cut_short_is_finished_by_the_next_open(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(30):
        driver.save(range(10_000 * i, 10_000 * i + 30))
    driver.flush()
    driver.close()
    for leftover in driver.root.glob("index.db*"):
        leftover.unlink()
    monkeypatch.setattr(rebuilding, "BATCH", 5)
    monkeypatch.setattr(opening, "REBUILD_WAIT_S", 0.0)
    driver.open()
    driver.cache.close()
    driver.open()
    until(lambda: len(driver.cache.entries()) == 30)
    n_records = len(on_disk(driver.root).records)
    assert driver.cache.verify().n_good == n_records
    assert driver.cache.stats()["files_used"] == n_records
