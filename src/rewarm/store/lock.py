"""One lock file per living process under `tmp/`: the system frees it when the process ends, however it ends.

Knows only names of processes; what a dead one left behind is for its callers to finish.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    def _try_lock(fd: int) -> bool:
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


_NAME = re.compile(r"([0-9a-f]{16})(?:\.lock|-\d+\.tmp)")
_FLAGS = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


class ProcessLock:
    """This process' lock on the folder `tmp`, held from construction to `release`.

    Attributes:
        process: the token that names this process in intents and temporaries, 16 hex characters.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        while True:
            self.process = secrets.token_hex(8)
            self._path = folder / f"{self.process}.lock"
            self._fd = os.open(self._path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
            # Between the two calls another process may have taken us for dead and removed the file.
            if _try_lock(self._fd) and self._path.exists():
                self._say_who()
                return
            os.close(self._fd)

    def _say_who(self) -> None:
        """Write the process' number behind the byte that is locked, which Windows lets nobody else read."""
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.lseek(self._fd, 0, os.SEEK_SET)
            os.write(self._fd, f" {os.getpid()}\n".encode())

    def release(self) -> None:
        """Give the lock back and remove its file."""
        if self._fd >= 0:
            # Closed first: Windows unlinks no open file. Whoever takes us for dead in between finds nothing to finish.
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(OSError):
                self._path.unlink()

    def dead(self) -> list[str]:
        """Processes that left a lock file or a temporary and whose lock nobody holds."""
        found = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        names = {match[1] for match in found if match}
        return sorted(name for name in names if name != self.process and self.is_dead(name))

    def is_dead(self, process: str) -> bool:
        """Whether the process named `process` holds its lock no more."""
        if process == self.process:
            return False
        try:
            fd = os.open(self._folder / f"{process}.lock", _FLAGS)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            return _try_lock(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def burying(self, process: str) -> Iterator[bool]:
        """Hold a dead process' lock while its remains are removed; yields false when it lives.

        The lock file is removed at the end.
        """
        path = self._folder / f"{process}.lock"
        try:
            fd = os.open(path, _FLAGS)
        except FileNotFoundError:
            yield process != self.process
            return
        dead = False
        try:
            dead = process != self.process and _try_lock(fd)
            yield dead
        finally:
            os.close(fd)
            if dead:
                with contextlib.suppress(OSError):
                    path.unlink()


def holders(folder: Path) -> list[int | None]:
    """The processes, this one too, that hold a lock in the folder `tmp`: their numbers, None where one does not say.

    Raises:
        OSError: the folder cannot be read.
    """
    found: list[int | None] = []
    for path in folder.iterdir():
        if not _NAME.fullmatch(path.name) or path.suffix != ".lock":
            continue
        try:
            fd = os.open(path, _FLAGS)
        except OSError:
            continue  # released meanwhile
        try:
            if not _try_lock(fd):
                found.append(_number(fd))
        finally:
            os.close(fd)
    return found


def _number(fd: int) -> int | None:
    try:
        os.lseek(fd, 1, os.SEEK_SET)
        return int(os.read(fd, 20))
    except (OSError, ValueError):
        return None
