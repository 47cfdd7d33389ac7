"""Namespace: the states of one model. Finds the longest stored prefix, restores it, saves what is new.

Only wrong calls raise; every fault below is a shorter match or state with a reason, or a dropped save.
It knows plans and records, not files or SQL, and is used from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rewarm.cache.assemble import Assembly, ForeignRecord, Into
from rewarm.cache.description import explain_change
from rewarm.cache.identity import Identity
from rewarm.cache.jobs import SaveReport
from rewarm.cache.memory import free_memory
from rewarm.cache.reading import RecordReader
from rewarm.cache.saver import Ending, Saver, Shared
from rewarm.errors import DamagedRecord, IndexFault, RecordError
from rewarm.state.chain import Chain, ChainMemo, Key, Tokens, as_tokens, common_prefix, root_key
from rewarm.state.layout import Layout
from rewarm.state.plan import Plan, plan
from rewarm.state.reason import Boundary, Dropped, Reason
from rewarm.state.sequence import SequenceState
from rewarm.store.forgotten import Forgotten

log = logging.getLogger("rewarm.cache")

FIND_DEADLINE_S = 0.2
RESTORE_DEADLINE_S = 30.0
MAX_TEXT = 4096
"""Characters of a label, and of a text in `meta`."""

_ATTEMPTS = 64
"""Plans that one restore tries; each one begins below a record that failed."""


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """What `find` found: the longest stored prefix, 0 tokens at a miss.

    Attributes:
        n_tokens: tokens of the prompt that can be restored.
        reason: why it is not longer.
        detail: evidence for the reason, by name.
        nbytes: bytes of the state's rows and windows.
        tokens: the prompt, cut to what was asked.
        layout: of the state, or None at a miss.
        plan: the records to read.
        root: the key that the chain hangs from: model, layout and tenant.
    """

    n_tokens: int
    reason: Reason
    detail: Mapping[str, Any] = field(default_factory=dict)
    nbytes: int = 0
    tokens: Tokens = field(default_factory=lambda: as_tokens(()))
    layout: Layout | None = None
    plan: Plan = field(default_factory=Plan)
    root: Key | None = None


class Namespace:
    """The states of one model, for one tenant.

    Attributes:
        identity: of the model.
    """

    def __init__(self, shared: Shared, identity: Identity, tenant: bytes) -> None:
        self.identity = identity
        self._store, self._stats, self._writer = shared.store, shared.stats, shared.writer
        self._pool, self._looks = shared.pool, shared.looks
        self._tenant = tenant
        self._chains = ChainMemo()
        self._saver = Saver(shared, identity, self._chain)
        identity.add_done_callback(lambda _: self._writer.wake())

    # Finding.

    def find(self, tokens: Iterable[int] | Tokens, at_most: int | None = None) -> Match:
        """The longest stored prefix of `tokens`, at most `len(tokens) - 1`; reads the index only.

        Args:
            tokens: the prompt's token ids.
            at_most: an upper bound, in tokens.

        Raises:
            ValueError: `tokens` is no sequence of 64-bit signed integers, or `at_most` is negative.
        """
        asked = as_tokens(tokens)
        if at_most is not None and at_most < 0:
            raise ValueError(f"at_most must be 0 or more, not {at_most}")
        limit = max(0, len(asked) - 1)
        match = self.look(asked[: limit if at_most is None else min(limit, at_most)])
        if match.n_tokens:
            self._writer.note(match.plan.path)
            self._writer.want(match.plan.path)
            self._saver.seen()
        elif match.reason is not Reason.HIT:  # a prompt of one token asks for nothing
            self._stats.miss(match.reason)
        return match

    def look(self, tokens: Tokens) -> Match:
        """As `find`, of all of `tokens`, but nobody is told: neither recency nor counters change."""
        fingerprint = self.identity.fingerprint_bytes
        if fingerprint is None:
            if self.identity.error:
                return Match(0, Reason.UNAVAILABLE, {"identity": self.identity.error}, tokens=tokens)
            return Match(0, Reason.IDENTITY_PENDING, tokens=tokens)
        try:
            # On a thread of its own: a look-up that a disk holds up can be left, not ended.
            return self._looks.within(lambda: self._look(fingerprint, tokens), FIND_DEADLINE_S)
        except TimeoutError:
            return Match(0, Reason.TIMEOUT, tokens=tokens)
        except (IndexFault, OSError, ValueError) as error:
            # A ValueError: the tokens are good, so the index holds what was never written there.
            fault = (
                error if isinstance(error, IndexFault) else IndexFault(str(error), broken=isinstance(error, ValueError))
            )
            self._writer.met(fault)
            log.debug("nothing can be found now: %s", error)
            return Match(0, Reason.UNAVAILABLE, {"error": str(error)}, tokens=tokens)

    def _look(self, fingerprint: bytes, tokens: Tokens) -> Match:
        self._writer.heed(FIND_DEADLINE_S)
        return self._longest(fingerprint, tokens)

    def _longest(self, fingerprint: bytes, tokens: Tokens) -> Match:
        best: Match | None = None
        with self._store.looking(FIND_DEADLINE_S) as source:
            for layout in self._store.layouts(fingerprint):
                found = plan(layout, self._chain(fingerprint, layout, tokens), source)
                if best is None or found.n > best.n_tokens:
                    nbytes = layout.state_nbytes(found.n)
                    root = self._chain(fingerprint, layout, tokens).root
                    best = Match(found.n, found.reason, found.detail, nbytes, tokens, layout, found, root)
        if best is None:
            best = Match(0, Reason.NOTHING_STORED if len(tokens) else Reason.HIT, tokens=tokens)
        return self._explained(fingerprint, best) if best.reason is Reason.NOTHING_STORED else best

    def _explained(self, fingerprint: bytes, match: Match) -> Match:
        """Where nothing more is stored: a save of it that was not written, or another model of the same name."""
        unwritten = self._unwritten(fingerprint, match.tokens, match.n_tokens)
        if unwritten or match.n_tokens or self._tenant:
            return replace(match, detail={**match.detail, **unwritten})
        # Nothing at all begins with this prompt's first token, and the reason says so: the namespace is empty.
        changed = explain_change(self.identity, self._store.descriptions())
        return Match(0, Reason.IDENTITY_CHANGED, {"fields": changed}, tokens=match.tokens) if changed else match

    def _unwritten(self, fingerprint: bytes, tokens: Tokens, n: int) -> dict[str, Any]:
        """Why a save that would have brought the match beyond `n` was not written, if there was one of late."""
        for save, reason in self._writer.unwritten():
            own = save.fingerprint == fingerprint and self._chain(fingerprint, save.layout, tokens[:0]).root
            if own == save.chain.root and common_prefix(save.chain.tokens, tokens) > n:
                return {"dropped": reason.value, "dropped_tokens": save.n}
        return {}

    def _chain(self, fingerprint: bytes, layout: Layout, tokens: Tokens) -> Chain:
        size = self._store.block_tokens
        return self._chains.chain(root_key(size, fingerprint, layout.digest, self._tenant), tokens, size)

    def heed(self) -> None:
        """Take note of what any process has forgotten since: for adapters, before their engine's memory is asked."""
        with contextlib.suppress(IndexFault, OSError):  # a TimeoutError is one
            self._looks.within(lambda: self._writer.heed(FIND_DEADLINE_S), FIND_DEADLINE_S)

    def holds_any(self, forgotten: Forgotten, tokens: Iterable[int] | Tokens) -> bool:
        """Whether the state after `tokens` goes through what was forgotten: for adapters, when they are told."""
        fingerprint = self.identity.fingerprint_bytes
        if fingerprint is None:
            return False
        own = as_tokens(tokens)
        try:
            layouts = self._store.layouts(fingerprint)
        except (IndexFault, ValueError):
            return True  # it cannot be known: rather let go of too much
        return any(forgotten.covers(self._chain(fingerprint, layout, own)) for layout in layouts)

    # Restoring.

    def restore(self, match: Match, into: Into | None = None, deadline: float | None = None) -> SequenceState:
        """The state that a match promises, every byte checked; of fewer tokens when something has gone.

        Args:
            match: from `find` of this namespace.
            into: gives a new buffer for a tensor (name, shape, element type), whose token axis may be longer than
                asked; without it, arrays are private, writable and contiguous. A buffer of a restore that ends
                early, with `timeout` above all, is to be let go of: a read that the disk holds up may still end
                in it.
            deadline: seconds to give up after; 30 by default.

        Raises:
            ValueError: the match is another namespace's, or `into` gave a buffer that does not fit.

        Returns:
            The state; of 0 tokens and without tensors when nothing is left. `reason` says why it is shorter.
        """
        end = time.monotonic() + (RESTORE_DEADLINE_S if deadline is None else deadline)
        state = self._restore(match, into, end)
        self._writer.had(match.plan.path)
        if state.n_tokens:
            self._stats.add("hits")
            self._stats.add("tokens_restored", state.n_tokens)
        elif match.n_tokens:
            self._stats.miss(state.reason)
        return state

    def peek(self, tokens: Iterable[int] | Tokens) -> SequenceState:
        """The state that is stored after all of `tokens`, or of no tokens: counted as neither a hit nor a miss."""
        own = as_tokens(tokens)
        match = self.look(own)
        whole = match.n_tokens == len(own)
        return self._restore(match, None, time.monotonic() + RESTORE_DEADLINE_S) if whole else _nothing(match.reason)

    def refresh(self, tokens: Iterable[int] | Tokens) -> bool:
        """Whether a state is stored after all of `tokens`; if so it counts as used now, but as no hit."""
        own = as_tokens(tokens)
        match = self.look(own)
        if match.n_tokens < len(own):
            return False
        self._writer.note(match.plan.path)
        return True

    def _restore(self, match: Match, into: Into | None, end: float) -> SequenceState:
        fingerprint, layout = self.identity.fingerprint_bytes, match.layout
        if not match.n_tokens or layout is None or fingerprint is None:
            return _nothing(match.reason)
        if match.root != self._chain(fingerprint, layout, match.tokens).root:
            raise ValueError("the match is another namespace's")
        free = free_memory() if into is None else None  # who gives buffers has seen to it
        if free is not None and match.nbytes > free:
            return _nothing(Reason.BUSY)
        reader = RecordReader(self._pool, self._store, fingerprint, end)
        try:
            return self._assemble(match, layout, reader, into)
        finally:
            reader.drop()

    def _assemble(self, match: Match, layout: Layout, reader: RecordReader, into: Into | None) -> SequenceState:
        """Put the state together; when a record fails, plan again without it."""
        found, why = match.plan, Reason.HIT
        for _ in range(_ATTEMPTS):
            try:
                reader.follow([])
                chain = self._chain(reader.fingerprint, layout, match.tokens[: found.n])
                assembly = Assembly(layout, chain, found, into)
                reader.follow(assembly.steps)
                state = assembly.run(reader.read)
                self._stats.add("bytes_read", reader.nbytes)
                self._writer.note(found.path, found.path[-1])
                return replace(state, reason=why)
            except TimeoutError:
                return _nothing(Reason.TIMEOUT)
            except MemoryError:
                return _nothing(Reason.BUSY)
            except (RecordError, OSError) as error:
                why = self._without(reader, error)
            try:
                again = partial(self._plan_again, match, layout, reader)
                found = self._looks.within(again, FIND_DEADLINE_S)
            except (IndexFault, OSError, ValueError):  # a TimeoutError is an OSError
                return _nothing(Reason.UNAVAILABLE)
            if found.n == 0:
                break
        return _nothing(why)

    def _plan_again(self, match: Match, layout: Layout, reader: RecordReader) -> Plan:
        """Without what this restore could not read."""
        with self._store.looking(FIND_DEADLINE_S, dict(reader.unreadable)) as source:
            chain = self._chain(reader.fingerprint, layout, match.tokens[: match.n_tokens])
            return plan(layout, chain, source)

    def _without(self, reader: RecordReader, error: Exception) -> Reason:
        """Plan without the record that failed, in this restore or from now on; the reason."""
        name = reader.last
        if isinstance(error, FileNotFoundError):
            reader.unreadable[name.key] = Reason.EVICTED
            self._writer.settle_bad(name, "missing", missing=True)
            return Reason.EVICTED
        if isinstance(error, DamagedRecord):
            self._store.mark_bad(name, Reason.CORRUPT)
            self._writer.settle_bad(name, str(error), missing=False)
            return Reason.CORRUPT
        if isinstance(error, ForeignRecord):
            self._store.mark_bad(replace(name, key=error.key), Reason.DIVERGED)
            return Reason.DIVERGED
        if isinstance(error, RecordError):
            self._store.mark_bad(name, Reason.UNAVAILABLE)
            return Reason.UNAVAILABLE
        # The disk may be well again at the next look: nothing is remembered, nothing moved.
        reader.unreadable[name.key] = Reason.UNAVAILABLE
        log.warning("%s cannot be read now (%s); it is left alone and computed again", name.file_name, error)
        return Reason.UNAVAILABLE

    # Saving.

    def save(
        self,
        tokens: Iterable[int] | Tokens,
        state: SequenceState,
        boundary: Boundary | str = Boundary.ASSISTANT,
        label: str | None = None,
        *,
        give: bool = False,
    ) -> SaveReport:
        """Keep the state after `tokens`: what is not stored yet is copied and queued; waits for no disk.

        Args:
            tokens: token ids, as many as the state covers.
            state: its arrays are copied; nothing of them is kept.
            boundary: what ends there: `system`, `user`, `assistant` or `prefill`.
            label: a name for the entry.
            give: the caller leaves the arrays alone until `report.done`, and nothing is copied that has the form of
                a record already.

        Raises:
            ValueError: tokens and state do not fit each other, the boundary is not one, or label or meta hold
                what a record cannot.
        """
        own = as_tokens(tokens)
        boundary = Boundary(boundary)
        if len(own) != state.n_tokens:
            raise ValueError(f"{len(own)} tokens for a state of {state.n_tokens}")
        layout = state.layout()
        _check_words(state.meta, label)
        if state.n_tokens == 0 or not state.tensors or state.n_tokens < state.valid_from:
            self._stats.dropped(Dropped.EMPTY)
            return SaveReport(state.n_tokens, reason=Dropped.EMPTY)
        reason = Dropped.IDENTITY_FAILED if self.identity.error else None
        if reason is None and state.n_tokens < self._writer.policy().min_tokens:
            reason = Dropped.TOO_SHORT
        if reason is not None:
            self._stats.dropped(reason)
            return SaveReport(state.n_tokens, reason=reason)
        return self._saver.save(own, state, layout, Ending(boundary, label, given=give))


def _nothing(reason: Reason) -> SequenceState:
    return SequenceState(0, {}, reason=reason)


def _check_words(meta: Mapping[str, Any], label: str | None) -> None:
    """Refuse what a record's header cannot hold.

    Raises:
        ValueError: a label or a value of `meta` that is not plain, or too long.
    """
    for text in (*meta, *meta.values(), label):
        plain = text is None or type(text) in (bool, str)
        if type(text) is int:
            plain = -(2**63) <= text < 2**63
        elif type(text) is float:
            plain = math.isfinite(text)
        if not plain:
            raise ValueError(f"meta holds plain values only (str, int, float, bool, None), not {text!r}")
        if isinstance(text, str) and (len(text) > MAX_TEXT or not _is_unicode(text)):
            raise ValueError(f"label and meta hold text of at most {MAX_TEXT} characters, without lone surrogates")
    if not all(isinstance(name, str) for name in meta):
        raise ValueError("the names in meta are strings")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
