"""The restore planner: the largest n at which a prompt's state can be put together, and why not more.

Read-only and pure: it asks a `Source` (the index, or a test's table) which records there are, by key and
by token order, and answers with the records to read. It does not open files and knows no policy.

A layout of rows alone can be cut anywhere, so the answer is the longest common prefix with anything
stored. Any other layout can be restored at stored points only, so the answer is the longest stored
point that is a prefix of the prompt, and whose blocks and window rows are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rewarm.state.chain import Chain, Key, Tokens, common_prefix, from_ordered, ordered
from rewarm.state.layout import Layout
from rewarm.state.reason import Reason

MAX_AFTER = 4
"""Earlier points that a window run may reach over."""

Detail = dict[str, int | str]


@dataclass(frozen=True, slots=True)
class Child:
    """A record under a parent, as the index knows it.

    Attributes:
        key: the record's key.
        is_point: a point, else a block.
        n: tokens that the state covers at the record's end.
        tokens: the record's own tokens, in ordered form.
        after: the point whose end begins this point's window run.
    """

    key: Key
    is_point: bool
    n: int
    tokens: bytes
    after: Key | None = None


class Source(Protocol):
    """What the planner asks. Each call is one ordered look-up."""

    def n_present(self, blocks: Sequence[Key]) -> int:
        """How many of `blocks` are there, from the first one on without a gap."""
        ...

    def record(self, key: Key) -> Child | None:
        """The record named `key`."""
        ...

    def before(self, parent: Key, tokens: bytes, *, points_only: bool) -> Child | None:
        """The last record under `parent`, in token order, at or before `tokens` (ordered form)."""
        ...

    def behind(self, parent: Key, tokens: bytes) -> Child | None:
        """The first record under `parent`, in token order, at or behind `tokens` (ordered form)."""
        ...

    def gone(self, keys: Sequence[Key]) -> Reason | None:
        """Why one of `keys` (500 at most) is no longer there, where that is known."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What to read for the state at `n`.

    Attributes:
        n: tokens that the restored state will cover; 0 at a miss.
        blocks: the full blocks to read, in order.
        tail: the record whose first rows are those of tokens `[len(blocks) * block size, n)`.
        tail_is_point: `tail` is a point, else a block.
        exact: `tail` is a point that ends at `n` itself, so its `meta` belongs to the state.
        points: the points whose window runs are needed, latest first; begins with `tail` when exact.
        reason: why `n` is not larger.
        detail: evidence for the reason.
    """

    n: int = 0
    blocks: tuple[Key, ...] = ()
    tail: Key | None = None
    tail_is_point: bool = False
    exact: bool = False
    points: tuple[Key, ...] = ()
    reason: Reason = Reason.NOTHING_STORED
    detail: Detail = field(default_factory=dict)

    @property
    def path(self) -> tuple[Key, ...]:
        """Every record that this state needs."""
        extra = self.points if self.exact else ((self.tail,) if self.tail else ())
        return (*self.blocks, *extra)


def plan(layout: Layout, chain: Chain, source: Source) -> Plan:
    """The longest restorable prefix of `chain.tokens`, which are already cut to what may be matched."""
    n_blocks = source.n_present(chain.blocks())
    shared = _shared(chain, source, n_blocks)
    found = _cut(layout, chain, source, shared) if layout.rows_only else _at_point(layout, chain, source, n_blocks)
    reason, detail = _why_not_more(chain, source, shared, found.n)
    return replace(found, reason=reason, detail=detail)


@dataclass(frozen=True, slots=True)
class _Shared:
    """How far anything stored agrees with the prompt: `n` tokens; `neighbour` shares the last of them."""

    n: int
    n_blocks: int
    neighbour: Child | None
    stored_next: int | None


def _shared(chain: Chain, source: Source, n_blocks: int) -> _Shared:
    parent, tail = chain.parent(n_blocks), _under(chain, n_blocks)
    own = ordered(tail)
    best, best_child, next_token = 0, None, None
    for child in (source.before(parent, own, points_only=False), source.behind(parent, own)):
        if child is None:
            continue
        tokens = from_ordered(child.tokens)
        common = common_prefix(tokens, tail)
        if best_child is None or common > best:
            best, best_child, next_token = common, child, None
        if common == best and len(tokens) > common:
            next_token = int(tokens[common])
    start = n_blocks * chain.block_tokens
    return _Shared(start + best, n_blocks, best_child if best else None, next_token)


def _under(chain: Chain, i: int) -> Tokens:
    """The prompt's tokens past the first `i` blocks, as far as a record under block `i - 1` can reach."""
    return chain.tail(i)[: chain.block_tokens]


