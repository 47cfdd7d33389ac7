"""Forgetting reaches every process on a root: what waits there is dropped, and who holds it is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rewarm.state.reason import Dropped
from rewarm.store.forgotten import Forgotten
from rewarm.testing.driver import Driver, on_disk
from rewarm.testing.faults import Fault, FaultyDisk
from waiting import until

CHAT = list(range(22))


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    disk = FaultyDisk()
    yield disk
    disk.heal()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path / "kv", lossy=True)
    yield driver
    driver.assert_in_order()
    driver.close()


@pytest.fixture
def there(here: Driver, disk: FaultyDisk) -> Iterator[Driver]:
    """Another process on the same root: its own lock, queue and connections."""
    driver = Driver(here.root, disk=disk, lossy=True)
    yield driver
    disk.heal()
    driver.close()


def test_a_save_that_waits_elsewhere_is_dropped(here: Driver, there: Driver, disk: FaultyDisk) -> None:
    here.save(CHAT)
    here.flush()
    disk.plant(Fault("create", "hang", times=1))
    there.save(range(900, 909))  # holds that writer up
    assert disk.hanging.wait(10)
    waiting = there.save([*CHAT, 50, 51, 52, 53])
    (entry,) = here.cache.entries()
    here.cache.forget(entry)
    disk.heal()
    there.flush()
    assert waiting.reason is Dropped.FORGOTTEN
    assert here.namespace().find([*CHAT, 50, 51, 52, 53]).n_tokens == 0


def test_who_holds_a_forgotten_conversation_is_told(here: Driver, there: Driver) -> None:
    told: list[Forgotten] = []
    there.cache.on_forget(told.append)
    here.save(CHAT)
    here.save(range(700, 720))
    here.flush()
    entry = next(entry for entry in here.cache.entries() if entry.n_tokens == len(CHAT))
    here.cache.forget(entry)
    there.namespace().find([1, 2, 3])  # reads what is new before it looks
    assert len(told) == 1
    assert there.namespace().holds_any(told[0], [*CHAT, 5])
    assert not there.namespace().holds_any(told[0], range(700, 720))
    assert not there.namespace().holds_any(told[0], [1, 2, 3])


def test_an_idle_process_takes_note_by_itself(here: Driver, there: Driver) -> None:
    told: list[Forgotten] = []
    there.cache.on_forget(told.append)
    here.save(CHAT)
    here.flush()
    here.cache.forget(here.cache.entries()[0])
    until(lambda: len(told) == 1)


def test_the_same_tokens_sent_again_are_a_new_conversation(here: Driver, there: Driver) -> None:
    here.save(CHAT)
    here.flush()
    here.cache.forget(here.cache.entries()[0])
    there.flush()

    def saved() -> bool:
        here.save(CHAT)
        here.flush()
        return here.restore([*CHAT, 1]).n_tokens == len(CHAT)

    # Until every living process has taken note, which each does within a second or so, it is refused.
    until(saved)
    assert there.namespace().find([*CHAT, 1]).n_tokens == len(CHAT)


def test_a_process_that_died_holds_nobody_up(here: Driver, tmp_path: Path) -> None:
    dead = Driver(here.root, lossy=True)
    dead.cache.store._root.lock.release()  # as the system does when a process ends, however it ends
    here.save(CHAT)
    here.flush()
    here.cache.forget(here.cache.entries()[0])
    here.reopen()  # whoever opens next clears away what the dead have left
    here.save(CHAT)
    here.flush()
    assert here.restore([*CHAT, 1]).n_tokens == len(CHAT)
    dead.cache._writer.close(1)


def test_clear_reaches_other_processes_too(here: Driver, there: Driver) -> None:
    told: list[Forgotten] = []
    there.cache.on_forget(told.append)
    here.save(CHAT)
    here.flush()
    removal = here.cache.clear()
    assert removal.n_files == 6
    assert on_disk(here.root).n_files == 0
    assert there.namespace().find([*CHAT, 1]).n_tokens == 0
    assert there.namespace().holds_any(told[0], CHAT)
