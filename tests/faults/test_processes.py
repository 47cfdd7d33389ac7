"""Several processes on one root: one budget, no wrong load, no hole in a chain, no deadlock; some are killed."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from rewarm.testing.crash import BLOCK_TOKENS
from rewarm.testing.crowd import engine, limits, sequence, start
from rewarm.testing.driver import Driver, on_disk


def crowd(root: Path, n_processes: int, n_operations: int, max_files: int, n_kills: int) -> None:
    chance = random.Random(n_operations)
    Driver(root, engine(), BLOCK_TOKENS, limits(max_files)).close()
    processes = [start(root, seed, n_operations, max_files) for seed in range(n_processes)]
    doomed = [start(root, 100 + i, 10**6, max_files) for i in range(n_kills)]
    try:
        for process in doomed:
            with pytest.raises(Exception, match="timed out"):
                process.wait(chance.uniform(1.0, 2.5))
            process.kill()
            process.wait(60)
        assert [process.wait(900) for process in processes] == [0] * n_processes
    finally:
        for process in [*processes, *doomed]:
            process.kill()
            process.wait(60)
    driver = Driver(root, engine(), BLOCK_TOKENS, lossy=True)
    # They did meet: most of what was asked was found.
    assert driver.cache.stats()["hits"] > n_processes * n_operations // 10  # type: ignore[operator]
    assert not on_disk(root).leftovers
    assert on_disk(root).n_files <= max_files
    driver.assert_in_order()
    for _ in range(50):
        prompt = [*sequence(chance), 77]
        driver.engine.check(driver.namespace().restore(driver.namespace().find(prompt)), prompt)
    tokens = list(range(17))
    driver.save(tokens)
    driver.flush()
    assert driver.restore([*tokens, 1]).n_tokens == 17
    driver.assert_in_order()
    driver.close()


def test_a_process_that_comes_and_goes_leaves_the_others_their_log(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv")
    driver.save(range(9), label="a")
    driver.flush()
    entry = driver.cache.entries()[0]
    for pinned in (True, False, True):
        (driver.cache.pin if pinned else driver.cache.unpin)(entry)
        look = "import sys, rewarm; c = rewarm.open(sys.argv[1]); print([e.pinned for e in c.entries()]); c.close()"
        seen = subprocess.run([sys.executable, "-c", look, driver.root], capture_output=True, text=True, check=True)
        assert seen.stdout.strip() == f"[{pinned}]"
        assert (driver.root / "index.db-wal").exists()
    driver.close()


@pytest.mark.parametrize("max_files", [10_000, 30], ids=["roomy", "tight"])
def test_b045_processes_share_one_root(tmp_path: Path, max_files: int) -> None:
    crowd(tmp_path / "kv", n_processes=4, n_operations=2_500, max_files=max_files, n_kills=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("max_files", "n_operations"), [(10_000, 13_000), (30, 3_000)], ids=["roomy", "tight"])
def test_b045_many_processes_share_one_root(tmp_path: Path, max_files: int, n_operations: int) -> None:
    crowd(tmp_path / "kv", n_processes=8, n_operations=n_operations, max_files=max_files, n_kills=3)
