"""The operations that the store asks of the operating system, one method each.

Nothing here knows records or names. The fault-injecting layer of the tests replaces this class, so
whatever can fail on a disk goes through it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

try:
    import fcntl as _fcntl
except ImportError:  # Windows
    fcntl: Any = None
else:
    fcntl = _fcntl

MAX_PIECE = 2**30
"""Bytes that one call reads or writes at most: macOS refuses 2 GiB and more."""

MAX_BUFFERS = 1024
"""Buffers that one call fills at most: IOV_MAX of Linux and macOS."""

_BINARY = getattr(os, "O_BINARY", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


SHARING_WAIT_S = 1.0
"""How long a file that somebody else has open is waited for, where the system lets nobody replace or read it then."""

SHARES_FILES = os.name != "nt"
"""Whether a file can be replaced while others have it open."""

T = TypeVar("T")


def patiently(operation: Callable[[], T]) -> T:
    """Do `operation`; on Windows again, for a second, while another process has the file open."""
    end = time.monotonic() + SHARING_WAIT_S
    while True:
        try:
            return operation()
        except PermissionError:
            if SHARES_FILES or time.monotonic() > end:
                raise
            time.sleep(0.01)


MAX_SMALL_NBYTES = 64 * 2**20
"""What a settings or identity file may have at most: pins and times to live make one of many entries long."""


def read_small(path: Path) -> bytes:
    """The bytes of a settings or identity file; a pipe is not waited for, and nothing huge is read.

    Raises:
        OSError: it cannot be read, is no plain file, or is larger than `MAX_SMALL_NBYTES`.
    """
    fd = os.open(path, os.O_RDONLY | _BINARY | _CLOEXEC | _NONBLOCK)
    with os.fdopen(fd, "rb") as stream:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        if status.st_size > MAX_SMALL_NBYTES:
            raise OSError(errno.EFBIG, "it is too large")
        return stream.read(status.st_size)  # which is as much memory as is asked for


class Disk:
    """The real disk. Every method raises `OSError` as the system does."""

    def create(self, path: Path) -> int:
        """Open a new file for writing, mode 0600; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY | _NOFOLLOW | _CLOEXEC, 0o600)

    def open(self, path: Path) -> int:
        """Open a file for reading; a symbolic link is refused (ELOOP), and a named pipe is not waited for."""
        if not _NOFOLLOW and path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        return os.open(path, os.O_RDONLY | _BINARY | _NOFOLLOW | _CLOEXEC | _NONBLOCK)

    def write(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Write some of `buffers`, one after the other, at the file's position; how many bytes.

        Args:
            fd: an open file.
            buffers: of bytes, at most `MAX_BUFFERS`, together at most `MAX_PIECE` bytes.
        """
        if hasattr(os, "writev"):
            return os.writev(fd, buffers)
        return os.write(fd, buffers[0])

    def seek(self, fd: int, position: int) -> None:
        """Go to a byte of an open file, beyond its end too."""
        os.lseek(fd, position, os.SEEK_SET)

    def read_into(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Read into `buffers`, one after the other, from the file's position; how many bytes, 0 at the end.

        Args:
            fd: an open file.
            buffers: of bytes, at most `MAX_BUFFERS`, together at most `MAX_PIECE` bytes.
        """
        if hasattr(os, "readv"):
            return os.readv(fd, buffers)
        data = os.read(fd, len(buffers[0]))
        buffers[0][: len(data)] = data
        return len(data)

    def stat(self, fd: int) -> os.stat_result:
        """Size, owner and mode of an open file."""
        return os.fstat(fd)

    def sync(self, fd: int) -> None:
        """Push an open file, or an open folder where the system can, to the medium."""
        full = getattr(fcntl, "F_FULLFSYNC", None)
        if full is not None:
            # macOS' fsync leaves the data in the drive's own memory; not every file system knows the other way.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, full)
                return
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a file."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file over whatever has the name `target`."""
        patiently(lambda: source.replace(target))

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, unless the name is taken; a plain move where there are no links."""
        try:
            target.hardlink_to(source)
        except FileExistsError:
            return
        except OSError:
            if not target.exists():
                source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        path.unlink()

    def make_folder(self, path: Path) -> None:
        """Make a folder, mode 0700, unless it is there; it must not be a symbolic link."""
        path.mkdir(mode=0o700, exist_ok=True)
        if path.is_symlink():
            raise NotADirectoryError(f"{path} is a symbolic link")

    def list_folder(self, path: Path) -> Iterator[os.DirEntry[str]]:
        """The entries of a folder."""
        with os.scandir(path) as entries:
            yield from entries

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still write on the disk of `path`."""
        return shutil.disk_usage(path).free
