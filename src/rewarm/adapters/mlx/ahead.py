"""Reads large states on the thread that asks, before its request is queued, while the engine goes on with others.

MLX's memory is made, and made into caches, on the thread that generates: `plan` and `DiskTier.finish` run there, and
`read` on any thread. What has been read and does not run yet is bounded in bytes. Knows nothing of HTTP.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from rewarm.adapters.mlx import codec
from rewarm.cache.memory import free_memory
from rewarm.cache.namespace import Match, Namespace
from rewarm.state.sequence import SequenceState

LARGE_NBYTES = 8 * 2**20
"""Smaller states are read in a moment, on the thread that generates."""

SHARE = 4
"""States that wait for their requests take this part of the memory that is free at most."""

_LEAST_S, _MOST_S = 1.0, 30.0


class Waiting:
    """Bytes of states that were read for requests that do not run yet. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.nbytes = 0

    def take(self, nbytes: int) -> bool:
        """Whether so many more may be read."""
        free = free_memory()
        with self._lock:
            if free is not None and self.nbytes + nbytes > free // SHARE:
                return False
            self.nbytes += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """They run now, or nobody wants them any more."""
        with self._lock:
            self.nbytes -= nbytes


@dataclass(slots=True, eq=False)
class Ahead:
    """A state that is read before its request is queued.

    Attributes:
        tokens: of the prompt.
        space: where the state is.
        match: what was found.
        buffers: MLX's memory for it; None where too much waits already, so that the prompt is evaluated instead.
        waiting: what counts its bytes.
        deadline_s: how long reading may take: what prefill would.
        state: what was read; None before that.
        took_s: seconds that planning and reading took.
    """

    tokens: list[int]
    space: Namespace
    match: Match
    buffers: codec.Buffers | None
    waiting: Waiting
    deadline_s: float
    state: SequenceState | None = None
    took_s: float = 0.0
    _counted: bool = field(default=False)

    def __post_init__(self) -> None:
        self._counted = self.buffers is not None

    def read(self) -> None:
        """Read it, on any thread."""
        if self.buffers is not None:
            began = time.perf_counter()
            self.state = self.space.restore(self.match, into=self.buffers.into, deadline=self.deadline_s)
            self.took_s += time.perf_counter() - began

    def release(self) -> None:
        """It runs now, or nobody wants it any more."""
        if self._counted:
            self._counted = False
            self.waiting.give_back(self.match.nbytes)


def deadline_of(prefill_s: float) -> float:
    """Seconds that reading may take, where evaluating the same tokens takes `prefill_s` (0: not known)."""
    return min(_MOST_S, max(_LEAST_S, prefill_s)) if prefill_s else _MOST_S
