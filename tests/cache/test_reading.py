"""A disk that does not answer holds nobody up beyond the deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewarm.cache.reading import THREADS
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
