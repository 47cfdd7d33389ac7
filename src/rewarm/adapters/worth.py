"""Whether loading a state is quicker than computing it, by what both have taken so far.

Running averages of one model on one machine. A restore takes a while however small it is, and then time for
its bytes: small ones measure the first, large ones the second. Before anything is known, loading is tried.
"""

from __future__ import annotations

import threading

_WEIGHT = 0.3
"""Of the newest measurement."""

ENOUGH_TOKENS = 16
"""Prefills shorter than this measure the overhead."""

_LARGE_NBYTES = 4 * 2**20
"""From this size on a restore measures the bandwidth."""


class Worth:
    """Measured speeds. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prefill_s = 0.0
        self._small_s = 0.0
        self._byte_s = 0.0

    def prefilled(self, n_tokens: int, took_s: float) -> None:
        """Note a prefill."""
        if n_tokens >= ENOUGH_TOKENS and took_s > 0:
            with self._lock:
                self._prefill_s = _average(self._prefill_s, took_s / n_tokens)

    def begin_with(self, token_s: float | None) -> None:
        """Take the seconds that prefill took for a token before this process began, while nothing newer is known."""
        with self._lock:
            self._prefill_s = self._prefill_s or token_s or 0.0

    def restored(self, nbytes: int, took_s: float) -> None:
        """Note a restore, from the store into the slot."""
        with self._lock:
            if nbytes < _LARGE_NBYTES:
                self._small_s = _average(self._small_s, took_s)
            else:
                self._byte_s = _average(self._byte_s, max(0.0, took_s - self._small_s) / nbytes)

    def prefill_s(self, n_tokens: int) -> float | None:
        """Seconds that computing `n_tokens` takes, or None before that is known."""
        return self._prefill_s * n_tokens or None

    def is_worth(self, n_tokens: int, nbytes: int) -> bool:
        """Whether loading `nbytes` is no slower than computing the `n_tokens` that it saves."""
        if not self._prefill_s:
            return True
        return self._small_s + self._byte_s * nbytes <= self._prefill_s * n_tokens


def _average(before: float, now: float) -> float:
    return now if not before else (1 - _WEIGHT) * before + _WEIGHT * now
