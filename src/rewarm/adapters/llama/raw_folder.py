"""The private folder through which slot files pass between llama-server and us.

In a memory file system where there is one with room, so that a save costs no write to the disk; else beside
the cache, where every byte counts as written. Emptied after each use and at the start: what a killed process
left is removed by the next one. Knows no slot files and no servers.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil

from rewarm.adapters.llama import ram_disk

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it, 0700
ENOUGH_NBYTES = 512 * 2**20
"""Free bytes from which on a memory file system is used; containers often have 64 MB of it."""

SPARE_NBYTES = 32 * 2**20
"""Left free beside every file."""

_PREFIX = "rewarm-raw-"
_DISK_PREFIX = "rewarm-ram-"
_DISK_SHARE = 8
"""A RAM disk is as large as this part of the machine's memory; it takes what is written to it."""

_LOCK = "lock"


class RawFolder:
    """A folder of mode 0700 that lives as long as this process uses it.

    Args:
        beside: a folder on a disk, used where no memory file system has room.
        memory: the memory file system.

    Attributes:
        path: the folder.
        in_memory: whether it is in memory.
    """

    def __init__(self, beside: Path, memory: Path = MEMORY) -> None:
        self._disk = _ram_disk(beside) if platform.system() == "Darwin" else None
        memory = memory if self._disk is None else self._disk.path
        self.in_memory = _free(memory) >= ENOUGH_NBYTES and os.access(memory, os.W_OK)
        where = memory if self.in_memory else beside
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        for place in {memory, beside}:
            _remove_abandoned(place)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._numbers = itertools.count()
        if not self.in_memory:
            log.warning(
                "rewarm: no memory file system has room for slot files; they go through %s, are counted by no "
                "limit, and wear the disk. Slots are saved only when they are handed over and at the end",
                self.path,
            )

    def has_room(self, nbytes: int) -> bool:
        """Whether a file of `nbytes` fits now."""
        return _free(self.path) >= nbytes + SPARE_NBYTES

    def new_name(self) -> str:
        """A name that no file in the folder has."""
        return f"{next(self._numbers)}.slot"

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> int:
        """Write a new file; its size.

        Raises:
            OSError: it cannot be written; nothing is left of it.
        """
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as stream:
                return sum(stream.write(piece) for piece in pieces)
        except OSError:
            self.remove(name)
            raise

    def remove(self, name: str) -> None:
        """Remove a file, and what a server put beside it under its name."""
        for path in self.path.glob(f"{name}*"):
            with contextlib.suppress(OSError):
                path.unlink()

    def close(self) -> None:
        """Remove the folder; idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1
            if self._disk is not None:
                self._disk.release()


def _ram_disk(beside: Path) -> ram_disk.RamDisk | None:
    """macOS has no memory file system: a disk in memory, mounted in a folder named after this process."""
    beside.mkdir(parents=True, exist_ok=True, mode=0o700)
    ram_disk.release_abandoned(beside, _DISK_PREFIX)
    nbytes = max(2 * ENOUGH_NBYTES, psutil.virtual_memory().total // _DISK_SHARE)
    return ram_disk.make(nbytes, beside / f"{_DISK_PREFIX}{os.getpid()}")


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _remove_abandoned(place: Path) -> None:
    """Remove folders of ours whose process has ended: their lock is free."""
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            found = folder.lstat()
            if found.st_uid != os.geteuid() or not folder.is_dir() or folder.is_symlink():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # not ours to look at, or just being made
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # in use
        finally:
            os.close(lock)
