"""A disk with faults: counts every operation, and fails, stalls or ends the process at a chosen one.

It stands in for `rewarm.store.disk.Disk`. Faults are named by operation (a method of `Disk`, or None for
any) and by how many of these operations pass before it strikes. It does not know what the files mean.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rewarm.store.disk import Disk

Action = Literal["error", "short", "hang", "kill"]

OPERATIONS = (
    "create",
    "open",
    "write",
    "read_into",
    "stat",
    "sync",
    "close",
    "rename",
    "link",
    "unlink",
    "make_folder",
    "list_folder",
    "free_bytes",
)


@dataclass
class Fault:
    """One planted fault.

    Attributes:
        operation: the method that it strikes; None for any.
        action: `error` raises `OSError(code)`; `short` writes or reads at most one byte of what was asked;
            `hang` waits until the disk is healed; `kill` ends the process with SIGKILL before the operation.
        code: the errno of an `error`.
        after: operations that pass first.
        times: how often it strikes; None for always.
        after_write: with `error` on `write`: half of the data goes to the disk before the error.
        struck: how often it has struck.
    """

    operation: str | None = None
    action: Action = "error"
    code: int = errno.EIO
    after: int = 0
    times: int | None = None
    after_write: bool = False
    struck: int = 0

    def strikes(self, operation: str) -> bool:
        """Whether it strikes now; counts the operation."""
        if self.operation is not None and self.operation != operation:
            return False
        if self.after:
            self.after -= 1
            return False
        if self.times is not None and self.struck >= self.times:
            return False
        self.struck += 1
        return True


class FaultyDisk(Disk):
    """A disk that can be told to fail.

    Attributes:
        faults: the planted ones; the first that strikes counts.
        counts: operations so far, by name.
        log: names of the operations so far, in order.
        bytes_written: bytes that `write` took.
        bytes_read: bytes that `read_into` gave.
        free: what `free_bytes` says, where it is not None.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self.bytes_written = 0
        self.bytes_read = 0
        self.free: int | None = None
        self._lock = threading.Lock()
        self._healed = threading.Event()
        self.hanging = threading.Event()

    def plant(self, fault: Fault) -> Fault:
        """Add a fault."""
        self._healed.clear()
        with self._lock:
            self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """Remove all faults and let go whatever hangs."""
        with self._lock:
            self.faults.clear()
        self.hanging.clear()
        self._healed.set()

    def _meet(self, operation: str) -> Fault | None:
        with self._lock:
            self.counts[operation] += 1
            self.log.append(operation)
            fault = next((fault for fault in self.faults if fault.strikes(operation)), None)
        if fault is None:
            return None
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.action == "hang":
            self.hanging.set()
            self._healed.wait()
            return None
        if fault.action == "error" and not fault.after_write:
            raise OSError(fault.code, os.strerror(fault.code))
        return fault

    def create(self, path: Path) -> int:
        """As the real disk, or a fault."""
        self._meet("create")
        return super().create(path)

    def open(self, path: Path) -> int:
        """As the real disk, or a fault."""
        self._meet("open")
        return super().open(path)

    def write(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """As the real disk, or a fault."""
        fault = self._meet("write")
        if fault is not None:
            first = buffers[0]
            buffers = [first[:1] if fault.action == "short" else first[: max(1, len(first) // 2)]]
        done = super().write(fd, buffers)
        self.bytes_written += done
        if fault is not None and fault.after_write:
            raise OSError(fault.code, os.strerror(fault.code))
        return done

    def read_into(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """As the real disk, or a fault."""
        done = super().read_into(fd, [buffers[0][:1]] if self._meet("read_into") else buffers)
        self.bytes_read += done
        return done

    def stat(self, fd: int) -> os.stat_result:
        """As the real disk, or a fault."""
        self._meet("stat")
        return super().stat(fd)

    def sync(self, fd: int) -> None:
        """As the real disk, or a fault."""
        self._meet("sync")
        super().sync(fd)

    def close(self, fd: int) -> None:
        """As the real disk, or a fault; the descriptor is closed all the same, as Linux does."""
        try:
            self._meet("close")
        finally:
            super().close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """As the real disk, or a fault."""
        self._meet("rename")
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """As the real disk, or a fault."""
        self._meet("link")
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        """As the real disk, or a fault."""
        self._meet("unlink")
        super().unlink(path)

    def make_folder(self, path: Path) -> None:
        """As the real disk, or a fault."""
        self._meet("make_folder")
        super().make_folder(path)

    def list_folder(self, path: Path) -> Iterator[os.DirEntry[str]]:
        """As the real disk, or a fault."""
        self._meet("list_folder")
        yield from super().list_folder(path)

    def free_bytes(self, path: Path) -> int:
        """As the real disk, or a fault, or `free`."""
        self._meet("free_bytes")
        return super().free_bytes(path) if self.free is None else self.free
