"""What the store is asked to write, and what came of it. Plain data: knows neither index nor disk."""

from __future__ import annotations

from dataclasses import dataclass, field

from rewarm.format.record import Part
from rewarm.state.chain import Chain, Key, Tokens
from rewarm.state.layout import Layout
from rewarm.state.reason import Boundary, Dropped
from rewarm.state.sequence import MetaValue
from rewarm.store.files import RecordName


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A record to be written.

    Attributes:
        name: where it goes.
        parent: the key before it.
        first: position of the first of `tokens`.
        tokens: its own tokens.
        parts: its tensors; left alone until they are written.
        after: of a point: the earlier point behind which its window runs begin.
        after_n: where that point ends.
    """

    name: RecordName
    parent: Key
    first: int
    tokens: Tokens
    parts: tuple[Part, ...]
    after: Key | None = None
    after_n: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(part.array.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Save:
    """What is to be written for one state: the records that are not there, in the chain's order.

    Attributes:
        fingerprint: the namespace.
        layout: of the state.
        chain: over all tokens of the state.
        drafts: blocks, then the point.
        boundary: what ended at the state's end.
        label: the entry's, or None.
        meta: of the point.
        earlier: the points that the point's window runs need.
        renews_point: the point is there, but rows of its windows have gone: it is written anew.
        thin: of a layout that cannot be cut, points that are no longer of use go.
    """

    fingerprint: bytes
    layout: Layout
    chain: Chain
    drafts: tuple[Draft, ...]
    boundary: Boundary
    label: str | None = None
    meta: dict[str, MetaValue] = field(default_factory=dict)
    earlier: tuple[Key, ...] = ()
    renews_point: bool = False
    thin: bool = True

    @property
    def path(self) -> list[Key]:
        """The records that the point needs, itself apart."""
        return [*self.chain.blocks(), *self.earlier]

    @property
    def n(self) -> int:
        """Tokens of the state."""
        return len(self.chain.tokens)

    def goes_through(self, other: Chain) -> bool:
        """Whether all of `other` is a prefix of this save's sequence, in the same namespace and layout."""
        n = len(other.tokens)
        same = self.chain.root == other.root and n <= self.n
        return same and bool((self.chain.tokens[:n] == other.tokens).all())


@dataclass(slots=True)
class Outcome:
    """What a commit did.

    Attributes:
        n_written: records written.
        nbytes: bytes of their files, headers included, not rounded.
        n_evicted: records dropped to make room.
        dropped: why something was not written, or None.
        error: what the system said, when it was the system's fault.
    """

    n_written: int = 0
    nbytes: int = 0
    n_evicted: int = 0
    dropped: Dropped | None = None
    error: str = ""
