"""Everything public is safe to call from several threads; every restored state is checked bit for bit."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rewarm.state.reason import Dropped
from rewarm.store.settings import Limits
from rewarm.testing.driver import Driver, on_disk
from rewarm.testing.fake_engine import FakeEngine, Layer, pair, recurrent, window


def run_all(works: list[Callable[[], None]]) -> None:
    """Run `works` at once; the first error of any is raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  # handed on to the test
                errors.append(error)

        return run

    threads = [threading.Thread(target=guarded(work)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a deadlock"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("layers", [(pair(),), (pair(1, 2), window(6, 1), recurrent((2,)))], ids=["rows", "hybrid"])
@pytest.mark.parametrize("max_files", [10**6, 40], ids=["roomy", "tight"])
def test_b004_many_threads_save_find_and_restore(tmp_path: Path, layers: tuple[Layer, ...], max_files: int) -> None:
    limits = Limits(max_bytes=2**40, max_files=max_files, min_free_bytes=0)
    driver = Driver(tmp_path / "kv", FakeEngine(layers=layers), limits=limits, lossy=True)
    engine, namespace = driver.engine, driver.namespace()

    def work(seed: int) -> Callable[[], None]:
        chance = random.Random(seed)

        def run() -> None:
            for _ in range(25):
                # Few sequences, so that threads meet on the same records.
                tokens = [chance.randrange(3), *range(chance.randrange(1, 22))]
                if chance.random() < 0.5:
                    namespace.save(tokens, engine.state(tokens))
                else:
                    prompt = [*tokens, 77]
                    engine.check(namespace.restore(namespace.find(prompt)), prompt)
                if chance.random() < 0.1:
                    assert driver.cache.flush(60)
                if chance.random() < 0.1:
                    driver.cache.stats()
                    driver.cache.entries()

        return run

    run_all([work(seed) for seed in range(6)])
    driver.assert_in_order()
    driver.close()


def test_administration_from_other_threads_harms_nobody(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv", lossy=True)
    engine, namespace = driver.engine, driver.namespace()
    done = threading.Event()

    def chat() -> None:
        for i in range(30):
            tokens = list(range(i % 5, i % 5 + 14))
            namespace.save(tokens, engine.state(tokens))
            engine.check(namespace.restore(namespace.find([*tokens, 1])), [*tokens, 1])
        done.set()

    def administrate() -> None:
        chance = random.Random(0)
        while not done.is_set():
            for entry in driver.cache.entries()[:1]:
                chance.choice([driver.cache.pin, driver.cache.unpin, driver.cache.forget])(entry)
            chance.choice([driver.cache.verify, driver.cache.clear, driver.cache.repair])()
            driver.cache.set_limits(Limits(max_files=chance.choice([5, 100])))

    run_all([chat, chat, administrate])
    driver.cache.set_limits(Limits(max_files=10**6))
    driver.cache.flush(60)
    driver.save(range(14))
    driver.assert_in_order()
    assert driver.restore(range(15)).n_tokens == 14
    driver.close()


def test_saves_after_close_are_dropped_and_close_is_idempotent(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv")
    driver.save(range(9))
    namespace = driver.namespace()
    driver.close()
    driver.close()
    report = namespace.save(range(9, 20), driver.engine.state(range(9, 20)))
    assert not report.queued
    assert report.reason is Dropped.CLOSED
    match = namespace.find(range(10))
    assert match.n_tokens == 0
    assert namespace.restore(match).n_tokens == 0


def test_opening_and_closing_leaks_no_descriptors_and_no_threads(tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        folder = Path("/proc/self/fd")
        return (len(list(folder.iterdir())) if folder.is_dir() else 0), threading.active_count()

    for i in range(25):
        driver = Driver(tmp_path / "kv")
        driver.save(range(9))
        driver.flush()
        driver.restore(range(10))
        driver.close()
        if i == 2:
            before = held()
    after = held()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1]


def test_two_caches_of_one_process_share_one_root(tmp_path: Path) -> None:
    one, two = Driver(tmp_path / "kv", lossy=True), Driver(tmp_path / "kv", lossy=True)
    for driver in (one, two):
        driver.perfect.save((0, b""), range(50), driver.engine.state(range(50)))
    one.save(range(9))
    one.flush()
    assert two.restore(range(10)).n_tokens == 9
    two.save(range(14))
    two.flush()
    assert one.restore(range(15)).n_tokens == 14
    two.cache.clear()
    assert one.restore(range(15)).n_tokens == 0
    assert on_disk(one.root).n_files == 0
    one.save(range(14))
    one.flush()
    assert two.restore(range(15)).n_tokens == 14
    one.assert_in_order()
    one.close()
    two.close()


EXIT = """
import logging, sys, pathlib
from rewarm.testing.driver import Driver
from rewarm.testing.faults import Fault, FaultyDisk
import rewarm.cache.prefix_cache as module

logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
disk = FaultyDisk()
driver = Driver(pathlib.Path(sys.argv[1]), disk=disk, lossy=True)
driver.save(range(9))
if sys.argv[2] == "hangs":
    driver.flush()
    module.PrefixCache.close.__defaults__ = (0.2,)
    disk.plant(Fault("create", "hang"))
    driver.save(range(100, 109))
"""


@pytest.mark.parametrize("disk", ["answers", "hangs"])
def test_an_exit_without_close_writes_what_waits_or_says_what_is_lost(tmp_path: Path, disk: str) -> None:
    command = [sys.executable, "-c", EXIT, str(tmp_path / "kv"), disk]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("1 saves were not written" in done.stdout) == (disk == "hangs")
    driver = Driver(tmp_path / "kv", lossy=True)
    driver.perfect.save((0, b""), range(9), driver.engine.state(range(9)))
    assert driver.restore(range(10)).n_tokens == 9
    driver.close()
