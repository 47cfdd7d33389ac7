"""What the machine has of memory bounds the queue and restores."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from rewarm.cache import memory
from rewarm.state.reason import Reason
from rewarm.state.sequence import Opaque
from rewarm.testing.driver import Driver
from rewarm.testing.fake_engine import FakeEngine, pair, recurrent, window

MIB = 2**20


def test_free_memory_is_part_of_all_memory() -> None:
    total, free = memory.total_memory(), memory.free_memory()
    assert total is not None and free is not None
    assert 0 < free <= total


@pytest.mark.parametrize(
    ("total", "limit"), [(None, 256), (1024, 256), (8192, 512), (16384, 1024), (65536, 2048)], ids=str
)
def test_the_queue_takes_a_sixteenth_within_bounds(
    total: int | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "total_memory", lambda: None if total is None else total * MIB)
    assert memory.queue_limit() == limit * MIB


def test_a_system_that_does_not_tell_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> object:
        raise psutil.Error("not here")

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    assert (memory.total_memory(), memory.free_memory(), memory.queue_limit()) == (None, None, 256 * MIB)
    driver = Driver(tmp_path / "kv")
    driver.save(range(9))
    driver.flush()
    assert driver.restore(range(10)).n_tokens == 9
    driver.close()


def test_more_than_is_free_is_refused_before_it_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tmp_path / "kv", lossy=True)
    driver.save(range(9))
    driver.flush()
    match = driver.find(range(10))
    monkeypatch.setattr("rewarm.cache.namespace.free_memory", lambda: match.nbytes - 1)
    state = driver.namespace().restore(match)
    assert (state.n_tokens, state.reason) == (0, Reason.BUSY)
    monkeypatch.undo()
    assert driver.restore(range(10)).n_tokens == 9
    driver.close()


def test_opaque_tensors_larger_than_what_is_free_are_refused_before_they_are_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=(pair(), window(), recurrent((512, 64)))), lossy=True)
    driver.save(range(9))
    driver.flush()
    match = driver.find(range(10))
    opaque = sum(
        tensor.array.nbytes for tensor in driver.engine.state(range(9)).tensors.values() if isinstance(tensor, Opaque)
    )
    assert opaque > match.nbytes  # rows and windows alone would fit
    monkeypatch.setattr("rewarm.cache.assemble.free_memory", lambda: opaque - 1)
    state = driver.namespace().restore(match)
    assert (state.n_tokens, state.reason) == (0, Reason.BUSY)
    monkeypatch.setattr("rewarm.cache.assemble.free_memory", lambda: opaque)
    assert driver.restore(range(10)).n_tokens == 9
    driver.close()
