"""Memory that is used again: never while anybody can still see it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import rewarm
from rewarm.cache import arena as module
from rewarm.cache.arena import Arena
from rewarm.state.reason import Dropped
from rewarm.state.sequence import Rows, SequenceState
from rewarm.testing.driver import Driver
from rewarm.testing.fake_engine import FakeEngine, pair, recurrent
from rewarm.testing.faults import Fault, FaultyDisk


def test_memory_comes_back_when_the_last_view_has_gone() -> None:
    arena = Arena()
    first = arena.take(100)
    view = first[10:20].view(np.uint16).reshape(5, 1)[1:]
    where = first.ctypes.data
    del first
    second = arena.take(100)
    assert second.ctypes.data != where
    data = memoryview(view)
    del view
    assert arena.take(100).ctypes.data != where
    del data
    assert arena.take(100).ctypes.data == where
    assert arena.take(101).ctypes.data != where


def test_two_threads_never_have_the_same_memory() -> None:
    arena, failures = Arena(), []

    def work(mark: int) -> None:
        for _ in range(2000):
            mine = arena.take(64)
            mine[:] = mark
            time.sleep(0)
            if not (mine == mark).all():
                failures.append(mark)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert arena.nbytes <= 2 * 4 * 64


def test_no_more_is_kept_than_a_bound_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_NBYTES", 250)
    arena = Arena()
    taken = [arena.take(100) for _ in range(5)]
    assert arena.nbytes == 200
    assert len({array.ctypes.data for array in taken}) == 5
    monkeypatch.setattr(module, "KEPT_S", 0.0)
    taken[0][:] = 7
    arena.trim()
    assert arena.nbytes == 0
    assert arena.take(100).ctypes.data not in {array.ctypes.data for array in taken}
    assert (taken[0] == 7).all()


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


def engine_buffers(state: SequenceState, room: int = 8) -> tuple[dict[str, np.ndarray], SequenceState]:
    """Buffers as an engine has them, and the state as views into them."""
    buffers, tensors = {}, {}
    for name, tensor in state.tensors.items():
        if isinstance(tensor, Rows):
            shape = list(tensor.array.shape)
            shape[tensor.axis] += room
            buffers[name] = np.zeros(shape, tensor.array.dtype)
            lead = (slice(None),) * tensor.axis
            buffers[name][(*lead, slice(0, state.n_tokens))] = tensor.array
            view = buffers[name][(*lead, slice(0, state.n_tokens))]
        else:
            view = buffers[name] = np.array(tensor.array)
        tensors[name] = type(tensor)(**{f: getattr(tensor, f) for f in tensor.__dataclass_fields__} | {"array": view})
    return buffers, SequenceState(state.n_tokens, tensors, state.meta, state.valid_from)


@pytest.mark.parametrize("width", [4, 512])
def test_what_is_given_is_not_copied_and_is_right(tmp_path: Path, disk: FaultyDisk, width: int) -> None:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=(pair(width=width), recurrent((64, 64)))), disk=disk)
    state = driver.engine.state(range(11))
    buffers, views = engine_buffers(state)
    disk.plant(Fault("create", "hang", times=1))
    report = driver.namespace().save(range(11), views, give=True)
    driver.perfect.save((0, b""), range(11), state)
    jobs = [driver.cache._writer._current, *driver.cache._writer._queue]
    parts = [part for job in jobs if job and job.save for draft in job.save.drafts for part in draft.parts]
    assert parts
    assert all(any(np.may_share_memory(part.array, each) for each in buffers.values()) for part in parts)
    assert not report.done
    disk.heal()
    assert report.wait(30)
    for buffer in buffers.values():
        buffer[...] = 0
    driver.flush()
    driver.engine.check(driver.restore([*range(11), 1]), range(11), exact=True)
    driver.close()


def test_what_another_save_absorbs_is_its_own(tmp_path: Path, disk: FaultyDisk) -> None:
    """The first save is done, and its arrays used again, before the second one fails and writes what it absorbed."""
    driver = Driver(tmp_path / "kv", FakeEngine(layers=(pair(width=512),)), disk=disk)
    disk.plant(Fault("create", "hang", times=1))
    driver.save(range(900, 909))
    assert disk.hanging.wait(10)
    state = driver.engine.state(range(11))
    buffers, views = engine_buffers(state)
    first = driver.namespace().save(range(11), views, give=True)
    worse = driver.engine.state(range(14))
    next(iter(worse.tensors.values())).array[..., -1] = np.nan
    second = driver.namespace().save(range(14), worse)
    job = driver.cache._writer._queue[-1]
    assert job.absorbed
    for draft in job.absorbed[0].drafts:
        for part in draft.parts:
            assert not any(np.may_share_memory(part.array, each) for each in buffers.values())
    disk.heal()
    assert first.wait(30)
    assert second.wait(30)
    assert second.reason is Dropped.NOT_FINITE
    driver.perfect.save((0, b""), range(11), state)
    driver.flush()
    assert driver.restore([*range(11), 1]).n_tokens == 11
    driver.close()


def test_a_part_that_waits_is_not_done(tmp_path: Path, disk: FaultyDisk) -> None:
    cache = rewarm.open(tmp_path / "kv", block_tokens=4, disk=disk)
    engine = FakeEngine(layers=(pair(width=512),))
    state = engine.state(range(40))
    cache._writer._max_bytes = sum(tensor.array.nbytes for tensor in state.tensors.values()) // 2
    disk.plant(Fault("create", "hang", times=1))
    report = cache.namespace(rewarm.Identity({"a": 1})).save(range(40), state, give=True)
    assert report.reason is Dropped.QUEUE_FULL
    assert not report.done
    disk.heal()
    assert report.wait(30)
    cache.close()


def test_closing_does_not_call_done_what_is_being_written(tmp_path: Path, disk: FaultyDisk) -> None:
    cache = rewarm.open(tmp_path / "kv", block_tokens=4, disk=disk)
    engine = FakeEngine(layers=(pair(),))
    disk.plant(Fault("create", "hang", times=1))
    space = cache.namespace(rewarm.Identity({"a": 1}))
    reports = [
        space.save(range(100 * i, 100 * i + 9), engine.state(range(100 * i, 100 * i + 9)), give=True) for i in (0, 1)
    ]
    assert disk.hanging.wait(10)
    assert cache.close(timeout=0.1).unwritten == 2
    assert [report.done for report in reports] == [False, True]
    disk.heal()
    assert reports[0].wait(30)
