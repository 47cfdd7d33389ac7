"""Record files: whole or not at all, under their own names, read with every byte checked."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

from rewarm.errors import DamagedRecord, NewerFormat
from rewarm.format.record import Encoded, Header, Part, encode
from rewarm.state.chain import Chain, as_tokens, root_key
from rewarm.state.layout import Kind, Layout, TensorSpec
from rewarm.store.disk import patiently
from rewarm.store.files import Files, RecordName
from rewarm.testing.faults import Fault, FaultyDisk

SPEC = TensorSpec("k", Kind.ROWS, "float32", "<f4", 0, (3,))
LAYOUT = Layout((SPEC,))
FINGERPRINT = b"\xfa" * 32
SIZE = 4


def record(tokens: list[int], fingerprint: bytes = FINGERPRINT) -> tuple[RecordName, Encoded]:
    """The only block of `tokens`, with rows that the tokens give."""
    root = root_key(SIZE, fingerprint, LAYOUT.digest, b"")
    chain = Chain(root, as_tokens(tokens), SIZE)
    header = Header(
        kind="block",
        key=chain.block(0),
        parent=root,
        fingerprint=fingerprint,
        layout=LAYOUT.digest,
        block_tokens=SIZE,
        first=0,
        tokens=chain.tokens[:SIZE].tobytes(),
    )
    rows = np.repeat(np.array(tokens[:SIZE], dtype="<f4")[:, None], 3, axis=1)
    return RecordName(fingerprint, chain.block(0), is_point=False), encode(header, [Part(SPEC, rows)])


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def files(tmp_path: Path, disk: FaultyDisk) -> Files:
    (tmp_path / "tmp").mkdir()
    return Files(tmp_path, "0123456789abcdef", disk)


NAME, RECORD = record([1, 2, 3, 4])


def everything(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_record_lies_under_its_fingerprint_and_key(files: Files) -> None:
    files.publish(NAME, RECORD)
    assert everything(files.root) == [f"{'fa' * 32}/{NAME.key.hex()[:2]}/{NAME.key.hex()}.block"]
    header, arrays = files.read(NAME)
    assert header == RECORD.header
    assert arrays["k"].tolist() == [[i] * 3 for i in (1, 2, 3, 4)]


def test_b074_files_and_folders_are_the_owners_alone(files: Files) -> None:
    old = os.umask(0)
    try:
        files.publish(NAME, RECORD)
    finally:
        os.umask(old)
    path = files.path(NAME)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.parent.stat().st_mode) == 0o700


def test_b003_what_is_read_is_private(files: Files) -> None:
    files.publish(NAME, RECORD)
    _, arrays = files.read(NAME)
    arrays["k"][:] = 99
    assert files.read(NAME)[1]["k"].tolist() == [[i] * 3 for i in (1, 2, 3, 4)]


@pytest.mark.parametrize("operation", ["create", "write", "close", "rename", "make_folder"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.ENODEV])
def test_b044_a_failed_write_leaves_nothing(files: Files, disk: FaultyDisk, operation: str, code: int) -> None:
    disk.plant(Fault(operation, code=code))
    with pytest.raises(OSError) as caught:
        files.publish(NAME, RECORD)
    assert caught.value.errno == code
    assert everything(files.root) == []
    disk.heal()
    files.publish(NAME, RECORD)
    assert files.read(NAME)[0] == RECORD.header


def test_b044_a_disk_that_fills_half_way_leaves_nothing(files: Files, disk: FaultyDisk) -> None:
    for after in (0, 1):
        disk.plant(Fault("write", code=errno.ENOSPC, after=after, after_write=True))
        with pytest.raises(OSError, match="space"):
            files.publish(NAME, RECORD)
        disk.heal()
        assert everything(files.root) == []


def test_short_writes_and_short_reads_are_continued(files: Files, disk: FaultyDisk) -> None:
    disk.plant(Fault("write", "short", times=100))
    files.publish(NAME, RECORD)
    assert files.path(NAME).stat().st_size == RECORD.nbytes == disk.bytes_written
    disk.heal()
    disk.plant(Fault("read_into", "short", times=300))
    assert files.read(NAME)[0] == RECORD.header


@pytest.mark.parametrize("operation", ["open", "stat", "read_into"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENODEV])
def test_a_fault_of_the_disk_is_no_damage(files: Files, disk: FaultyDisk, operation: str, code: int) -> None:
    files.publish(NAME, RECORD)
    disk.plant(Fault(operation, code=code))
    with pytest.raises(OSError):
        files.read(NAME)
    disk.heal()
    assert files.read(NAME)[0] == RECORD.header


def test_descriptors_are_closed_after_every_fault(files: Files, disk: FaultyDisk) -> None:
    def n_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 0

    files.publish(NAME, RECORD)
    before = n_open()
    for operation in ("stat", "read_into", "close", "write", "rename", "create"):
        for _ in range(5):
            disk.plant(Fault(operation))
            with pytest.raises(OSError):
                files.read(NAME) if operation in ("stat", "read_into", "close") else files.publish(NAME, RECORD)
            disk.heal()
    assert n_open() == before


def test_b004_a_record_under_another_ones_name_is_refused(files: Files) -> None:
    other, encoded = record([5, 6, 7, 8])
    files.publish(NAME, RECORD)
    files.publish(other, encoded)
    shutil.copyfile(files.path(other), files.path(NAME))
    with pytest.raises(DamagedRecord, match="another record's name"):
        files.read(NAME)
    with pytest.raises(DamagedRecord, match="another record's name"):
        files.read_header(NAME)


def test_b015_a_record_in_another_models_folder_is_refused(files: Files) -> None:
    files.publish(NAME, RECORD)
    foreign = RecordName(b"\xfb" * 32, NAME.key, is_point=False)
    files.path(foreign).parent.mkdir(parents=True)
    shutil.copyfile(files.path(NAME), files.path(foreign))
    with pytest.raises(DamagedRecord, match="another model's folder"):
        files.read(foreign)


def test_a_block_under_a_points_name_is_refused(files: Files) -> None:
    files.publish(NAME, RECORD)
    point = RecordName(FINGERPRINT, NAME.key, is_point=True)
    shutil.copyfile(files.path(NAME), files.path(point))
    with pytest.raises(DamagedRecord):
        files.read(point)


def test_b069_symbolic_links_are_not_followed(files: Files, tmp_path: Path) -> None:
    files.publish(NAME, RECORD)
    path = files.path(NAME)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(DamagedRecord, match="symbolic link"):
        files.read(NAME)
    assert list(files.records()) == []


@pytest.mark.parametrize("level", [1, 2])
def test_b069_folders_that_are_links_are_not_followed(files: Files, tmp_path: Path, level: int) -> None:
    files.publish(NAME, RECORD)
    folder = files.path(NAME).parents[level - 1]
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    folder.rename(outside)
    folder.symlink_to(outside, target_is_directory=True)
    with pytest.raises((OSError, DamagedRecord)):
        files.read(NAME)
    assert list(files.records()) == []
    other, encoded = record([5, 6, 7, 8])
    fresh = Files(files.root, "other", FaultyDisk())
    if files.path(other).parents[level - 1] == folder:
        with pytest.raises(OSError):
            fresh.publish(other, encoded)
    assert everything(outside)


def test_a_file_that_another_process_has_open_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows, which lets nobody replace it then."""
    refusals = iter([PermissionError(), PermissionError()])

    def operation() -> str:
        for error in refusals:
            raise error
        return "done"

    with pytest.raises(PermissionError):
        patiently(operation)
    monkeypatch.setattr("rewarm.store.disk.SHARES_FILES", False)
    assert patiently(operation) == "done"
    monkeypatch.setattr("rewarm.store.disk.SHARING_WAIT_S", 0.05)
    endless = iter(PermissionError, None)
    with pytest.raises(PermissionError):
        patiently(lambda: (_ for _ in ()).throw(next(endless)))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_is_no_plain_file_is_refused_without_waiting(files: Files) -> None:
    path = files.path(NAME)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises((OSError, DamagedRecord)):
        files.read(NAME)
    path.unlink()
    path.mkdir()
    with pytest.raises((OSError, DamagedRecord)):
        files.read(NAME)
    assert list(files.records()) == []


