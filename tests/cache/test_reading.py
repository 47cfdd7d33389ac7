"""A disk that does not answer holds nobody up beyond the deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rewarm.cache import prefix_cache
from rewarm.cache.reading import THREADS
from rewarm.errors import IndexFault, SettingsError
from rewarm.state.reason import Reason
from rewarm.testing.driver import Driver
from rewarm.testing.faults import Fault, FaultyDisk


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    disk = FaultyDisk()
    yield disk
    disk.heal()


@pytest.fixture
def driver(tmp_path: Path, disk: FaultyDisk) -> Iterator[Driver]:
    driver = Driver(tmp_path / "kv", disk=disk)
    driver.save(range(40))
    driver.flush()
    yield driver
    disk.heal()
    driver.close()


def test_b095_a_read_that_hangs_is_a_miss_by_the_deadline(driver: Driver, disk: FaultyDisk) -> None:
    namespace = driver.namespace()
    match = namespace.find(range(41))
    disk.plant(Fault("read_into", "hang", times=1))
    state = namespace.restore(match, deadline=0.2)
    assert (state.n_tokens, state.reason) == (0, Reason.TIMEOUT)
    # The other thread goes on serving.
    assert driver.restore(range(41)).n_tokens == 40
    disk.heal()


def test_when_every_thread_hangs_nobody_waits(driver: Driver, disk: FaultyDisk) -> None:
    namespace = driver.namespace()
    match = namespace.find(range(41))
    disk.plant(Fault("read_into", "hang"))
    for _ in range(THREADS + 1):
        assert namespace.restore(match, deadline=0.2).reason is Reason.TIMEOUT
    began = time.monotonic()
    assert namespace.restore(match, deadline=20).reason is Reason.TIMEOUT
    assert time.monotonic() - began < 10
    disk.heal()
    for _ in range(100):
        if driver.cache.restore_is_possible:
            break
        time.sleep(0.05)
    assert driver.restore(range(41)).n_tokens == 40


def test_b095_an_index_that_hangs_holds_nobody_up(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite reads by itself: a thread of its own hangs in it, and whoever asked goes on."""
    monkeypatch.setattr(prefix_cache, "LIST_DEADLINE_S", 0.2)
    monkeypatch.setattr(prefix_cache, "STATS_DEADLINE_S", 0.2)
    namespace, before = driver.namespace(), driver.cache.stats()
    match = namespace.find(range(41))
    free = threading.Event()
    root = driver.cache.store._root
    with monkeypatch.context() as patched:
        calls = [
            (index, name, getattr(index, name)) for index in (root.reader, root.lister) for name in ("rows", "one")
        ]
        for index, name, call in calls:

            def hang(*arguments: object, call: Callable[..., object] = call) -> object:
                assert free.wait(60)
                return call(*arguments)

            patched.setattr(index, name, hang)
        # Each of these would wait for a minute.
        assert namespace.find(range(41)).reason is Reason.TIMEOUT
        assert namespace.find(range(41)).reason is Reason.TIMEOUT
        report = driver.save(range(900, 909))
        assert report.reason is None
        namespace.heed()
        assert driver.cache.explain(range(41), namespace.identity).reason is Reason.TIMEOUT
        assert driver.cache.stats()["bytes_used"] == before["bytes_used"]
        with pytest.raises(IndexFault, match="cannot be listed now"):
            driver.cache.entries()
        with pytest.raises(SettingsError, match="cannot be read now"):
            driver.cache.settings()
        assert namespace.restore(match).n_tokens in (0, 40)
        assert not free.is_set()
        free.set()
    for _ in range(200):
        if namespace.find(range(41)).n_tokens == 40:
            break
        time.sleep(0.05)
    assert report.wait(20)
    assert driver.restore(range(900, 910)).n_tokens == 9
    assert len(driver.cache.entries()) == 2


def test_many_threads_restore_at_once(driver: Driver) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for cut in range(1, 41, 3):
                assert driver.restore([*range(cut), 999]).n_tokens == cut
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_long_list_keeps_no_look_up_waiting(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    held, free = threading.Event(), threading.Event()
    lister = driver.cache.store._root.lister

    def hold() -> None:
        with lister.deadline(60.0):
            held.set()
            assert free.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    assert driver.restore(range(41)).n_tokens == 40
    driver.save(range(900, 909))
    driver.flush()
    assert not free.is_set()
    free.set()
    holder.join()
    assert len(driver.cache.entries()) == 2
