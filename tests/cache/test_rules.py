"""The rules that a user can switch: what they hold back, and that a change takes effect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import rewarm
from rewarm.cache.policy import Policy, read_policy
from rewarm.state.reason import Dropped
from rewarm.store.thin import kept
from rewarm.testing.driver import Driver, on_disk
from rewarm.testing.fake_engine import FakeEngine, Layer, pair, recurrent, window
from waiting import until

DAY_S = 86_400.0

HYBRID: tuple[Layer, ...] = (pair(1, 2), recurrent())
SLIDING: tuple[Layer, ...] = (pair(1, 2), window(6, 1))


class Clock:
    """Seconds since 1970 that stand still."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock(100 * DAY_S + 5)


@pytest.fixture
def driver(tmp_path: Path, clock: Clock) -> Iterator[Driver]:
    driver = Driver(tmp_path / "kv", clock=clock, lossy=True)
    yield driver
    driver.close()


def change(driver: Driver, policy: Policy) -> None:
    """Change the rules, and wait until the writer has seen them."""
    driver.cache.set_policy(policy)
    until(lambda: driver.cache._writer.policy() == policy)


def test_shorter_states_than_the_minimum_are_counted_and_not_saved(driver: Driver) -> None:
    change(driver, Policy(min_tokens=10))
    report = driver.save(range(9))
    assert (report.queued, report.reason) == (False, Dropped.TOO_SHORT)
    assert driver.save(range(10)).reason is None
    driver.flush()
    assert driver.restore(range(11)).n_tokens == 10
    assert driver.cache.stats()["dropped_saves"] == {"too_short": 1}


def test_with_second_sight_a_prefix_is_written_when_it_is_saved_again(driver: Driver) -> None:
    change(driver, Policy(second_sight=True))
    report = driver.save(range(11))
    driver.flush()
    assert report.reason is Dropped.FIRST_SIGHT
    assert on_disk(driver.root).n_files == 0
    # A second conversation with the same first block: that block is written, what follows is new.
    driver.save([*range(4), *range(50, 60)])
    driver.flush()
    assert driver.restore(range(12)).n_tokens == 4
    driver.save(range(11))
    driver.flush()
    assert driver.restore(range(12)).n_tokens == 11
    assert driver.cache.stats()["dropped_saves"] == {"first_sight": 2}


def test_what_was_seen_once_is_remembered_after_a_restart(driver: Driver) -> None:
    change(driver, Policy(second_sight=True))
    driver.save(range(11))
    driver.flush()
    driver.reopen()
    driver.save(range(11))
    driver.flush()
    assert driver.restore(range(12)).n_tokens == 11


def test_b112_a_write_budget_holds_for_a_day(driver: Driver, clock: Clock) -> None:
    driver.save(range(100, 140))
    driver.flush()
    written = driver.cache.stats()["bytes_written_today"]
    assert isinstance(written, int)
    assert written > 0
    change(driver, Policy(write_bytes_per_day=written + 300))
    report = driver.save(range(40))
    driver.flush()
    assert report.reason is Dropped.WRITE_BUDGET
    stored = driver.restore(range(41)).n_tokens
    assert stored < 40
    clock.now_s += DAY_S
    driver.save(range(40))
    driver.flush()
    assert driver.restore(range(41)).n_tokens > stored
    clock.now_s += DAY_S
    assert driver.cache.stats()["bytes_written_today"] == 0


@pytest.mark.parametrize("jump_s", [-20_000 * DAY_S, -1.0, 20_000 * DAY_S])
def test_a_clock_that_jumps_harms_nothing(driver: Driver, clock: Clock, jump_s: float) -> None:
    driver.save(range(9))
    driver.flush()
    clock.now_s += jump_s
    driver.save(range(100, 113))
    driver.flush()
    driver.reopen()
    assert driver.restore(range(10)).n_tokens == 9
    assert driver.restore(range(100, 114)).n_tokens == 13


