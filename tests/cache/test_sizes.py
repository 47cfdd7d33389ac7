"""What entries take and share: the quick look at all of them says what the exact one says of each."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rewarm.cache.policy import Policy
from rewarm.store.entries import Entries
from rewarm.testing.driver import Driver, on_disk
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


@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "one-by-one"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_several_forgotten_at_once_are_their_exact_union(tmp_path: Path, kind: str, seed: int, at_once: bool) -> None:
    chance = random.Random(seed)
    driver = Driver(tmp_path / "kv", FakeEngine(layers=KINDS[kind]), policy=Policy(thin=seed % 2 == 0), lossy=True)
    saved: list[list[int]] = []
    for _ in range(20):
        start = chance.choice(saved) if saved and chance.random() < 0.9 else []
        start = start[: chance.randint(0, len(start))] if chance.random() < 0.4 else start
        tokens = [*start, *(chance.randint(0, 2) for _ in range(chance.randint(1, 9)))]
        driver.save(tokens, boundary=chance.choice(["assistant", "assistant", "system"]))
        driver.flush()
        saved.append(tokens)
    while entries := driver.cache.entries():
        some = chance.sample(entries, min(len(entries), chance.randint(1, 4)))
        told = driver.cache.forget(*some, dry_run=True)
        assert driver.cache.forget(*reversed(some), *some, dry_run=True) == told
        before = on_disk(driver.root)
        assert {each.id for each in driver.cache.entries()} == {each.id for each in entries}
        if at_once:
            assert driver.cache.forget(*some) == told
        else:
            one_by_one = [driver.cache.forget(each) for each in some]
            assert sum(each.nbytes for each in one_by_one) == told.nbytes
        after = on_disk(driver.root)
        assert (before.n_files - after.n_files) == told.n_files
        assert {each.id for each in driver.cache.entries()} == {e.id for e in entries} - {e.id for e in some}
    assert on_disk(driver.root).records == ()
    assert driver.cache.verify().is_clean
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