def test_a_sparse_file_of_absurd_length_costs_no_memory(files: Files) -> None:
    """Its length is right, its header says so: still nothing of that size is allocated before the header is good."""
    files.publish(NAME, RECORD)
    with files.path(NAME).open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(DamagedRecord):
        files.read(NAME)


def test_only_names_that_we_make_are_listed(files: Files) -> None:
    files.publish(NAME, RECORD)
    path = files.path(NAME)
    strangers = [
        files.root / "notes.txt",
        files.root / ("fa" * 32) / "identity.json",
        path.with_name("x" + path.name),
        path.with_suffix(".tmp"),
        path.with_name(path.name.upper()),
        path.with_name("../x.block".replace("/", "_")),
    ]
    for stranger in strangers:
        stranger.write_bytes(b"")
    wrong = path.parent.parent / ("00" if path.parent.name != "00" else "01") / path.name
    wrong.parent.mkdir()
    wrong.write_bytes(b"")
    assert list(files.records()) == [NAME]


def test_quarantine_moves_the_file_and_frees_its_name(files: Files) -> None:
    files.publish(NAME, RECORD)
    target = files.quarantine(NAME, "7")
    assert not files.exists(NAME)
    assert target.read_bytes()[:8] == b"\x8frewarm\n"
    assert [name for name, _ in files.quarantined()] == [target.name]
    files.publish(NAME, RECORD)
    assert files.read(NAME)[0] == RECORD.header
    assert files.remove_quarantined(target.name)
    assert files.quarantined() == []


def test_removing_what_is_not_there_is_no_fault(files: Files, disk: FaultyDisk) -> None:
    assert files.remove(NAME)
    files.publish(NAME, RECORD)
    disk.plant(Fault("unlink", code=errno.EACCES))
    assert not files.remove(NAME)
    disk.heal()
    assert files.remove(NAME)


def test_b105_folders_that_were_removed_are_made_again(files: Files) -> None:
    files.publish(NAME, RECORD)
    shutil.rmtree(files.root / ("fa" * 32))
    files.publish(NAME, RECORD)
    assert files.read(NAME)[0] == RECORD.header


def test_a_newer_file_is_told_from_damage(files: Files) -> None:
    files.publish(NAME, RECORD)
    data = bytearray(files.path(NAME).read_bytes())
    data[8] = 2
    files.path(NAME).write_bytes(data)
    with pytest.raises(NewerFormat):
        files.read(NAME)


def test_sizes_count_whole_pages(files: Files) -> None:
    assert files.nbytes(NAME) == 0
    files.publish(NAME, RECORD)
    assert files.nbytes(NAME) == 8192
