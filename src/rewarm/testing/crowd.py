"""Several processes at work on one root: each saves, finds, restores and checks; some are killed.

`python -m rewarm.testing.crowd ROOT SEED N_OPERATIONS MAX_FILES` is one of them. It ends with status 0 when
every state that it restored was right. The sequences are few, so that processes meet on the same records.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from rewarm.store.settings import Limits
from rewarm.testing.crash import BLOCK_TOKENS, LAYERS
from rewarm.testing.driver import ROOMY, Driver
from rewarm.testing.fake_engine import FakeEngine


def limits(max_files: int) -> Limits:
    """The limits of the crowd's root."""
    return Limits(max_bytes=ROOMY.max_bytes, max_files=max_files, min_free_bytes=0)


def sequence(chance: random.Random) -> list[int]:
    """One of the token sequences that all processes use."""
    return [chance.randrange(4), *range(chance.randrange(1, 24))]


def engine() -> FakeEngine:
    """The engine of all processes."""
    return FakeEngine(layers=LAYERS["window"])


def work(root: Path, seed: int, n_operations: int, max_files: int) -> None:
    """Do `n_operations` random operations; any wrong state raises."""
    chance = random.Random(seed)  # noqa: S311  # not for secrets
    driver = Driver(root, engine(), BLOCK_TOKENS, limits(max_files), lossy=True)
    namespace = driver.namespace()
    for _ in range(n_operations):
        tokens, dice = sequence(chance), chance.random()
        if dice < 0.5:
            namespace.save(tokens, driver.engine.state(tokens))
        elif dice < 0.97:
            prompt = [*tokens, 77]
            driver.engine.check(namespace.restore(namespace.find(prompt)), prompt)
        elif dice < 0.99:
            driver.flush()
        else:
            for entry in driver.cache.entries()[:1]:
                driver.cache.forget(entry)
    driver.flush()
    driver.close()


def start(root: Path, seed: int, n_operations: int, max_files: int) -> subprocess.Popen[bytes]:
    """Start one process of the crowd."""
    numbers = [str(number) for number in (seed, n_operations, max_files)]
    return subprocess.Popen([sys.executable, "-m", "rewarm.testing.crowd", str(root), *numbers])  # noqa: S603


if __name__ == "__main__":
    work(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