def _cut(layout: Layout, chain: Chain, source: Source, shared: _Shared) -> Plan:
    """Rows alone: cut what is stored to the longest common prefix."""
    n = shared.n
    if n == 0 or n < layout.valid_from:
        return Plan()
    blocks = tuple(chain.blocks()[: n // chain.block_tokens])
    own = source.record(chain.point(n))
    if own is not None:
        return Plan(n, blocks, own.key, tail_is_point=True, exact=True, points=(own.key,))
    other = shared.neighbour
    return Plan(n, blocks, other.key, tail_is_point=other.is_point) if other else Plan(n, blocks)


def _at_point(layout: Layout, chain: Chain, source: Source, n_blocks: int) -> Plan:
    """Any other layout: the longest stored point that is a prefix and whose path is whole."""
    for i in range(n_blocks, -1, -1):
        query = _under(chain, i)
        while True:
            child = source.before(chain.parent(i), ordered(query), points_only=True)
            if child is None:
                break
            tokens = from_ordered(child.tokens)
            common = common_prefix(tokens, query)
            if common < len(tokens):
                query = query[:common]
                continue
            points = window_path(layout, child, source)
            if points and child.n >= max(1, layout.valid_from):
                blocks = tuple(chain.blocks()[:i])
                return Plan(child.n, blocks, child.key, tail_is_point=True, exact=True, points=points)
            if not len(tokens):
                break
            query = query[: len(tokens) - 1]
    return Plan()


def window_path(layout: Layout, point: Child, source: Source) -> tuple[Key, ...]:
    """The points whose window runs the state at `point` needs, latest first; empty when one is missing."""
    edge = point.n - max((spec.size - spec.keep for spec in layout.windows), default=0)
    path, current = [point.key], point
    while current.after is not None:
        earlier = source.record(current.after)
        if earlier is None or not earlier.is_point or len(path) > MAX_AFTER or earlier.n >= current.n:
            return ()
        if earlier.n <= edge:
            break
        path.append(earlier.key)
        current = earlier
    return tuple(path)


def _why_not_more(chain: Chain, source: Source, shared: _Shared, n: int) -> tuple[Reason, Detail]:
    if n == len(chain.tokens):
        return Reason.HIT, {}
    if shared.n > n:
        return Reason.NO_RESTORE_POINT, {"shared": shared.n, "restorable": n}
    if (gone := source.gone(_next_keys(chain, shared))) is not None:
        return gone, {"at": shared.n}
    if shared.stored_next is not None:
        asked = int(chain.tokens[shared.n])
        return Reason.DIVERGED, {"at": shared.n, "asked_token": asked, "stored_token": shared.stored_next}
    return Reason.NOTHING_STORED, {"stored": shared.n}


def _next_keys(chain: Chain, shared: _Shared) -> list[Key]:
    """The keys that would have brought the match further: the next block, or a point before its end."""
    first, size = shared.n_blocks * chain.block_tokens, chain.block_tokens
    if shared.n_blocks < chain.n_blocks:
        return [chain.block(shared.n_blocks)]
    return [chain.point(n) for n in range(shared.n + 1, min(len(chain.tokens), first + min(size, 500) - 1) + 1)]


def tail_tokens(chain: Chain, n: int) -> Tokens:
    """The tokens of `[last block's end, n)`: what a point at `n` holds itself."""
    return chain.tokens[n // chain.block_tokens * chain.block_tokens : n]
