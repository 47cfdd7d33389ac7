"""Every miss says why, with its evidence; the counters say so too."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import rewarm
from rewarm.state.reason import Reason
from rewarm.store.settings import Limits
from rewarm.testing.driver import Driver, on_disk
from rewarm.testing.fake_engine import FakeEngine, pair, recurrent


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=(pair(),)))
    yield driver
    driver.close()


def test_a_hit_is_all_that_was_asked(driver: Driver) -> None:
    driver.save(range(9))
    driver.flush()
    assert driver.find(range(10)).reason is Reason.HIT
    assert driver.find(range(5)).reason is Reason.HIT
    assert driver.find(range(30), at_most=9).reason is Reason.HIT


def test_nothing_stored(driver: Driver) -> None:
    assert driver.find(range(10)).reason is Reason.NOTHING_STORED
    driver.save(range(9))
    driver.flush()
    # All that was stored is found, and it ends there.
    match = driver.find(range(20))
    assert (match.n_tokens, match.reason) == (9, Reason.NOTHING_STORED)
    assert driver.cache.stats()["misses"] == {"nothing_stored": 1}


def test_a_save_that_was_not_written_is_named(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv", lossy=True)
    before = driver.cache.settings().limits
    driver.cache.set_limits(Limits(max_bytes=10_000))
    driver.save(range(9))
    driver.flush()
    match = driver.find(range(12))
    assert (match.reason, match.detail["dropped"], match.detail["dropped_tokens"]) == (
        Reason.NOTHING_STORED,
        "too_large",
        9,
    )
    explained = driver.cache.explain(range(12), driver.namespace().identity)
    assert explained.sentence().endswith("A save of 9 tokens of it was not written: too_large.")
    # Neither another conversation's, nor another tenant's, nor once it is there, nor once it is forgotten.
    assert "dropped" not in driver.find(range(50, 60)).detail
    assert "dropped" not in driver.find(range(12), owner=(0, b"tenant")).detail
    assert "dropped" not in driver.find(range(12), owner=(1, b"")).detail
    driver.cache.set_limits(before)
    driver.save(range(9))
    driver.flush()
    assert driver.find(range(12)).n_tokens == 9
    assert "dropped" not in driver.find(range(12)).detail
    driver.close()


def test_b146_a_divergence_names_the_token_and_its_position(driver: Driver) -> None:
    driver.save(range(9))
    driver.flush()
    match = driver.find([0, 1, 2, 3, 4, 55, 6])
    assert (match.n_tokens, match.reason) == (5, Reason.DIVERGED)
    assert match.detail == {"at": 5, "asked_token": 55, "stored_token": 5}
    match = driver.find([77, 1])
    assert (match.n_tokens, match.reason) == (0, Reason.DIVERGED)
    assert match.detail == {"at": 0, "asked_token": 77, "stored_token": 0}


def test_no_restore_point(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=(pair(), recurrent())))
    driver.save(range(9))
    driver.flush()
    match = driver.find(range(6))
    assert (match.n_tokens, match.reason) == (0, Reason.NO_RESTORE_POINT)
    driver.close()


def test_evicted(tmp_path: Path) -> None:
    limits = Limits(max_bytes=2**40, max_files=6, min_free_bytes=0)
    driver = Driver(tmp_path / "kv", FakeEngine(layers=(pair(),)), limits=limits, lossy=True)
    for i in range(6):
        driver.save(range(100 * i, 100 * i + 9))
        driver.flush()
    match = driver.find(range(10))
    assert (match.n_tokens, match.reason) == (0, Reason.EVICTED)
    driver.close()


def test_corrupt(driver: Driver) -> None:
    driver.save(range(9))
    driver.flush()
    for path in on_disk(driver.root).records:
        path.write_bytes(b"bad")
    driver.lossy = True
    state = driver.restore(range(10))
    assert (state.n_tokens, state.reason) == (0, Reason.CORRUPT)
    assert driver.cache.stats()["misses"] == {"corrupt": 1}


def test_identity_changed_names_the_fields(tmp_path: Path) -> None:
    cache = rewarm.open(tmp_path / "kv", block_tokens=4)
    fields: dict[str, object] = {"weights": "a" * 64, "kv bits": 16, "engine": "fake"}
    state = FakeEngine(layers=(pair(),)).state(range(9))
    cache.namespace(rewarm.Identity(fields, name="my model")).save(range(9), state)
    assert cache.flush()
    changed = cache.namespace(rewarm.Identity(fields | {"kv bits": 8}, name="my model"))
    match = changed.find(range(10))
    assert (match.n_tokens, match.reason) == (0, Reason.IDENTITY_CHANGED)
    assert match.detail == {"fields": "kv bits"}
    # Another model altogether is no change of this one.
    other = cache.namespace(rewarm.Identity(fields | {"kv bits": 8}, name="another model"))
    assert other.find(range(10)).reason is Reason.NOTHING_STORED
    cache.close()


def test_timeout_when_the_index_is_held(driver: Driver) -> None:
    driver.save(range(9))
    driver.flush()
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with driver.cache.store.looking(5.0):
            held.set()
            free.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    match = driver.namespace().find(range(10))
    free.set()
    holder.join()
    assert (match.n_tokens, match.reason) == (0, Reason.TIMEOUT)
    assert driver.find(range(10)).n_tokens == 9


def test_a_restore_gives_up_at_its_deadline(driver: Driver) -> None:
    driver.save(range(9))
    driver.flush()
    state = driver.namespace().restore(driver.find(range(10)), deadline=-1.0)
    assert (state.n_tokens, state.tensors, state.reason) == (0, {}, Reason.TIMEOUT)
    assert driver.restore(range(10)).n_tokens == 9


def test_another_program_that_locks_the_index_is_no_exception(driver: Driver) -> None:
    driver.save(range(9))
    driver.flush()
    with sqlite3.connect(driver.root / "index.db", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        # Readers go on in SQLite's log mode; saves wait in the queue.
        assert driver.find(range(10)).n_tokens == 9
        report = driver.save(range(50, 59))
        assert report.queued
        assert not report.done
        other.execute("ROLLBACK")
    other.close()
    assert driver.cache.flush(60)
    assert report.reason is None
    assert driver.restore(range(50, 60)).n_tokens == 9


def test_b149_counters_add_up(driver: Driver) -> None:
    driver.save(range(9))
    driver.flush()
    n = sum(driver.restore(prompt).n_tokens for prompt in (range(10), range(5), [9, 9], range(20)))
    stats = driver.cache.stats()
    assert n == 9 + 4 + 0 + 9
    assert stats["tokens_restored"] == n
    assert stats["hits"] == 3
    assert stats["misses"] == {"diverged": 1}
    driver.flush()
    driver.reopen()
    again = driver.cache.stats()
    assert (again["tokens_restored"], again["hits"], again["misses"]) == (n, 3, {"diverged": 1})


def test_b151_bytes_used_are_those_on_the_disk(driver: Driver) -> None:
    for i in range(5):
        driver.save(range(100 * i, 100 * i + 13))
    driver.flush()
    stats = driver.cache.stats()
    found = on_disk(driver.root)
    assert stats["files_used"] == found.n_files
    assert stats["bytes_used"] == found.nbytes


def test_find_writes_nothing(driver: Driver) -> None:
    driver.save(range(9))
    driver.flush()

    def everything() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in on_disk(driver.root).records}

    before = everything()
    for prompt in (range(10), [5], range(3)):
        driver.find(prompt)
    assert everything() == before


def test_what_explain_says_is_what_find_says(driver: Driver) -> None:
    driver.save(range(9))
    driver.flush()
    told = driver.cache.explain([0, 1, 2, 9], driver.namespace().identity)
    assert (told.n_tokens, told.reason) == (3, Reason.HIT)
    told = driver.cache.explain([0, 1, 2, 9, 9], driver.namespace().identity)
    assert (told.n_tokens, told.reason) == (3, Reason.DIVERGED)
