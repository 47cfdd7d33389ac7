"""How much memory there is: what bounds the queue, and what a restore may allocate. Knows no tensors."""

from __future__ import annotations

import psutil

_MIB = 2**20


def total_memory() -> int | None:
    """Bytes of memory that the machine has, where the system says so."""
    try:
        return int(psutil.virtual_memory().total)
    except (OSError, psutil.Error):
        return None


def free_memory() -> int | None:
    """Bytes that can be allocated without swapping, where the system says so."""
    try:
        return int(psutil.virtual_memory().available)
    except (OSError, psutil.Error):
        return None


def queue_limit() -> int:
    """Bytes that waiting saves may take: 1/16 of memory, 256 MiB to 2 GiB."""
    return min(2048 * _MIB, max(256 * _MIB, (total_memory() or 0) // 16))
