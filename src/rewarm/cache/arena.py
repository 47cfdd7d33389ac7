"""Memory for the copies that wait to be written, used again while there is much to save.

Memory that is new to a process costs the system more than the copy into it: every page of it is made, and
filled with zeros, at its first touch. It does not know what is copied.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

KEPT_NBYTES = 2**28
"""Bytes that are kept for the next save at most."""

KEPT_S = 5.0
"""How long they are kept without any save."""

ALIGNMENT = 64
"""Bytes: what processors read at once."""

# What refers to an array that only the arena has: its list, the loop's name for it, and the call that counts.
_FREE = 3


class Arena:
    """Byte arrays that are used again as soon as nobody refers to them; safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: dict[int, list[Bytes]] = defaultdict(list)
        self._nbytes = 0
        self._used_at = 0.0
        # Only where references are counted can it be known that nobody has an array any more.
        self._counts = hasattr(sys, "getrefcount")

    @property
    def nbytes(self) -> int:
        """Bytes that are kept, in use or not."""
        return self._nbytes

    def take(self, nbytes: int) -> Bytes:
        """An array of so many bytes, of any content; it is the caller's as long as it, or a view of it, is referred to.

        Raises:
            MemoryError: there is no memory.
        """
        with self._lock:
            self._used_at = time.monotonic()
            if self._counts:
                for array in self._arrays[nbytes]:
                    if sys.getrefcount(array) == _FREE:
                        return array
            made = np.empty(nbytes, np.uint8)
            if self._counts and self._nbytes + nbytes <= KEPT_NBYTES:
                self._arrays[nbytes].append(made)
                self._nbytes += nbytes
            return made

    def trim(self) -> None:
        """Keep nothing when there has been no save for a while; what is in use stays its users'."""
        with self._lock:
            if self._nbytes and time.monotonic() - self._used_at > KEPT_S:
                self._arrays.clear()
                self._nbytes = 0
