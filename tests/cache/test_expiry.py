"""Time to live: what nobody asks for is forgotten in its time, and a clock that jumps costs nobody anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rewarm.cache.expiry import DAY_S, EVEN_S, INTERVAL_S, Expiry
from rewarm.testing.driver import Driver, on_disk

START_S = 20_000 * DAY_S


class Time:
    """A wall clock and one that never jumps."""

    def __init__(self) -> None:
        self.wall_s = START_S
        self.even_s = 1000.0

    def __call__(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.even_s

    def goes_on(self, seconds: float) -> None:
        self.wall_s += seconds
        self.even_s += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def driver(tmp_path: Path, time: Time) -> Iterator[Driver]:
    driver = Driver(tmp_path / "kv", clock=time, lossy=True)
    driver.save(range(9))
    driver.save(range(100, 109), label="mine")
    driver.flush()
    yield driver
    driver.close()


@pytest.fixture
def expiry(driver: Driver, time: Time) -> Expiry:
    expiry = Expiry(driver.cache.store, time, time.monotonic)
    assert expiry.sweep(1.0) == 0
    return expiry


def labels(driver: Driver) -> list[str | None]:
    return sorted((entry.label for entry in driver.cache.entries()), key=str)


def days_go_by(expiry: Expiry, time: Time, days: float, keep_days: float | None) -> int:
    """Let time go on evenly, looking as often as the writer does; how many entries were forgotten."""
    n = 0
    for _ in range(round(days * DAY_S / (20 * INTERVAL_S))):
        time.goes_on(20 * INTERVAL_S)
        n += expiry.sweep(keep_days)
    return n


def test_entries_are_forgotten_after_so_many_days(driver: Driver, expiry: Expiry, time: Time) -> None:
    assert days_go_by(expiry, time, 2.9, keep_days=3) == 0
    driver.restore([*range(100, 109), 1])
    driver.flush()
    assert days_go_by(expiry, time, 0.5, keep_days=3) == 1
    assert labels(driver) == ["mine"]
    assert on_disk(driver.root).n_files == 3
    assert days_go_by(expiry, time, 4, keep_days=3) == 1
    assert on_disk(driver.root).n_files == 0


def test_without_a_rule_nothing_is_forgotten(driver: Driver, expiry: Expiry, time: Time) -> None:
    assert days_go_by(expiry, time, 40, keep_days=None) == 0


def test_pinned_entries_stay(driver: Driver, expiry: Expiry, time: Time) -> None:
    pinned = next(entry for entry in driver.cache.entries() if entry.label)
    driver.cache.pin(pinned)
    assert days_go_by(expiry, time, 2, keep_days=1) == 1
    assert labels(driver) == ["mine"]


def test_an_entrys_own_time_comes_before_the_models_and_the_rule(driver: Driver, expiry: Expiry, time: Time) -> None:
    mine = next(entry for entry in driver.cache.entries() if entry.label)
    driver.cache.keep(mine, 5 * DAY_S)
    driver.cache.keep(driver.namespace(), 2 * DAY_S)
    assert days_go_by(expiry, time, 1.5, keep_days=1) == 0
    assert days_go_by(expiry, time, 1, keep_days=1) == 1
    assert labels(driver) == ["mine"]
    assert days_go_by(expiry, time, 3, keep_days=None) == 1
    assert driver.cache.settings().ttls.keys() == {driver.namespace().identity.fingerprint}
    driver.cache.keep(driver.namespace(), None)
    assert driver.cache.settings().ttls == {}


@pytest.mark.parametrize("jump_s", [20_000 * DAY_S, -19_000 * DAY_S], ids=["years on", "years back"])
def test_a_clock_that_jumps_and_comes_back_costs_nothing(
    driver: Driver, expiry: Expiry, time: Time, jump_s: float
) -> None:
    time.goes_on(INTERVAL_S)
    time.wall_s += jump_s
    assert expiry.sweep(1.0) == 0
    time.wall_s -= jump_s
    time.goes_on(INTERVAL_S)
    assert expiry.sweep(1.0) == 0
    assert len(labels(driver)) == 2


def test_a_clock_that_was_wrong_at_the_start_costs_nothing(driver: Driver, time: Time) -> None:
    driver.cache.store.see(time.wall_s)
    time.wall_s += 400 * DAY_S
    expiry = Expiry(driver.cache.store, time, time.monotonic)
    assert expiry.sweep(1.0) == 0
    # A pause of that length, after all: the clock has run evenly since.
    time.goes_on(EVEN_S + INTERVAL_S)
    assert expiry.sweep(1.0) == 2


def test_times_that_make_no_sense_are_refused(driver: Driver) -> None:
    with pytest.raises(ValueError, match="0 seconds or more"):
        driver.cache.keep(driver.cache.entries()[0], -1)
    with pytest.raises(ValueError, match="fingerprint"):
        driver.cache.keep("nonsense", 1)
