"""Digests of large files, remembered across runs by path, size, mtime, ctime, inode and device.

    {"version": 1, "check": BLAKE3 of "files" in hex, "files": {real path: [size, mtime, ctime, inode, device, digest]}}

A hint that costs one hashing when it is lost: a memo that is damaged, foreign or cannot be written is as good
as empty. Processes that write at the same time may lose each other's newest entries, nothing else. It does not
read the files that it knows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import platformdirs
from blake3 import blake3

log = logging.getLogger(__name__)

MAX_ENTRIES = 4096
VERSION = 1

Facts = tuple[int, int, int, int, int]
"""Size in bytes, mtime and ctime in nanoseconds, inode, device."""

Entry = tuple[int, int, int, int, int, str]

# A file that changes twice within the clock's tick looks unchanged; file systems tick as slowly as 2 s.
_SETTLED_S = 3.0
_MAX_NBYTES = 64 * 2**20

_writing = threading.Lock()


class _Contents(msgspec.Struct, frozen=True):
    version: int
    check: str
    files: dict[str, Entry]


class Memo:
    """The digests that one file remembers. Safe to use from several threads and processes.

    Args:
        path: of the file; by default in the user's cache folder, outside of any cache of rewarm's.
        clock: seconds since 1970.
        max_entries: the oldest go first beyond it.
    """

    def __init__(
        self, path: Path | None = None, clock: Callable[[], float] = time.time, max_entries: int = MAX_ENTRIES
    ) -> None:
        self.path = path or platformdirs.user_cache_path("rewarm") / "model-digests.json"
        self._clock = clock
        self._max_entries = max_entries

    def get(self, real: str, facts: Facts) -> str | None:
        """The digest, in hex, of the file at `real`; None when it is not known, or the file has changed since."""
        entry = self._read().get(printable(real))
        return entry[5] if entry is not None and entry[:5] == facts else None

    def put(self, real: str, facts: Facts, digest: str) -> None:
        """Remember a digest, unless the file is so new that it could change without a trace."""
        if self._clock() - max(facts[1], facts[2]) / 1e9 < _SETTLED_S:
            return
        with _writing:
            files = self._read()
            files.pop(printable(real), None)
            files[printable(real)] = (*facts, digest)
            for oldest in list(files)[: -self._max_entries]:
                del files[oldest]
            try:
                self._write(files)
            except OSError as error:
                log.info("the digest of %s is not remembered: %s", real, error)

    def _read(self) -> dict[str, Entry]:
        """What the file holds; nothing when it is damaged or others could have written it."""
        try:
            with self.path.open("rb") as stream:
                if not _private(os.fstat(stream.fileno())):
                    return {}
                contents = msgspec.json.decode(stream.read(_MAX_NBYTES), type=_Contents)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}
        sound = contents.version == VERSION and contents.check == _check(contents.files)
        return contents.files if sound else {}

    def _write(self, files: dict[str, Entry]) -> None:
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=self.path.name, suffix=".tmp", dir=folder)  # mode 0600
        try:
            with os.fdopen(fd, "wb") as stream:
                stream.write(msgspec.json.encode(_Contents(VERSION, _check(files), files)))
            Path(name).replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise


def _check(files: dict[str, Entry]) -> str:
    return blake3(msgspec.json.encode(files)).hexdigest()


def printable(path: str) -> str:
    """A path, or a name out of one, that JSON can hold: file names need not be text.

    Two that look alike then are told apart by other means: of files, by inode and device.
    """
    return path.encode("utf-8", "backslashreplace").decode()


def _private(found: os.stat_result) -> bool:
    """Whether only this user can have written a file, where the system tells."""
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
