"""From a state to a save in the writer's queue: what is not stored yet is copied, as far as the queue has room.

Runs on the caller's thread and waits for no disk; the index is asked what is there, and when it cannot
answer, more is copied than needed. It knows drafts and plans, not files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from rewarm.cache.arena import Arena
from rewarm.cache.description import describe
from rewarm.cache.drafts import After, Cut, drafts, keys_of, unshared
from rewarm.cache.identity import Identity
from rewarm.cache.jobs import Job, SaveReport
from rewarm.cache.reading import ReadPool
from rewarm.cache.stats import Stats
from rewarm.cache.writer import Writer
from rewarm.errors import IndexFault, RewarmError
from rewarm.state.chain import Chain, Key, Tokens
from rewarm.state.layout import Layout
from rewarm.state.plan import MAX_AFTER, plan
from rewarm.state.reason import Boundary, Dropped
from rewarm.state.sequence import SequenceState
from rewarm.store.saves import Draft, Save
from rewarm.store.store import Store

log = logging.getLogger("rewarm.cache")

LOOK_DEADLINE_S = 0.2
DESCRIBED_S = 3600.0
"""How old what a namespace's folder says of its last use may become."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the namespaces of one cache share."""

    store: Store
    stats: Stats
    writer: Writer
    clock: Callable[[], float]
    pool: ReadPool
    looks: ReadPool
    arena: Arena


@dataclass(frozen=True, slots=True)
class Ending:
    """What ends at a saved state, and how it was handed in.

    Attributes:
        boundary: what ends there.
        label: the entry's name, or None.
        given: the caller leaves the arrays alone until the save is done.
    """

    boundary: Boundary
    label: str | None
    given: bool = False


@dataclass(frozen=True, slots=True)
class _Stored:
    """What of a state is there.

    Attributes:
        keys: of its records.
        after: the point behind which its window runs may begin, or None.
        gap: its own point is there, but rows of its windows have gone.
    """

    keys: set[Key]
    after: After | None = None
    gap: bool = False


class Saver:
    """Makes the saves of one namespace.

    Args:
        shared: store, writer and the like.
        identity: of the model.
        chain_of: the chain of some tokens, by fingerprint and layout.
    """

    def __init__(self, shared: Shared, identity: Identity, chain_of: Callable[[bytes, Layout, Tokens], Chain]) -> None:
        self._shared = shared
        self._identity = identity
        self._chain_of = chain_of
        self._described_at = 0
        self._described_s = 0.0

    def save(self, own: Tokens, state: SequenceState, layout: Layout, ending: Ending) -> SaveReport:
        """Queue what is not stored of `state`, the oldest rows first, as much as the queue has room for."""
        fingerprint = self._identity.fingerprint_bytes
        if fingerprint is None:
            return self._save_later(own, state, layout, ending)
        chain = self._chain_of(fingerprint, layout, own)
        cut = Cut(state, layout, chain, fingerprint)
        stored = self._look(cut)
        present = stored.keys | self._shared.writer.pending_keys()
        arena = None if ending.given else self._shared.arena
        made = drafts(cut, present, stored.after, self._shared.writer.free_bytes, arena)
        save = self._as_save(cut, ending, made.drafts, stored)
        dropped = Dropped.QUEUE_FULL if made.n_left else None
        report = SaveReport(len(own), made.nbytes, dropped, waits=bool(made.drafts))
        report.refused_tokens = len(own) - made.reached
        if made.n_left:
            self._shared.stats.dropped(Dropped.QUEUE_FULL)
            if not made.drafts:
                return report
        self._shared.writer.put(Job(self._ready, made.nbytes, report, save, given=ending.given))
        return report

    def _save_later(self, own: Tokens, state: SequenceState, layout: Layout, ending: Ending) -> SaveReport:
        """A save whose model is not identified yet: all of its state waits in the queue."""
        nbytes = sum(tensor.array.nbytes for tensor in state.tensors.values())
        if nbytes > self._shared.writer.free_bytes:
            self._shared.stats.dropped(Dropped.QUEUE_FULL)
            report = SaveReport(len(own), 0, Dropped.QUEUE_FULL)
            report.refused_tokens = len(own)
            return report
        held = state if ending.given else unshared(state)
        report = SaveReport(len(own), nbytes)

        def prepare(_: Save | None) -> Save | None:
            if self._identity.error:
                raise RewarmError(self._identity.error)
            fingerprint = self._identity.fingerprint_bytes
            if fingerprint is None:
                return None
            cut = Cut(held, layout, self._chain_of(fingerprint, layout, own), fingerprint)
            stored = self._stored(cut)
            made = drafts(cut, stored.keys, stored.after, None, None)
            return self._ready(self._as_save(cut, ending, made.drafts, stored))

        self._shared.writer.put(Job(prepare, nbytes, report, given=ending.given))
        return report

    def _look(self, cut: Cut) -> _Stored:
        """What of a state is there, on the caller's thread: a disk that does not answer is not waited for."""
        try:
            return self._shared.looks.within(lambda: self._stored(cut), LOOK_DEADLINE_S)
        except (TimeoutError, OSError):
            return _Stored(set())

    def _stored(self, cut: Cut) -> _Stored:
        """What of a state is there. A point whose window rows are no longer all there counts as not there."""
        store, chain, layout = self._shared.store, cut.chain, cut.layout
        try:
            present = store.present(keys_of(chain), LOOK_DEADLINE_S)
            if not layout.windows:
                return _Stored(present)
            n = len(chain.tokens)
            with store.looking(LOOK_DEADLINE_S) as source:
                found = plan(layout, chain, source)
        except (IndexFault, TimeoutError, ValueError):
            return _Stored(set())
        if found.n == n:
            return _Stored(present)
        point = chain.point(n)
        gap, keys = point in present, present - {point}
        edge = n - max(spec.size - spec.keep for spec in layout.windows)
        if found.n > edge and found.tail is not None and len(found.points) <= MAX_AFTER:
            return _Stored(keys, After(found.tail, found.n, found.points), gap)
        return _Stored(keys, None, gap)

    def _as_save(self, cut: Cut, ending: Ending, made: tuple[Draft, ...], stored: _Stored) -> Save:
        return Save(
            fingerprint=cut.fingerprint,
            layout=cut.layout,
            chain=cut.chain,
            drafts=made,
            boundary=ending.boundary,
            label=ending.label,
            meta=dict(cut.state.meta),
            earlier=stored.after.points if stored.after else (),
            renews_point=stored.gap,
        )

    def _ready(self, save: Save | None) -> Save | None:
        """On the writer's thread, before a save: the namespace's folder says whose it is."""
        if save is not None:
            self._describe()
        return save

    def seen(self) -> None:
        """Something of the namespace was found: its folder says so, before long."""
        if self._is_due():
            self._shared.writer.later(self._describe)

    def _is_due(self) -> bool:
        since = abs(self._shared.clock() - self._described_s)
        return self._described_at != self._shared.store.n_attached or since > DESCRIBED_S

    def _describe(self) -> None:
        fingerprint, store = self._identity.fingerprint_bytes, self._shared.store
        if fingerprint is None or not self._is_due():
            return
        now_s = self._shared.clock()
        try:
            store.describe(fingerprint, describe(self._identity, now_s, store.description(fingerprint)))
        except OSError as error:
            log.debug("identity.json waits: %s", error)
        else:
            self._described_at, self._described_s = store.n_attached, now_s
