"""Time to live: entries that nobody has matched for their time are forgotten, on the writer's thread.

A clock that jumps must not cost anybody a conversation: after a jump that no pause explains, nothing is
forgotten until the clock has run evenly for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rewarm.store.store import Store

INTERVAL_S = 600.0
EVEN_S = 600.0
"""How long the clock must run evenly after a jump."""

LONG_PAUSE_S = 30 * 86_400.0
"""A clock that is further on than this since it was last seen may be wrong."""

_SLACK_S = 60.0
DAY_S = 86_400.0


class Expiry:
    """Looks for expired entries now and then.

    Args:
        store: whose entries.
        clock: seconds since 1970.
        monotonic: seconds that never jump.
    """

    def __init__(
        self, store: Store, clock: Callable[[], float], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._clock = clock
        self._monotonic = monotonic
        self._next_s = monotonic()
        self._seen: tuple[float, float] | None = None
        self._even_from_s = monotonic()

    def sweep(self, keep_days: float | None) -> int:
        """Forget what has expired, if it is time to look; how many entries.

        Args:
            keep_days: for entries without a time of their own; None keeps them.

        Raises:
            IndexFault, OSError: the store cannot be used now.
        """
        now = self._monotonic()
        if now < self._next_s or not (keep_days is not None or self._store.settings().ttls):
            return 0
        self._next_s = now + INTERVAL_S
        now_s = self._clock()
        if not self._is_even(now, now_s):
            return 0
        default_s = None if keep_days is None else keep_days * DAY_S
        return self._store.forget_expired(now_s, default_s)

    def _is_even(self, now: float, now_s: float) -> bool:
        """Whether the clock can be trusted: it has not jumped of late."""
        if self._seen is None:
            last_s = self._store.last_seen_s()
            jumped = last_s is not None and not -_SLACK_S <= now_s - last_s <= LONG_PAUSE_S
        else:
            jumped = abs((now_s - self._seen[1]) - (now - self._seen[0])) > _SLACK_S
        self._seen = (now, now_s)
        self._store.see(now_s)
        if jumped:
            self._even_from_s = now + EVEN_S
        return now >= self._even_from_s
