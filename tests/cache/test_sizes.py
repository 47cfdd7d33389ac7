"""What entries take and share: the quick look at all of them says what the exact one says of each."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rewarm.cache.policy import Policy
from rewarm.store.entries import Entries
from rewarm.testing.driver import Driver
from rewarm.testing.fake_engine import FakeEngine, Layer, pair, recurrent, window

KINDS: dict[str, tuple[Layer, ...]] = {
    "rows": (pair(),),
    "window": (pair(1, 2), window(6, 1)),
    "hybrid": (pair(1, 2), recurrent()),
}


@pytest.mark.parametrize("thin", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_all_at_once_is_what_each_one_is(tmp_path: Path, kind: str, thin: bool, seed: int) -> None:
    chance = random.Random(seed)
    driver = Driver(tmp_path / "kv", FakeEngine(layers=KINDS[kind]), policy=Policy(thin=thin), lossy=True)
    saved: list[list[int]] = []
    for _ in range(25):
        start = chance.choice(saved) if saved and chance.random() < 0.8 else []
        start = start[: chance.randint(0, len(start))] if chance.random() < 0.3 else start
        tokens = [*start, *(chance.randint(0, 2) for _ in range(chance.randint(1, 6)))]
        driver.save(tokens, boundary=chance.choice(["assistant", "assistant", "system"]))
        driver.flush()
        saved.append(tokens)
    exact = Entries(driver.cache.store._root.reader)
    for entry in driver.cache.entries():
        key = bytes.fromhex(entry.id)
        own = [child.key for child in exact.own(key)]
        assert entry.own_nbytes == exact._index.path_nbytes(own)
        assert entry.nbytes == exact._index.path_nbytes([*exact.path([key]).union(own)])
        assert driver.cache.forget(entry, dry_run=True).nbytes == entry.own_nbytes
    driver.close()


def test_entries_say_what_they_branched_off(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv", lossy=True)
    system = list(range(10))
    driver.save(system, "system", label="system")
    for name, tokens in {
        "first": [*system, 1, 1, 1, 1, 1, 1],
        "second": [*system, 2, 2, 2, 2, 2, 2],
        "regenerated": [*system, 1, 1, 3, 3, 3, 3],
        "alone": [9, 9, 9, 9, 9],
    }.items():
        driver.flush()
        driver.save(tokens, label=name)
    driver.flush()
    entries = {entry.id: entry for entry in driver.cache.entries()}
    tree = {
        entry.label: (entries[entry.parent].label if entry.parent else None, entry.fork_tokens)
        for entry in entries.values()
    }
    assert tree == {
        "system": (None, 0),
        "first": ("system", 8),
        "second": ("system", 8),
        "regenerated": ("first", 12),
        "alone": (None, 0),
    }
    shared = {entry.label: entry.nbytes - entry.own_nbytes for entry in entries.values()}
    assert shared["alone"] == 0
    assert shared["regenerated"] > shared["second"] > 0
    driver.close()
