"""The index as the planner sees it. Read-only; knows no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rewarm.state.chain import Key
from rewarm.state.plan import Child
from rewarm.state.reason import Reason
from rewarm.store.index import Index


class Source:
    """The index as the planner sees it, without records that this process has found to be bad."""

    def __init__(self, index: Index, bad: Mapping[Key, Reason]) -> None:
        self._index = index
        self._bad = bad

    def n_present(self, blocks: Sequence[Key]) -> int:
        """How many of `blocks` are there, from the first one on without a gap."""
        n = self._index.n_present(blocks)
        return next((i for i in range(n) if blocks[i] in self._bad), n)

    def record(self, key: Key) -> Child | None:
        """The record named `key`."""
        return None if key in self._bad else self._index.child(key)

    def before(self, parent: Key, tokens: bytes, *, points_only: bool) -> Child | None:
        """The last record under `parent` at or before `tokens`."""
        found = self._before(parent, tokens, is_point=True)
        block = None if points_only else self._before(parent, tokens, is_point=False)
        return max((child for child in (found, block) if child), key=lambda child: child.tokens, default=None)

    def behind(self, parent: Key, tokens: bytes) -> Child | None:
        """The first record under `parent` at or behind `tokens`."""
        pair = [self._behind(parent, tokens, is_point=is_point) for is_point in (True, False)]
        return min((child for child in pair if child), key=lambda child: child.tokens, default=None)

    def _before(self, parent: Key, tokens: bytes, *, is_point: bool) -> Child | None:
        # Past bad ones, of which there are few: each step goes strictly on.
        child = self._index.before(parent, tokens, is_point=is_point)
        while child is not None and child.key in self._bad:
            child = self._index.before(parent, child.tokens, is_point=is_point, strictly=True)
        return child

    def _behind(self, parent: Key, tokens: bytes, *, is_point: bool) -> Child | None:
        child = self._index.behind(parent, tokens, is_point=is_point)
        while child is not None and child.key in self._bad:
            child = self._index.behind(parent, child.tokens, is_point=is_point, strictly=True)
        return child

    def gone(self, keys: Sequence[Key]) -> Reason | None:
        """Why one of `keys` is no longer there, as far as that is known."""
        for key in keys:
            if key in self._bad:
                return self._bad[key]
        return Reason.EVICTED if self._index.among_evicted(keys) else None
