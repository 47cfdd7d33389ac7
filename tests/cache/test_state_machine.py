"""A hypothesis state machine drives the cache beside the perfect model.

While nothing is taken away, what is found equals the model's answer; once something is evicted, forgotten or
damaged, the model is an upper bound. Everything restored is checked bit for bit, always.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rewarm.cache.policy import Policy
from rewarm.state.chain import as_tokens
from rewarm.store.settings import Limits
from rewarm.testing.driver import ROOMY, Driver, holes, on_disk
from rewarm.testing.fake_engine import FakeEngine, latent, pair, recurrent, triple, window

ENGINES = {
    "rows": FakeEngine(layers=(pair(),)),
    "latent and triple": FakeEngine(layers=(latent(), triple())),
    "rows and window": FakeEngine(layers=(pair(1, 2), window(5, 1))),
    "windows": FakeEngine(layers=(window(9), window(3))),
    "hybrid": FakeEngine(layers=(pair(1, 2), recurrent((2,)), window(4))),
    "recurrent": FakeEngine(layers=(recurrent((2,)),)),
    "quantised from 6": FakeEngine(layers=(pair(1, 2),), quantise_from=6, quantised=(triple(1, 2),)),
}
OWNERS = [(0, b""), (1, b""), (0, b"tenant")]
TOKENS = st.lists(st.integers(0, 2), max_size=9)


class CacheMachine(RuleBasedStateMachine):
    """Random conversations, branches, cuts, reopenings, damage, evictions."""

    conversations = Bundle("conversations")

    @initialize(
        kind=st.sampled_from(list(ENGINES)),
        size=st.integers(1, 8),
        max_files=st.one_of(st.just(10**6), st.integers(2, 12)),
        thin=st.booleans(),
        target=conversations,
    )
    def begin(self, kind: str, size: int, max_files: int, thin: bool) -> tuple[int, ...]:
        self.folder = Path(tempfile.mkdtemp(prefix="rewarm-machine-"))
        limits = Limits(max_bytes=ROOMY.max_bytes, max_files=max_files, min_free_bytes=0)
        self.driver = Driver(
            self.folder / "kv", ENGINES[kind], block_tokens=size, limits=limits, policy=Policy(thin=thin)
        )
        # Thinning takes restore points of layouts that are not rows alone.
        thins = thin and kind not in ("rows", "latent and triple", "quantised from 6")
        self.driver.lossy = thins or max_files < 10**6
        self.damaged = False
        return ()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.close()
            shutil.rmtree(self.folder)

    @rule(
        start=conversations,
        keep=st.integers(0, 20),
        more=TOKENS,
        boundary=st.sampled_from(["assistant", "assistant", "user", "system", "prefill"]),
        label=st.sampled_from([None, None, "a"]),
        owner=st.sampled_from(OWNERS),
        target=conversations,
    )
    def save(
        self,
        start: tuple[int, ...],
        keep: int,
        more: list[int],
        boundary: str,
        label: str | None,
        owner: tuple[int, bytes],
    ) -> tuple[int, ...]:
        tokens = (*start[:keep], *more)[:40]
        self.driver.save(tokens, boundary, label, owner)
        return tokens

    @rule(start=conversations, keep=st.integers(0, 40), more=TOKENS, owner=st.sampled_from(OWNERS))
    def restore(self, start: tuple[int, ...], keep: int, more: list[int], owner: tuple[int, bytes]) -> None:
        self.driver.flush()
        self.driver.restore([*start[:keep], *more], owner=owner)

    @rule(start=conversations, at_most=st.integers(0, 40), owner=st.sampled_from(OWNERS))
    def restore_at_most(self, start: tuple[int, ...], at_most: int, owner: tuple[int, bytes]) -> None:
        self.driver.flush()
        self.driver.restore([*start, 0], at_most, owner)

    @rule()
    def reopen(self) -> None:
        self.driver.reopen()

    @rule()
    def lose_the_index(self) -> None:
        self.driver.close()
        for path in self.driver.root.glob("index.db*"):
            path.unlink()
        self.driver.open()

    @rule()
    def repair(self) -> None:
        self.driver.cache.repair()

    @rule(
        which=st.integers(0, 2**16),
        at=st.integers(0, 2**32),
        bit=st.integers(0, 7),
        size=st.sampled_from([1, 1, 64, 65536]),
    )
    def damage(self, which: int, at: int, bit: int, size: int) -> None:
        self.driver.flush()
        records = on_disk(self.driver.root).records
        if not records:
            return
        path = records[which % len(records)]
        data = bytearray(path.read_bytes())
        at %= len(data)
        data[at : at + size] = bytes(byte ^ (1 << bit) for byte in data[at : at + size])
        path.write_bytes(data)
        self.driver.lossy = self.damaged = True

    @rule(which=st.integers(0, 2**16))
    def remove_a_record(self, which: int) -> None:
        self.driver.flush()
        records = on_disk(self.driver.root).records
        if records:
            records[which % len(records)].unlink()
            self.driver.lossy = self.damaged = True

    @rule(max_files=st.integers(0, 12))
    def lower_the_limit(self, max_files: int) -> None:
        self.driver.flush()
        self.driver.cache.set_limits(Limits(max_files=max_files))
        self.driver.lossy = True

    @rule()
    def lift_the_limit(self) -> None:
        self.driver.cache.set_limits(Limits(max_files=10**6))

    @rule(which=st.integers(0, 2**16))
    def pin(self, which: int) -> None:
        self.driver.flush()
        entries = self.driver.cache.entries()
        if entries:
            assert self.driver.cache.pin(entries[which % len(entries)])

    @rule(which=st.integers(0, 2**16))
    def unpin(self, which: int) -> None:
        entries = self.driver.cache.entries()
        if entries:
            assert self.driver.cache.unpin(entries[which % len(entries)])

    @rule(which=st.integers(0, 2**16))
    def forget(self, which: int) -> None:
        self.driver.flush()
        entries = self.driver.cache.entries()
        if entries:
            entry = entries[which % len(entries)]
            told = self.driver.cache.forget(entry, dry_run=True)
            before = on_disk(self.driver.root)
            assert self.driver.cache.forget(entry) == told
            if not self.damaged:
                assert before.n_files - on_disk(self.driver.root).n_files == told.n_files
            assert entry.id not in {other.id for other in self.driver.cache.entries()}
            self.driver.lossy = True

    @rule()
    def clear(self) -> None:
        self.driver.cache.clear()
        assert on_disk(self.driver.root).n_files == 0
        assert self.driver.cache.entries() == []
        for owner in OWNERS:
            self.driver.perfect.forget(owner)
            assert self.driver.restore([0, 1, 2, 0], owner=owner).n_tokens == 0

    @precondition(lambda self: hasattr(self, "driver"))
    @invariant()
    def within_limits_and_whole(self) -> None:
        self.driver.flush()
        found = on_disk(self.driver.root)
        assert not found.leftovers
        if not self.damaged:
            assert self.driver.cache.verify().is_clean
            assert holes(self.driver.root) == []
            assert self.driver.cache.stats()["files_used"] == found.n_files
        limit = self.driver.cache.settings().limits.max_files or 0
        if not any(entry.pinned for entry in self.driver.cache.entries()):
            assert found.n_files <= limit
        for entry in self.driver.cache.entries():
            assert entry.n_tokens > 0
            assert entry.nbytes >= 0
            assert entry.own_nbytes >= 0


# Explaining a failure takes minutes.
PHASES = [phase for phase in Phase if phase is not Phase.explain]
COMMON = {"phases": PHASES, "deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


def test_random_histories() -> None:
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=50, stateful_step_count=25, **COMMON))


@pytest.mark.long
def test_many_random_histories() -> None:
    run_state_machine_as_test(CacheMachine, settings=settings(max_examples=600, stateful_step_count=40, **COMMON))


def test_the_machine_would_see_a_wrong_row() -> None:
    """The checks bite: a state of other tokens does not pass."""
    engine = ENGINES["rows"]
    with pytest.raises(AssertionError):
        engine.check(engine.state([1, 2, 4]), as_tokens([1, 2, 3]))
