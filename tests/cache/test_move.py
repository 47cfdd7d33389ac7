"""Moving a cache to another folder: nothing is lost however it ends, and nothing foreign is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rewarm
from rewarm.cache.move import abandon_move, describe_location, move_root
from rewarm.errors import RootError
from rewarm.store import moving, tree
from rewarm.store.location import _nearest
from rewarm.store.moving import MARK, Wishes
from rewarm.store.settings import Limits
from rewarm.testing.driver import Driver, on_disk
from rewarm.testing.faults import Fault, FaultyDisk
from waiting import until

CONVERSATIONS = [list(range(start, start + 11)) for start in (0, 100, 200)]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A root with three conversations, one of them pinned, and limits of its own."""
    driver = Driver(tmp_path / "old", limits=Limits(max_bytes=2**40, max_files=777, min_free_bytes=0))
    for tokens in CONVERSATIONS:
        driver.save(tokens, label=f"from {tokens[0]}")
    driver.flush()
    driver.cache.pin(driver.cache.entries()[0])
    driver.close()
    return tmp_path / "old"


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two disks: a file cannot have a second name."""

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)


def serves(root: Path) -> Driver:
    """The root restores every conversation bit for bit, and everything about it is in order."""
    driver = Driver(root, lossy=True)
    for tokens in CONVERSATIONS:
        driver.perfect.save((0, b""), tokens, driver.engine.state(tokens))
        assert driver.restore([*tokens, 1]).n_tokens == len(tokens)
    driver.assert_in_order()
    assert sum(entry.pinned for entry in driver.cache.entries()) == 1
    assert {entry.label for entry in driver.cache.entries()} == {f"from {tokens[0]}" for tokens in CONVERSATIONS}
    assert driver.cache.settings().limits.max_files == 777
    driver.close()
    return driver


@pytest.mark.parametrize("links", [True, False])
def test_a_cache_is_moved_whole(old: Path, tmp_path: Path, links: bool, request: pytest.FixtureRequest) -> None:
    if not links:
        request.getfixturevalue("no_links")
    before, new = on_disk(old), tmp_path / "far" / "new"
    told: list[tuple[int, int]] = []
    report = move_root(old, new, lambda done, total: told.append((done, total)))
    assert report.finished
    assert (report.n_files, report.n_damaged, report.left_behind) == (len(before.records), 0, [])
    assert not old.exists()
    assert told == sorted(told)
    assert told[-1] == (report.nbytes, report.nbytes)
    assert (new.stat().st_mode & 0o777, (new / "index.db").stat().st_mode & 0o777) == (0o700, 0o600)
    assert not (new / MARK).exists()
    assert [path.name for path in on_disk(new).records] == [path.name for path in before.records]
    serves(new)


def test_use_and_counters_come_along(old: Path, tmp_path: Path) -> None:
    with rewarm.open(old) as cache:
        hits, entries = cache.stats()["bytes_written"], cache.entries()
    move_root(old, tmp_path / "new")
    with rewarm.open(tmp_path / "new") as cache:
        assert cache.stats()["bytes_written"] == hits
        assert cache.entries() == entries


def test_a_cache_that_is_open_is_not_moved_and_it_is_said_by_whom(old: Path, tmp_path: Path) -> None:
    with rewarm.open(old), pytest.raises(RootError, match=f"in use by this process \\({os.getpid()}\\)"):
        move_root(old, tmp_path / "new")
    code = "import rewarm, sys; c = rewarm.open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(old)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RootError, match=f"in use by process {other.pid} \\("):
            move_root(old, tmp_path / "new")
        other.communicate(b"")
    assert not (tmp_path / "new").exists()
    serves(old)
    assert move_root(old, tmp_path / "new").finished


def test_nobody_opens_the_old_folder_while_it_is_moved(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewarm.store.root.BUSY_TIMEOUT_S", 0.1)
    refused = []

    def look() -> bool:
        with pytest.raises(RootError) as told:
            rewarm.open(old)
        refused.append(str(told.value))
        return False

    assert move_root(old, tmp_path / "new", stop=look).finished
    assert len(refused) == len(on_disk(tmp_path / "new").records)
    serves(tmp_path / "new")


def stopped(old: Path, new: Path, after: int) -> moving.MoveReport:
    """Move, and stop before the record of this number."""
    calls = iter(range(10**6))
    return move_root(old, new, stop=lambda: next(calls) >= after)


@pytest.mark.usefixtures("no_links")
def test_a_move_that_was_stopped_goes_on_where_it_was(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    report = stopped(old, new, 4)
    assert (report.finished, report.n_files) == (False, 4)
    kept = {path.name: path.stat().st_ino for path in on_disk(new).records}
    assert len(kept) == 4
    serves(old)
    told: list[int] = []
    assert move_root(old, new, lambda done, _: told.append(done)).finished
    assert told[0] > 0
    assert {path.name: path.stat().st_ino for path in on_disk(new).records}.items() >= kept.items()
    serves(new)


def test_what_was_evicted_between_two_tries_does_not_come_back(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    stopped(old, new, 8)
    with rewarm.open(old) as cache:
        gone = cache.entries()[-1]
        cache.forget(gone)
    assert move_root(old, new).finished
    with rewarm.open(new) as cache:
        assert gone.id not in {entry.id for entry in cache.entries()}
        assert cache.verify().is_clean


def test_a_stopped_move_can_be_undone(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert not abandon_move(new)
    stopped(old, new, 4)
    assert abandon_move(new)
    assert not new.exists()
    serves(old)


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename", "link", "make_folder", "close"])
@pytest.mark.usefixtures("no_links")
def test_whatever_fails_the_cache_is_whole_and_the_move_goes_on(old: Path, tmp_path: Path, operation: str) -> None:
    new = tmp_path / "new"
    for after in range(0, 60, 7):
        disk = FaultyDisk()
        disk.plant(Fault(operation, after=after))
        try:
            moving.move(old, new, Wishes(), disk)
        except RootError as error:
            assert "goes on where it stopped" in str(error)
            serves(old)
        else:
            break
    if old.exists():
        assert move_root(old, new).finished
    serves(new)


def test_a_full_disk_is_seen_before_anything_is_copied(old: Path, tmp_path: Path, no_links: None) -> None:
    disk = FaultyDisk()
    disk.free = 2**20
    with pytest.raises(RootError, match="are free at .* are needed"):
        moving.move(old, tmp_path / "new", Wishes(), disk)
    assert not (tmp_path / "new").exists()
    serves(old)


def crash(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the move end at a step, as when the process is killed there."""

    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    target: object = tree.Tree if at in ("remove", "sync_folders") else moving._Move
    monkeypatch.setattr(target, at, die)
    monkeypatch.setattr(moving, "_killed", Killed, raising=False)


