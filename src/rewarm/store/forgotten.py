"""What was forgotten of late: keys, and how to tell that a conversation goes through one of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rewarm.state.chain import Chain, Key


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Records that were erased on request.

    Attributes:
        keys: of blocks and points.
        lengths: where the points among them end, in tokens.
    """

    keys: frozenset[Key] = frozenset()
    lengths: frozenset[int] = frozenset()

    def covers(self, chain: Chain) -> bool:
        """Whether the sequence of `chain` goes through a forgotten record: one of its blocks, or a point on it."""
        if not self.keys:
            return False
        n = len(chain.tokens)
        return any(key in self.keys for key in chain.blocks()) or any(
            chain.point(length) in self.keys for length in {*self.lengths, n} if 0 < length <= n
        )

    def __or__(self, other: Forgotten) -> Forgotten:
        """Both."""
        return Forgotten(self.keys | other.keys, self.lengths | other.lengths)
