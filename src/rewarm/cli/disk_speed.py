"""How quickly a disk reads and writes: one file, written to the medium, dropped from memory, read again, removed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SIZE = 64 * 2**20
CHUNK = 4 * 2**20
ROOM = 4 * SIZE
"""Bytes that must be free, so that a measurement fills no disk."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured, in bytes a second.

    Attributes:
        write_per_s: until it was on the medium.
        read_per_s: after the system was asked to forget it.
        is_cold: whether the system could be asked to.
    """

    write_per_s: float
    read_per_s: float
    is_cold: bool


def measure(folder: Path) -> Speed | None:
    """The speed of the disk that `folder` is, or would be, on; None where there is no room or no right to write."""
    there = next((each for each in (folder, *folder.absolute().parents) if each.is_dir()), None)
    try:
        if there is None or shutil.disk_usage(there).free < ROOM:
            return None
        fd, name = tempfile.mkstemp(prefix=".rewarm-speed-", suffix=".tmp", dir=there)
    except OSError:
        return None
    try:
        return _measured(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
        Path(name).unlink(missing_ok=True)


def _measured(fd: int) -> Speed:
    chunk = secrets.token_bytes(CHUNK)  # a disk that compresses would be quick with zeros
    began = time.perf_counter()
    for _ in range(SIZE // CHUNK):
        _write(fd, chunk)
    os.fsync(fd)
    write_s = time.perf_counter() - began
    is_cold = False
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            is_cold = True
    os.lseek(fd, 0, os.SEEK_SET)
    began = time.perf_counter()
    while os.read(fd, CHUNK):
        pass
    read_s = time.perf_counter() - began
    return Speed(SIZE / max(write_s, 1e-9), SIZE / max(read_s, 1e-9), is_cold)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
