"""Several things gone wrong at once: a wrong index, others in mid-commit, faults beside forgetting."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rewarm
from rewarm.state.reason import Dropped, Reason
from rewarm.store.forgotten import Forgotten
from rewarm.testing.driver import ROOMY, Driver, header_of, holes, on_disk
from rewarm.testing.fake_engine import FakeEngine, pair, recurrent, window
from rewarm.testing.faults import Fault, FaultyDisk
from waiting import until


@pytest.fixture
def disk() -> Iterator[FaultyDisk]:
    disk = FaultyDisk()
    yield disk
    disk.heal()


@pytest.fixture
def driver(tmp_path: Path, disk: FaultyDisk) -> Iterator[Driver]:
    driver = Driver(tmp_path / "kv", disk=disk, lossy=True)
    yield driver
    disk.heal()
    driver.close()


@pytest.fixture
def other(driver: Driver) -> Iterator[Driver]:
    """Another process on the same root."""
    other = Driver(driver.root, lossy=True)
    yield other
    other.close()


def execute(driver: Driver, sql: str) -> None:
    driver.cache.store._root.index.execute(sql)


# A wrong index is no reason for a wrong state.


@pytest.mark.parametrize(
    "layers", [(pair(),), (pair(), window(6, 1)), (pair(), recurrent())], ids=["rows", "window", "hybrid"]
)
def test_a_record_of_another_conversation_is_refused_whatever_the_index_says(tmp_path: Path, layers: tuple) -> None:  # type: ignore[type-arg]
    """Two conversations with the same tail at the same place: the index takes one's tail for the other's."""
    driver = Driver(tmp_path / "kv", FakeEngine(layers=layers), lossy=True)
    tail = [7, 7]
    driver.save([1, 2, 3, 4, *tail])
    driver.save([5, 6, 7, 8, *tail])
    driver.flush()
    rows = driver.cache.store._root.index.rows("SELECT parent, n, is_point FROM records ORDER BY id")
    parents = [row[0] for row in rows if row[2]]
    sql = "UPDATE records SET parent = CASE parent WHEN ?1 THEN ?2 ELSE ?1 END WHERE is_point"
    driver.cache.store._root.index.execute(sql, tuple(parents))
    for first in ([1, 2, 3, 4], [5, 6, 7, 8]):
        driver.restore([*first, *tail, 9])  # compares bit for bit
    driver.close()


def test_a_tenants_rows_never_cross_over(driver: Driver) -> None:
    driver.save([1, 2, 3], owner=(0, b"a"))
    driver.save([1, 2, 3, 4, 5], owner=(0, b"b"))
    driver.flush()
    parents = [row[0] for row in driver.cache.store._root.index.rows("SELECT DISTINCT parent FROM records")]
    for parent in parents:
        driver.cache.store._root.index.execute("UPDATE records SET parent = ?", (parent,))
        for owner in ((0, b"a"), (0, b"b")):
            match = driver.namespace(owner).find([1, 2, 3, 9])
            state = driver.namespace(owner).restore(match)
            assert state.n_tokens in (0, 3)
            driver.engine.check(state, [1, 2, 3][: state.n_tokens])


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE records SET tokens = x'ff01'",
        "UPDATE records SET tokens = 5",
        "UPDATE records SET n = 'many'",
        "UPDATE layouts SET spec = x'00'",
        "UPDATE layouts SET spec = x'93a0'",
    ],
)
def test_what_was_never_written_into_the_index_is_a_miss_and_mended(driver: Driver, sql: str) -> None:
    driver.save(range(10))
    driver.flush()
    execute(driver, sql)
    match = driver.namespace().find(range(11))
    assert match.reason in (Reason.UNAVAILABLE, Reason.NOTHING_STORED, Reason.DIVERGED, Reason.HIT)
    driver.namespace().restore(match)
    until(lambda: driver.namespace().find(range(11)).n_tokens == 10)
    assert driver.restore(range(11)).n_tokens == 10


def test_another_namespaces_match_is_a_wrong_call(driver: Driver) -> None:
    driver.save(range(10))
    driver.flush()
    match = driver.namespace().find(range(11))
    with pytest.raises(ValueError, match="another namespace"):
        driver.namespace((1, b"")).restore(match)
    assert driver.restore(range(11)).n_tokens == 10


@pytest.mark.parametrize("damage", [True, False], ids=["damaged", "unreadable"])
def test_a_bad_neighbour_hides_no_good_one(tmp_path: Path, disk: FaultyDisk, damage: bool) -> None:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=(pair(), recurrent())), block_tokens=64, disk=disk, lossy=True)
    for n in (20, 25, 30):
        driver.save(range(n))
        driver.flush()
    if damage:
        last = max(on_disk(driver.root).records, key=lambda path: path.stat().st_size)
        last.write_bytes(last.read_bytes()[:-1] + b"\xee")
    else:
        disk.plant(Fault("read_into", code=errno.EIO, times=1))
    assert driver.restore(range(31)).n_tokens == 25
    driver.close()


# Others in mid-commit.


@pytest.mark.parametrize("act", ["forget", "evict"])
def test_a_commit_looks_again_before_it_enters(driver: Driver, other: Driver, disk: FaultyDisk, act: str) -> None:
    driver.save(range(8))
    driver.flush()
    disk.plant(Fault("rename", "hang", times=1))
    report = driver.save(range(30))
    assert disk.hanging.wait(10)
    if act == "forget":
        other.cache.forget(other.cache.entries()[0])
    else:
        other.cache.set_limits(rewarm.Limits(max_files=0))
        other.cache.set_limits(ROOMY)
    disk.heal()
    driver.flush()
    assert report.reason is (Dropped.FORGOTTEN if act == "forget" else Dropped.PARENT_GONE)
    assert holes(driver.root) == []
    assert on_disk(driver.root).n_files == 0
    assert driver.cache.entries() == []


def test_a_limit_that_is_lowered_in_mid_save_holds(driver: Driver, other: Driver, disk: FaultyDisk) -> None:
    disk.plant(Fault("rename", "hang", times=1))
    driver.save(range(400))
    assert disk.hanging.wait(10)
    other.cache.set_limits(rewarm.Limits(max_files=20))
    disk.heal()
    driver.flush()
    assert on_disk(driver.root).n_files <= 20


# Forgetting beside everything else.


def test_a_save_that_was_cut_short_can_be_forgotten(driver: Driver, disk: FaultyDisk) -> None:
    driver.save(range(10))
    driver.flush()
    disk.plant(Fault("create", code=errno.EIO, after=3))
    driver.save(range(30))
    driver.flush()
    disk.heal()
    (entry,) = driver.cache.entries()
    assert entry.n_tokens == 20
    assert driver.cache.forget(entry).n_files == 5
    assert on_disk(driver.root).n_files == 0


def test_what_cannot_be_removed_is_never_found_again(driver: Driver, disk: FaultyDisk) -> None:
    driver.save(range(10))
    driver.flush()
    disk.plant(Fault("unlink", code=errno.EACCES))
    driver.cache.forget(driver.cache.entries()[0])
    assert driver.namespace().find(range(11)).n_tokens == 0
    disk.heal()
    driver.save(range(500, 503))  # the next commit tries again
    driver.flush()
    assert on_disk(driver.root).n_files == 1


def test_a_save_that_waits_for_an_identity_is_forgotten_too(driver: Driver) -> None:
    driver.save(range(10))
    driver.flush()
    known = driver.namespace().identity
    pending = rewarm.Identity.__new__(rewarm.Identity)
    pending._prepare("fake")
    report = driver.cache.namespace(pending).save(range(34), driver.engine.state(range(34)))
    driver.cache.forget(driver.cache.entries()[0])
    pending._settle(dict(known.fields), None)
    assert report.wait(20)
    assert report.reason is Dropped.FORGOTTEN
    assert driver.namespace().find(range(35)).n_tokens == 0


def test_forgetting_less_than_a_block_reaches_what_goes_on_from_it(driver: Driver, other: Driver) -> None:
    told: list[Forgotten] = []
    other.cache.on_forget(told.append)
    driver.save(range(3))
    driver.flush()
    driver.cache.forget(driver.cache.entries()[0])
    other.namespace().find([1])
    assert other.namespace().holds_any(told[0], range(41))
    assert not other.namespace().holds_any(told[0], [0, 1, 9, 9])


def test_damage_in_the_middle_leaves_nothing_of_a_forgotten_conversation(driver: Driver) -> None:
    secret = [2**41 + 0x5A17C39B + 7919 * i for i in range(22)]
    driver.save(secret)
    driver.flush()

    middle = next(path for path in on_disk(driver.root).records if header_of(path).first == 8)
    middle.write_bytes(middle.read_bytes()[:-1] + b"\xee")
    assert driver.restore([*secret, 1]).n_tokens == 8
    driver.flush()
    driver.cache.forget(driver.cache.entries()[0])
    assert on_disk(driver.root).n_files == 0
    needles = [token.to_bytes(size, order) for token in secret for size, order in ((8, "little"), (6, "big"))]  # type: ignore[arg-type]
    for path in driver.root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not any(needle in data for needle in needles), path.name


# The writer's word.


def test_an_adapter_that_fails_when_it_is_told_harms_nobody(driver: Driver) -> None:
    def fail(_: Forgotten) -> None:
        raise RuntimeError("an adapter's fault")

    driver.cache.on_forget(fail)
    driver.save(range(10))
    driver.flush()
    driver.cache.forget(driver.cache.entries()[0])
    assert driver.namespace().find(range(11)).n_tokens == 0
    driver.save(range(100, 110))
    driver.flush()
    assert driver.restore(range(100, 111)).n_tokens == 10


def test_an_absorbed_save_is_written_when_the_later_one_is_not(driver: Driver, disk: FaultyDisk) -> None:
    disk.plant(Fault("create", "hang", times=1))
    driver.save(range(5000, 5009))
    assert disk.hanging.wait(10)
    first = driver.save(range(10))
    state = driver.engine.state(range(30))
    tensors = {name: rewarm.Rows(np.array(t.array), t.axis) for name, t in state.tensors.items()}  # type: ignore[union-attr]
    for tensor in tensors.values():
        np.moveaxis(tensor.array, tensor.axis, 0)[29] = np.nan
    later = driver.namespace().save(range(30), rewarm.SequenceState(30, tensors))
    disk.heal()
    driver.flush()
    assert (first.reason, later.reason) == (None, Dropped.NOT_FINITE)
    assert driver.restore([*range(10), 99]).n_tokens == 10
    assert 10 in [entry.n_tokens for entry in driver.cache.entries()]


def test_a_durable_flush_says_so_only_when_it_was_pushed(driver: Driver, disk: FaultyDisk) -> None:
    driver.save(range(10))
    driver.flush()
    disk.plant(Fault("sync", code=errno.EIO, times=1))
    assert not driver.cache.flush(20, durable=True)
    disk.heal()
    before = disk.counts["sync"]
    assert driver.cache.flush(20, durable=True)
    assert disk.counts["sync"] >= before + 3


def test_a_read_that_times_out_is_one_unreadable_record(driver: Driver, disk: FaultyDisk) -> None:
    driver.save(range(40))
    driver.flush()
    match = driver.namespace().find(range(41))
    disk.plant(Fault("read_into", code=errno.ETIMEDOUT, after=12, times=1))
    state = driver.namespace().restore(match)
    assert 0 < state.n_tokens < 40
    assert state.reason is Reason.UNAVAILABLE


def test_files_in_tmp_that_are_not_ours_stay(driver: Driver) -> None:
    driver.save(range(10))
    driver.flush()
    strangers = ["notes-old.txt", "0123456789abcdef-mine.tmp", "0123456789abcdef.lock.bak", "notes.lock"]
    for name in strangers:
        (driver.root / "tmp" / name).write_text("mine")
    (driver.root / "tmp" / "0123456789abcdef-7.tmp").write_text("a dead process'")
    driver.reopen()
    assert {name for name in strangers if (driver.root / "tmp" / name).exists()} == set(strangers)
    assert not (driver.root / "tmp" / "0123456789abcdef-7.tmp").exists()


@pytest.mark.parametrize("text", ['{"pins": ["x"]}', '{"ttls": {"x": 1}}', '{"ttls": {"%s": -1}}' % ("0" * 32)])
def test_names_in_the_settings_that_mean_nothing_are_refused_readably(driver: Driver, text: str) -> None:
    path = driver.root / "store.json"
    settings = json.loads(path.read_text())
    driver.close()
    path.write_text(json.dumps({**settings, **json.loads(text)}))
    with pytest.raises(rewarm.SettingsError, match=r"store\.json"):
        driver.open()
    path.write_text(json.dumps(settings))
    driver.open()


def test_index_and_log_are_the_owners_alone_in_a_folder_that_was_open_to_all(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o755)
    driver = Driver(tmp_path / "kv")
    driver.save(range(10))
    driver.flush()
    for path in driver.root.glob("index.db*"):
        assert path.stat().st_mode & 0o077 == 0, path.name
    driver.close()
