"""Record files: publish, verified read, quarantine. The only renames and syncs of the store.

Names are made here from keys and fingerprints, never from anything that a user or a file says. A file
is written under `tmp/`, complete, and renamed to its name: readers see whole records or none. It does
not know the index, limits or what records mean to each other.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rewarm.errors import DamagedRecord
from rewarm.format.record import (
    PRELUDE,
    Encoded,
    Header,
    Outline,
    read_header,
    read_prelude,
    round_up,
)
from rewarm.state.chain import Key
from rewarm.state.sequence import Array
from rewarm.store import scatter
from rewarm.store.disk import Disk
from rewarm.store.scatter import Place, private_arrays

_NAME = re.compile(r"([0-9a-f]{64})\.(block|point)")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RecordName:
    """Where a record lies: its namespace's fingerprint, its key, its kind."""

    fingerprint: bytes
    key: Key
    is_point: bool

    @property
    def file_name(self) -> str:
        """The file's name in its folder."""
        return f"{self.key.hex()}.{'point' if self.is_point else 'block'}"


class Files:
    """The record files under one root.

    Args:
        root: the cache folder, absolute.
        process: a token that begins the names of this process' temporaries.
        disk: the operations to use.
    """

    def __init__(self, root: Path, process: str, disk: Disk) -> None:
        self.root = root
        self.disk = disk
        self._process = process
        self._serial = itertools.count()
        self._folders: set[Path] = set()

    def path(self, name: RecordName) -> Path:
        """The path of a record."""
        return self.root / name.fingerprint.hex() / name.key.hex()[:2] / name.file_name

    def publish(self, name: RecordName, record: Outline | Encoded) -> None:
        """Write a record under a temporary name and rename it to its own."""
        temporary = self._temporary()
        try:
            self._write_record(temporary, record)
            self._place(temporary, self.path(name))
        except OSError:
            with contextlib.suppress(OSError):
                self.disk.unlink(temporary)
            raise

    def replace(self, path: Path, data: bytes) -> None:
        """Replace a small file of the root as a whole."""
        temporary = self._temporary()
        try:
            self._write(temporary, data)
            self.disk.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                self.disk.unlink(temporary)
            raise

    def replace_new(self, path: Path, data: bytes) -> None:
        """Make a small file of the root as a whole, unless it is there already."""
        temporary = self._temporary()
        self._write(temporary, data)
        try:
            self.disk.link(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                self.disk.unlink(temporary)

    def _temporary(self) -> Path:
        return self.root / "tmp" / f"{self._process}-{next(self._serial)}.tmp"

    def _write(self, path: Path, data: bytes) -> None:
        fd = self.disk.create(path)
        try:
            scatter.each(partial(self.disk.write, fd), [memoryview(data)])
        finally:
            self.disk.close(fd)

    def _write_record(self, path: Path, record: Outline | Encoded) -> None:
        fd = self.disk.create(path)
        put = partial(scatter.each, partial(self.disk.write, fd))
        try:
            # The head has the payload's checksums: it is written when they are known.
            self.disk.seek(fd, record.payload_at)
            head = record.write(put)
            self.disk.seek(fd, 0)
            put([memoryview(head)])
        finally:
            self.disk.close(fd)

    def _place(self, temporary: Path, target: Path) -> None:
        folder = target.parent
        if folder not in self._folders:
            self.disk.make_folder(folder.parent)
            self.disk.make_folder(folder)
        try:
            self.disk.rename(temporary, target)
        except FileNotFoundError:
            # Somebody removed the folder since we made it.
            self.disk.make_folder(folder.parent)
            self.disk.make_folder(folder)
            self.disk.rename(temporary, target)
        self._folders.add(folder)

    def read_header(self, name: RecordName) -> Header:
        """A record's header, checked against its name.

        Raises:
            DamagedRecord: provably bad.
            NewerFormat: written by a later version.
            OSError: the file cannot be read, which proves nothing about it.
        """
        with self._opened(name) as (fd, nbytes):
            return self._header(fd, nbytes, name)

    def read(self, name: RecordName, place: Place | None = None) -> tuple[Header, dict[str, Array]]:
        """A record's header and tensors, every byte checked.

        Args:
            name: of the record.
            place: where the tensors are to be; by default in arrays of their own.

        Raises:
            DamagedRecord: provably bad; what is in the arrays is worth nothing then.
            NewerFormat: written by a later version.
            OSError: the file cannot be read, which proves nothing about it.
        """
        with self._opened(name) as (fd, nbytes):
            header = self._header(fd, nbytes, name)
            arrays = dict((place or private_arrays)(header))
            tensors = [(entry, arrays[entry.name]) for entry in header.tensors]
            for group in scatter.groups(tensors):
                self._fill(fd, group.pieces)
                group.check()
            return header, arrays

    @contextlib.contextmanager
    def _opened(self, name: RecordName) -> Iterator[tuple[int, int]]:
        path = self.path(name)
        if path.parent.is_symlink() or path.parent.parent.is_symlink():
            raise DamagedRecord(f"the folder of {name.file_name} is a symbolic link")
        try:
            fd = self.disk.open(path)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise DamagedRecord(f"{name.file_name} is a symbolic link") from None
            raise
        try:
            status = self.disk.stat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedRecord(f"{name.file_name} is no plain file")
            if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
                raise PermissionError(f"{name.file_name} belongs to another user")
            yield fd, status.st_size
        finally:
            self.disk.close(fd)

    def _header(self, fd: int, nbytes: int, name: RecordName) -> Header:
        first = bytes(self._read_exactly(fd, min(PRELUDE.size, nbytes)))
        prelude = read_prelude(first, nbytes)
        rest = self._read_exactly(fd, prelude.payload_at - PRELUDE.size)
        header = read_header(first + bytes(rest), prelude)
        if header.key != name.key or (header.kind == "point") != name.is_point:
            raise DamagedRecord("lies under another record's name")
        if header.fingerprint != name.fingerprint:
            raise DamagedRecord("lies in another model's folder")
        return header

    def _read_exactly(self, fd: int, nbytes: int) -> memoryview:
        buffer = memoryview(bytearray(nbytes))
        self._fill(fd, [buffer])
        return buffer

    def _fill(self, fd: int, pieces: Sequence[memoryview]) -> None:
        """Fill all of `pieces` from the file's position on."""
        try:
            scatter.each(partial(self.disk.read_into, fd), pieces)
        except EOFError:
            raise DamagedRecord("ends early") from None

    def remove(self, name: RecordName) -> bool:
        """Remove a record's file; whether it is gone now (false when it cannot be removed)."""
        try:
            self.disk.unlink(self.path(name))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def exists(self, name: RecordName) -> bool:
        """Whether a file has the record's name."""
        return self.path(name).is_file()

    def is_there(self) -> bool:
        """Whether the root itself can be seen."""
        return (self.root / "store.json").is_file()

    def nbytes(self, name: RecordName) -> int:
        """Bytes that the record's file takes, rounded up to 4 KiB; 0 when there is none."""
        try:
            return round_up(self.path(name).lstat().st_size)
        except OSError:
            return 0

    def nbytes_allocated(self, name: RecordName) -> int:
        """Bytes that the file system has allocated for the record's file; its size where it does not say."""
        try:
            status = self.path(name).lstat()
        except OSError:
            return 0
        blocks = getattr(status, "st_blocks", None)
        return status.st_size if blocks is None else 512 * int(blocks)

    def quarantine(self, name: RecordName, label: str) -> Path:
        """Move a bad record out of the way; where it is now."""
        folder = self.root / "quarantine"
        self.disk.make_folder(folder)
        target = folder / f"{label}-{name.file_name}"
        self.disk.rename(self.path(name), target)
        return target

    def sync(self, name: RecordName) -> None:
        """Push a record to the medium, and the folders that lead to it from the root."""
        path = self.path(name)
        for what in (path, path.parent, path.parent.parent, self.root):
            try:
                fd = self.disk.open(what)
            except (FileNotFoundError, PermissionError):
                continue  # evicted meanwhile; Windows opens no folders
            try:
                self.disk.sync(fd)
            finally:
                self.disk.close(fd)

    def free_bytes(self) -> int:
        """Bytes that may still be written on the root's disk."""
        return self.disk.free_bytes(self.root)

    def records(self) -> Iterator[RecordName]:
        """Every file under the root that has the name of a record. Lists the whole tree."""
        for namespace in self._folders_of(self.root, _FINGERPRINT):
            fingerprint = bytes.fromhex(namespace.name)
            for folder in self._folders_of(namespace, re.compile(r"[0-9a-f]{2}")):
                for entry in self.disk.list_folder(folder):
                    match = _NAME.fullmatch(entry.name)
                    if match and match[1].startswith(folder.name) and entry.is_file(follow_symlinks=False):
                        yield RecordName(fingerprint, Key(bytes.fromhex(match[1])), match[2] == "point")

    def _folders_of(self, folder: Path, pattern: re.Pattern[str]) -> list[Path]:
        entries = self.disk.list_folder(folder)
        found = [e for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        return [folder / entry.name for entry in found]

    def quarantined(self) -> list[tuple[str, int]]:
        """Names and rounded sizes of the files in quarantine."""
        folder = self.root / "quarantine"
        if not folder.is_dir():
            return []
        entries = [e for e in self.disk.list_folder(folder) if e.is_file(follow_symlinks=False)]
        return [(e.name, round_up(e.stat(follow_symlinks=False).st_size)) for e in entries]

    def remove_quarantined(self, file_name: str) -> bool:
        """Remove a file from quarantine; whether it is gone now."""
        try:
            self.disk.unlink(self.root / "quarantine" / file_name)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def remove_temporaries(self, process: str) -> None:
        """Remove the temporaries that a dead process left in `tmp/`, and nothing that has another kind of name."""
        folder = self.root / "tmp"
        pattern = re.compile(rf"{re.escape(process)}-\d+\.tmp")
        names = [e.name for e in self.disk.list_folder(folder) if pattern.fullmatch(e.name)]
        for file_name in names:
            with contextlib.suppress(OSError):
                self.disk.unlink(folder / file_name)
