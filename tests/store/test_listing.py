"""Lists of entries: the quick way to their sizes gives what the exact way gives."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rewarm.testing.driver import Driver
from rewarm.testing.fake_engine import FakeEngine, pair, recurrent, window

ENGINES = {
    "rows": FakeEngine(),
    "windows": FakeEngine(layers=(pair(), window(6, 2))),
    "states": FakeEngine(layers=(pair(), recurrent())),
}


def grown(driver: Driver, seed: int, n_saves: int = 40) -> None:
    """Conversations that fork at random places: inside blocks, at their edges, at ends of others."""
    draw = random.Random(seed)
    told: list[list[int]] = [[1, 2, 3, 4, 5, 6]]
    for number in range(n_saves):
        base = draw.choice(told)
        tokens = base[: draw.randint(1, len(base))] + [draw.randint(0, 3) for _ in range(draw.randint(0, 14))]
        label = draw.choice([None, None, f"chat-{number % 7}"])
        driver.save(tokens, draw.choice(["assistant", "assistant", "system"]), label)
        told.append(tokens)
    driver.flush()


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("seed", range(6))
def test_sizes_in_one_pass_are_the_exact_ones(tmp_path: Path, engine: FakeEngine, seed: int) -> None:
    driver = Driver(tmp_path / "kv", engine)
    grown(driver, seed)
    exact = driver.cache.entries()
    listing = driver.cache.store.listing()
    assert listing.sizes() == {entry.id: (entry.nbytes, entry.own_nbytes) for entry in exact}
    assert listing.sized(listing.all()) == exact
    driver.close()


def test_sizes_stay_exact_after_eviction_and_forgetting(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv", lossy=True)
    grown(driver, 7)
    driver.cache.forget(driver.cache.entries()[3])
    from rewarm import Limits

    used = driver.cache.stats()["files_used"]
    assert isinstance(used, int)
    driver.cache.set_limits(Limits(max_files=used * 2 // 3))
    exact = driver.cache.entries()
    assert exact
    assert driver.cache.store.listing().sizes() == {entry.id: (entry.nbytes, entry.own_nbytes) for entry in exact}
    driver.close()


def test_a_path_begins_at_the_first_block_and_ends_at_the_entry(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv")
    driver.save(range(10), label="a")
    driver.save([*range(8), 90, 91, 92, 93, 94], label="b")
    driver.flush()
    listing = driver.cache.store.listing()
    ids = {entry.label: entry.id for entry in listing.all()}
    a, b = listing.path(ids["a"]), listing.path(ids["b"])
    assert [(step.n, step.is_point) for step in a] == [(4, False), (8, False), (10, True)]
    assert [(step.n, step.is_point) for step in b] == [(4, False), (8, False), (12, False), (13, True)]
    assert a[:2] == b[:2] and a[2].key != b[2].key
    assert listing.path("00" * 16) == []
    driver.close()
