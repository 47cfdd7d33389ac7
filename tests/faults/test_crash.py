"""Children that save and evict are killed, at random moments and at every step of a commit; then we look.

Nothing wrong is loaded, nothing that `flush` confirmed is lost, no leftovers remain, and saving goes on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewarm.testing.crash import LAYERS, Job, Outcome, Parent, parent
from rewarm.testing.driver import Driver, on_disk

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

N_KILLS = 60
N_KILLS_LONG = 500


@pytest.fixture(scope="module")
def forker() -> Iterator[Parent]:
    with parent() as made:
        yield made


def examine(job: Job, outcome: Outcome) -> None:
    """Open what a killed child has left, as the next process does, and check all of it."""
    root = Path(job.root)
    turns = job.turns()
    if not (root / "store.json").exists():
        assert outcome.confirmed == 0
    driver = Driver(root, job.engine(), 4, job.limits(), lossy=True)
    # Opening has finished what was begun: looked at before anything else is done.
    assert not on_disk(root).leftovers
    for tokens in turns:
        driver.perfect.save((0, b""), tokens, driver.engine.state(tokens))
    restored = [driver.restore([*tokens, 1]).n_tokens for tokens in turns]
    if outcome.confirmed:
        kept = range(outcome.confirmed) if job.max_files is None else [outcome.confirmed - 1]
        for turn in kept:
            assert restored[turn] == len(turns[turn]), f"turn {turn} was confirmed and is lost"
    driver.assert_in_order()
    # And it goes on: the same turns again, and all that a limit leaves room for is there.
    driver.lossy = job.max_files is not None
    for tokens in turns:
        assert driver.save(tokens).reason is None
        driver.flush()
        assert driver.restore([*tokens, 1]).n_tokens == len(tokens)
    driver.assert_in_order()
    driver.close()
    assert on_disk(root).leftovers == ()
    assert not list((root / "tmp").iterdir())


def random_job(tmp_path: Path, seed: int, took_s: float) -> Job:
    """A job that is killed within the time that such work takes."""
    chance = random.Random(seed)
    return Job(
        str(tmp_path / f"kv-{seed}"),
        chance.choice(list(LAYERS)),
        seed,
        n_turns=12,
        max_files=chance.choice([None, 16, 24]),
        kill_after_s=chance.uniform(0.0, took_s),
        helped=chance.random() < 0.5,
    )


def killed_at_random(forker: Parent, tmp_path: Path, seeds: range) -> None:
    n_killed, n_confirmed = 0, 0
    whole = [forker.run(Job(str(tmp_path / f"whole-{i}"), seed=i, n_turns=12)) for i in range(2)]
    took_s = min(outcome.took_s for outcome in whole)
    for seed in seeds:
        job = random_job(tmp_path, seed, took_s)
        outcome = forker.run(job)
        assert outcome.killed or outcome.status == 0, f"seed {seed}: {outcome}"
        n_killed += outcome.killed
        n_confirmed += outcome.confirmed
        try:
            examine(job, outcome)
        except BaseException:
            print(f"seed {seed}: {job} {outcome}")
            raise
    assert n_killed >= len(seeds) // 2
    assert n_confirmed


def test_b057_killed_at_random_moments(forker: Parent, tmp_path: Path) -> None:
    killed_at_random(forker, tmp_path, range(N_KILLS))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_b057_killed_at_many_random_moments(forker: Parent, tmp_path: Path) -> None:
    killed_at_random(forker, tmp_path, range(1000, 1000 + N_KILLS_LONG))


def killed_at_every_step(forker: Parent, tmp_path: Path, template: Job, every: int = 1) -> None:
    whole = forker.run(template)
    assert whole.status == 0
    assert whole.n_operations > 10
    for step in range(0, whole.n_operations, every):
        job = Job(**(template.__dict__ | {"root": str(tmp_path / f"kv-{step}"), "kill_at": step}))
        outcome = forker.run(job)
        assert outcome.killed, f"step {step}"
        try:
            examine(job, outcome)
        except BaseException:
            print(f"step {step} of {whole.n_operations}: {job} {outcome}")
            raise


@pytest.mark.parametrize("helped", [False, True], ids=["alone", "helped"])
def test_b057_killed_at_every_step_of_three_saves_with_eviction(forker: Parent, tmp_path: Path, helped: bool) -> None:
    job = Job(str(tmp_path / "whole"), "rows", seed=7, n_turns=3, max_files=4, helped=helped)
    killed_at_every_step(forker, tmp_path, job, every=2 if helped else 1)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", LAYERS)
def test_b057_killed_at_every_step(forker: Parent, tmp_path: Path, kind: str) -> None:
    killed_at_every_step(forker, tmp_path, Job(str(tmp_path / "whole"), kind, seed=3, n_turns=8, max_files=16))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_conversation_is_forgotten_by_the_next_open_when_the_process_dies_over_it(
    forker: Parent, tmp_path: Path, kind: str
) -> None:
    n_dead = 0
    for step in range(10):
        job = Job(str(tmp_path / f"kv-{step}"), kind, seed=5, n_turns=1, kill_in="unlink", kill_at=step, forget=True)
        outcome = forker.run(job)
        n_dead += outcome.killed
        (tokens,) = job.turns()
        driver = Driver(Path(job.root), job.engine(), 4, lossy=True)
        assert driver.namespace().find([*tokens, 1]).n_tokens == 0
        assert driver.cache.entries() == []
        assert on_disk(driver.root).n_files == 0
        driver.assert_in_order()
        driver.close()
        if not outcome.killed:
            break
    assert n_dead >= 2


def test_a_dead_process_holds_no_forgetting_up(tmp_path: Path) -> None:
    """The same tokens sent again are a new conversation, though a process died before it took note."""
    driver = Driver(tmp_path / "kv")
    index = driver.cache.store._root.index
    with index.transaction():
        index.note_forgets("d" * 16, 0)
    driver.save(range(9))
    driver.flush()
    driver.cache.forget(driver.cache.entries()[0])
    driver.flush()
    assert driver.save(range(9)).queued
    driver.flush()
    assert driver.restore(range(10)).n_tokens == 9
    driver.close()


def test_a_living_process_that_has_not_taken_note_does(tmp_path: Path) -> None:
    """Nobody writes a forgotten record again before every living process has heard of it; then it may come back."""
    one, two = Driver(tmp_path / "kv", lossy=True), Driver(tmp_path / "kv", lossy=True)
    for driver in (one, two):
        driver.perfect.save((0, b""), range(9), driver.engine.state(range(9)))
    two.save(range(9))
    two.flush()
    one.cache.forget(one.cache.entries()[0])
    assert two.namespace().find(range(10)).n_tokens == 0
    two.flush()
    one.flush()
    assert two.save(range(9)).queued
    two.flush()
    assert one.restore(range(10)).n_tokens == 9
    one.close()
    two.close()


def test_b062_leftovers_of_dead_processes_are_removed_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv")
    tmp = driver.root / "tmp"
    (tmp / f"{'0' * 16}-3.tmp").write_bytes(b"x" * 5000)
    (tmp / f"{'1' * 16}.lock").write_bytes(b"")
    other = Driver(tmp_path / "kv")
    assert not list(tmp.glob("0000*")) + list(tmp.glob("1111*"))
    assert len(list(tmp.glob("*.lock"))) == 2
    driver.save(range(9))
    driver.flush()
    assert other.namespace().find(range(10)).n_tokens == 9
    other.close()
    driver.close()
    assert list(tmp.iterdir()) == []