@pytest.mark.parametrize("at", ["_copy_index", "sync_folders", "_try_new", "_finish", "remove"])
def test_a_move_that_was_killed_at_any_step_is_finished_by_the_next(
    old: Path, tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tmp_path / "new"
    with monkeypatch.context() as patched:
        crash(at, patched)
        with pytest.raises(moving._killed):  # type: ignore[attr-defined]
            move_root(old, new)
    serves(new if at in ("_finish", "remove") else old)
    if at in ("_finish", "remove"):
        until(lambda: not old.exists())  # opening the new one had it removed
        assert not (new / MARK).exists()
    else:
        assert move_root(old, new).finished
        assert not old.exists()
    serves(new)


def test_a_whole_copy_that_was_used_is_not_thrown_away(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tmp_path / "new"
    with pytest.raises(ZeroDivisionError):
        move_root(old, new, switch=lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(RootError, match="whole cache by now"):
        abandon_move(new)
    driver = Driver(new, lossy=True)
    driver.save(range(500, 509))
    driver.flush()
    driver.close()
    with pytest.raises(RootError, match="has been used since"):
        move_root(old, new)
    serves(old)


def test_the_caller_is_told_to_switch_when_both_are_whole(old: Path, tmp_path: Path) -> None:
    new, seen = tmp_path / "new", []
    move_root(old, new, switch=lambda: seen.append(((old / "store.json").exists(), (new / "store.json").exists())))
    assert seen == [(True, True)]
    assert not old.exists()


def test_what_rewarm_did_not_make_stays_in_the_old_folder(old: Path, tmp_path: Path) -> None:
    (old / "notes.txt").write_text("mine")
    (old / "tmp" / "draft.txt").write_text("mine")
    report = move_root(old, tmp_path / "new")
    assert sorted(report.left_behind) == ["notes.txt", "tmp/draft.txt"]
    assert sorted(path.name for path in old.rglob("*")) == ["draft.txt", "notes.txt", "tmp"]
    serves(tmp_path / "new")


@pytest.mark.usefixtures("no_links")
def test_damaged_records_are_brought_as_they_are(old: Path, tmp_path: Path) -> None:
    victim = on_disk(old).records[0]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    assert move_root(old, tmp_path / "new").n_damaged == 1
    with rewarm.open(tmp_path / "new") as cache:
        assert len(cache.verify().damaged) == 1


@pytest.mark.parametrize("where", ["old", "old/inside", ".", "full", "file"])
def test_places_that_make_no_sense_are_refused(old: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("else")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RootError, match="Nothing was changed"):
        move_root(old, tmp_path / where)
    serves(old)


def test_a_part_of_another_cache_is_not_gone_on_with(old: Path, tmp_path: Path) -> None:
    stopped(old, tmp_path / "new", 2)
    other = tmp_path / "other"
    rewarm.open(other).close()
    with pytest.raises(RootError, match="holds a part of a cache"):
        move_root(other, tmp_path / "new")
    with pytest.raises(RootError, match="There is no cache in"):
        move_root(tmp_path / "nowhere", tmp_path / "new2")


# What a folder is like.


def test_a_folder_that_is_not_there_yet_is_described_by_the_one_above(tmp_path: Path) -> None:
    found = describe_location(tmp_path / "a" / "b")
    assert (found.exists, found.writable, found.warnings) == (False, True, ())
    assert found.free_bytes is not None and found.free_bytes > 0
    assert found.total_bytes is not None and found.total_bytes >= found.free_bytes
    assert list(tmp_path.iterdir()) == []
    assert describe_location(tmp_path).exists
    (tmp_path / "file").write_text("")
    assert not describe_location(tmp_path / "file").writable
    assert _nearest(tmp_path / "a" / "b") == tmp_path


class Part:
    """A file system as psutil describes it."""

    def __init__(self, mountpoint: str, fstype: str) -> None:
        self.mountpoint, self.fstype = mountpoint, fstype


@pytest.mark.parametrize(
    ("fstype", "word"),
    [("nfs4", "network"), ("fuse.sshfs", "network"), ("tmpfs", "memory"), ("exFAT", "other users"), ("ext4", "")],
)
def test_a_file_system_that_does_not_suit_is_warned_of(
    tmp_path: Path, fstype: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [Part("/", "btrfs"), Part(str(tmp_path), fstype), Part(str(tmp_path / "elsewhere"), "nfs")]
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: parts)
    warnings = describe_location(tmp_path / "new").warnings
    assert len(warnings) == bool(word)
    assert all(word in warning for warning in warnings)


@pytest.mark.parametrize("name", ["Dropbox", "OneDrive - Somewhere", "Mobile Documents", "marked"])
def test_a_folder_that_a_service_synchronises_is_warned_of(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    if name == "marked":
        (folder / ".stfolder").mkdir()
    assert any("in step with other places" in warning for warning in describe_location(folder / "kv").warnings)


def test_a_drive_that_can_be_unplugged_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.disk_partitions", lambda **_: [Part("/media/me/stick", "ext4")])
    monkeypatch.setattr("rewarm.store.location._nearest", lambda folder: Path("/media/me/stick"))
    assert any("unplugged" in warning for warning in describe_location("/media/me/stick/kv").warnings)


@pytest.fixture(autouse=True)
def _nothing_left_open(tmp_path: Path) -> Iterator[None]:
    yield
    for lock in tmp_path.glob("*/tmp/*.lock"):
        raise AssertionError(f"{lock} was left")
