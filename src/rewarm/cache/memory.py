"""How much memory there is: what bounds the queue, and what a restore may allocate."""

from __future__ import annotations

import os
from pathlib import Path

_MIB = 2**20


def total_memory() -> int | None:
    """Bytes of memory that the machine has, where the system says so."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def free_memory() -> int | None:
    """Bytes that can be allocated without swapping; the machine's total where only that is known."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    # macOS has no cheap figure for what can be reclaimed; the total still stops absurd sizes.
    return total_memory()


def queue_limit() -> int:
    """Bytes that waiting saves may take: 1/16 of memory, 256 MiB to 2 GiB."""
    return min(2048 * _MIB, max(256 * _MIB, (total_memory() or 0) // 16))