def test_rules_survive_a_restart_and_unknown_ones_do_no_harm(driver: Driver) -> None:
    change(driver, Policy(min_tokens=7, thin=False))
    driver.reopen()
    assert driver.cache.policy() == Policy(min_tokens=7, thin=False)
    assert read_policy({"min_tokens": "many", "of_a_later_version": 1}) == Policy()


def test_a_stored_rule_that_makes_no_sense_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    wrong = {"paused": "yes", "save_at": "noon", "thin": 1, "min_tokens": -3, "keep_days": 2, "of_a_later_version": 1}
    for _ in range(3):
        assert read_policy(wrong) == Policy(keep_days=2)
    told = sorted(record.args[0] for record in caplog.records if isinstance(record.args, tuple))
    assert told == ["min_tokens", "paused", "save_at", "thin"]


def test_every_rule_is_kept_and_read_again(driver: Driver) -> None:
    policy = Policy(load="always", min_tokens=3, second_sight=True, write_bytes_per_day=5, keep_days=1.5, thin=False)
    policy = replace(policy, paused=True, save_at="unload")
    change(driver, policy)
    driver.reopen()
    assert driver.cache.policy() == policy


@pytest.mark.parametrize("policy", [Policy(min_tokens=-1), Policy(write_bytes_per_day=-1)])
def test_rules_that_make_no_sense_are_refused(driver: Driver, policy: Policy) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        driver.cache.set_policy(policy)


def test_points_that_are_kept() -> None:
    points = list(range(10, 210, 10))
    assert kept(points, 200) == {200, 190, 180, 170, 100, 50, 20}
    assert kept([5], 5) == {5}
    assert kept([], 9) == set()


@pytest.mark.parametrize("layers", [HYBRID, SLIDING], ids=["hybrid", "sliding"])
def test_b132_a_long_conversation_keeps_few_points(tmp_path: Path, layers: tuple[Layer, ...]) -> None:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=layers), policy=Policy(), lossy=True)
    tokens = list(range(5))
    driver.save(tokens, "system")
    driver.flush()
    ends = [5]
    for turn in range(20):
        tokens += [1000 * turn + i for i in range(7)]
        driver.save(tokens)
        driver.flush()
        ends.append(len(tokens))
        assert driver.restore([*tokens, 1]).n_tokens == len(tokens)
    points = [path for path in on_disk(driver.root).records if path.suffix == ".point"]
    # The newest four, three older ones and the system's; a window's runs reach over at most four more each.
    assert len(points) <= 8 if layers is HYBRID else len(points) <= 8 * 5
    found = {driver.restore([*tokens[:end], 5, 6]).n_tokens for end in ends}
    assert {5, ends[-1], ends[-2], ends[-3], ends[-4]} <= found
    driver.assert_in_order()
    driver.close()


def test_thinning_leaves_other_conversations_alone(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=HYBRID), policy=Policy(), lossy=True)
    shared = list(range(9))
    other = [*shared, 500, 501]
    driver.save(other)
    driver.flush()
    tokens = list(shared)
    for turn in range(15):
        tokens += [turn, 1, 2]
        driver.save(tokens)
        driver.flush()
    assert driver.restore([*other, 1]).n_tokens == len(other)
    driver.assert_in_order()
    driver.close()


def test_how_long_prefill_takes_is_known_after_a_restart(tmp_path: Path) -> None:
    model, other = rewarm.Identity({"a": 1}), rewarm.Identity({"a": 2})
    with rewarm.open(tmp_path / "kv") as cache:
        assert cache.prefill_s(model, 100) is None
        cache.note_prefill(model, 200, 4.0)
        cache.note_prefill(model, 200, 2.0)
        cache.note_prefill(model, 0, 2.0)
        assert cache.prefill_s(model, 100) == pytest.approx(1.5)
        assert cache.flush()
        assert cache.prefill_s(model, 100) == pytest.approx(1.5)
    with rewarm.open(tmp_path / "kv") as cache:
        assert cache.prefill_s(model, 100) == pytest.approx(1.5)
        assert cache.prefill_s(other, 100) is None
