"""The perfect model: what a cache that never loses anything would restore, in the plainest way.

Rows alone: the longest common prefix with anything saved, if it reaches `valid_from`. Any other layout:
the longest saved sequence that is a prefix of the prompt. No keys, no blocks, no index: tests compare the
real cache with this one. With evictions it is an upper bound.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from rewarm.state.layout import Layout
from rewarm.state.sequence import SequenceState


@dataclass
class PerfectCache:
    """Everything that was saved, by whatever tells namespaces and tenants apart."""

    saved: dict[tuple[Hashable, Layout], set[tuple[int, ...]]] = field(default_factory=dict)

    def save(self, owner: Hashable, tokens: Sequence[int], state: SequenceState) -> None:
        """Keep `tokens` for `owner`; of the state only the layout matters."""
        self.saved.setdefault((owner, state.layout()), set()).add(tuple(int(t) for t in tokens))

    def restorable(self, owner: Hashable, prompt: Sequence[int], at_most: int | None = None) -> int:
        """The largest n that can be restored for `prompt`; at most all but its last token."""
        cap = max(0, len(prompt) - 1) if at_most is None else min(at_most, max(0, len(prompt) - 1))
        asked = tuple(int(t) for t in prompt[:cap])
        return max(
            (_longest(layout, saved, asked) for (of, layout), saved in self.saved.items() if of == owner),
            default=0,
        )

    def forget(self, owner: Hashable) -> None:
        """Drop all that `owner` saved."""
        for key in [key for key in self.saved if key[0] == owner]:
            del self.saved[key]


def _longest(layout: Layout, saved: set[tuple[int, ...]], asked: tuple[int, ...]) -> int:
    best = 0
    for tokens in saved:
        n = shared(tokens, asked)
        if layout.rows_only or n == len(tokens):
            best = max(best, n)
    return best if best >= layout.valid_from else 0


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens `a` and `b` share from the first on."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
