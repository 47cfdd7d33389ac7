"""One model's share of a prefix cache, in mlx-lm's terms: caches in, caches out, and the reason of a miss.

What `PromptCache` and the server's seam have in common. Everything runs on the calling thread, which
must be the one that generates. Knows nothing of requests and of what the engine keeps in memory.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from rewarm.adapters.mlx import ahead, codec, epoch_probe, self_test
from rewarm.adapters.mlx.ahead import Ahead, Waiting
from rewarm.adapters.reports import explain
from rewarm.adapters.worth import ENOUGH_TOKENS, Worth
from rewarm.cache.identity import Identity
from rewarm.cache.namespace import Match, Namespace
from rewarm.cache.policy import Policy
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.state.reason import Boundary, Dropped, Reason
from rewarm.state.sequence import SequenceState

log = logging.getLogger(__name__)

_MOST_TENANTS = 64
"""Whose namespaces are held ready."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What the disk gave for a prompt.

    Attributes:
        caches: one per layer, ready for the rest of the prompt; None at a miss.
        n_tokens: tokens that `caches` hold.
        reason: why it is not more.
        detail: the same as a sentence, or "".
        took_s: seconds spent on finding, reading and converting.
    """

    caches: list[Any] | None
    n_tokens: int
    reason: Reason
    detail: str
    took_s: float


class DiskTier:
    """Finds, restores and saves the caches of one loaded model.

    Args:
        cache: the prefix cache.
        identity: of the model.
        model: makes the empty caches that a restored state is poured into.
        quantised_from: tokens from which on the engine quantises KV; None where it does not.

    Attributes:
        worth: how long prefills and restores have taken.
        waiting: what was read for requests that do not run yet.

    Raises:
        UnsupportedCache: the model uses a cache class without a codec, or fails the self-test.
    """

    def __init__(
        self, cache: PrefixCache, identity: Identity, model: nn.Module, *, quantised_from: int | None = None
    ) -> None:
        self_test.run(model)
        # On this thread, which generates; before it is known whether another version of the engine has stored the same.
        self._identity = cache.adopt_epoch(identity, lambda: epoch_probe.states(model))
        self._cache = cache
        self._spaces: OrderedDict[bytes, Namespace] = OrderedDict()
        self._quantised_from = quantised_from
        self._model = model
        self.worth = Worth()
        self.waiting = Waiting()
        self._told: set[str] = set()

    @property
    def policy(self) -> Policy:
        """The rules in force."""
        return self._cache.policy()

    def heed(self) -> None:
        """Hear what was forgotten since: before the engine's memory is asked."""
        self._space(b"").heed()

    def prefilled(self, n_tokens: int, took_s: float) -> None:
        """Note how long the engine took to evaluate so many prompt tokens."""
        self.worth.prefilled(n_tokens, took_s)
        if n_tokens >= ENOUGH_TOKENS:
            self._cache.note_prefill(self._identity, n_tokens, took_s)

    def prefill_s(self, n_tokens: int) -> float:
        """Seconds that evaluating so many tokens takes; 0 where that has never been measured."""
        if self.worth.prefill_s(1) is None:
            self.worth.begin_with(self._cache.prefill_s(self._identity, 1))
        return self.worth.prefill_s(n_tokens) or 0.0

    def count_saved(self, seconds: float) -> None:
        """Add to the time that restoring has saved."""
        self._cache.count_saved(seconds)

    def restore(
        self, tokens: Sequence[int], *, at_most: int, longer_than: int = 0, tenant: bytes = b"", always: bool = False
    ) -> Restored:
        """The longest stored prefix of `tokens`, up to `at_most`, if it is longer than `longer_than`.

        When it is not longer, nothing is read: what the caller has serves, and looking has noted its use. Nor is
        it when evaluating the difference is quicker, as far as both have been measured, unless `always` or the
        rule `load` says so.
        """
        start = time.perf_counter()
        space = self._space(tenant)
        match = space.find(tokens, at_most=at_most)
        if match.n_tokens <= longer_than or match.layout is None:
            return self._miss(match, match.reason, start)
        always = always or self.policy.load == "always"
        if not (always or self.worth.is_worth(match.n_tokens - longer_than, match.nbytes)):
            return self._miss(match, Reason.NOT_WORTH_LOADING, start)
        buffers = codec.Buffers(match.layout, match.n_tokens)
        state = space.restore(match, into=buffers.into)
        return self._made(match, state, buffers, (longer_than, at_most), start)

    def plan(self, tokens: list[int], *, at_most: int, longer_than: int, tenant: bytes) -> Ahead | None:
        """What is to be read for a prompt on another thread; None where nothing large is worth it."""
        start = time.perf_counter()
        space = self._space(tenant)
        match = space.find(tokens, at_most=at_most)
        if match.layout is None or match.n_tokens <= longer_than or match.nbytes < ahead.LARGE_NBYTES:
            return None
        if self.policy.load != "always" and not self.worth.is_worth(match.n_tokens - longer_than, match.nbytes):
            return None
        buffers = None
        if self.waiting.take(match.nbytes):
            try:
                buffers = codec.Buffers(match.layout, match.n_tokens)
            except BaseException:
                self.waiting.give_back(match.nbytes)
                raise
        deadline_s = ahead.deadline_of(self.prefill_s(match.n_tokens - longer_than))
        made = Ahead(tokens, space, match, buffers, self.waiting, deadline_s)
        made.took_s = time.perf_counter() - start
        return made

    def finish(self, planned: Ahead, *, at_most: int, longer_than: int) -> Restored:
        """The caches of a state that was read ahead; as `restore`."""
        start = time.perf_counter() - planned.took_s
        planned.release()
        match, state, buffers = planned.match, planned.state, planned.buffers
        # The request outlives this: its memory is not to.
        planned.state = planned.buffers = None
        if state is None or buffers is None:
            return self._miss(match, Reason.BUSY, start)
        return self._made(match, state, buffers, (longer_than, at_most), start)

    def _made(
        self, match: Match, state: SequenceState, buffers: codec.Buffers, bounds: tuple[int, int], start: float
    ) -> Restored:
        """The caches of a state that was read, if it is longer than the first bound."""
        longer_than, at_most = bounds
        if state.n_tokens <= longer_than:
            return self._miss(match, state.reason, start)
        try:
            caches = codec.decode(state, make_prompt_cache(self._model), buffers)
        except codec.UnsupportedCache as error:
            self._tell(f"a stored state does not fit the model: {error}")
            return self._miss(match, Reason.UNAVAILABLE, start)
        took_s = time.perf_counter() - start
        self.worth.restored(match.nbytes, took_s)
        # What was asked for has come as far as the index promised: then nothing but the prompt's end is why not more.
        whole = state.n_tokens == match.n_tokens
        reason = match.reason if whole else state.reason
        if whole and state.n_tokens == at_most:
            reason = Reason.HIT
        return Restored(caches, state.n_tokens, reason, explain(reason, match.detail), took_s)

    def save(
        self,
        tokens: Sequence[int],
        caches: Sequence[Any],
        boundary: Boundary,
        *,
        label: str | None = None,
        tenant: bytes = b"",
        on_the_way: bool = False,
    ) -> bool:
        """Keep the state of `caches` after `tokens`; a list longer than the caches is cut to them.

        Saves nothing, and says so once, when the caches are of a class without a codec.

        Args:
            tokens: what the caches hold.
            caches: one per layer.
            boundary: what ends here.
            label: of the entry.
            tenant: whose it is.
            on_the_way: the prompt goes on: of a state that can be cut anywhere, nothing is kept at a user's end then,
                and whole blocks at a chunk's.

        Returns:
            False when the queue could not take all of it, so that it is worth trying again later.
        """
        try:
            n = codec.n_held(caches, len(tokens))
            state = codec.encode(caches, n, quantised_from=self._quantised_from)
            if on_the_way and state.layout().rows_only:
                n_whole = 0 if boundary is Boundary.USER else n - n % self._cache.block_tokens
                if 0 < n_whole < n:
                    state = codec.encode(caches, n_whole, quantised_from=self._quantised_from)
                n = n_whole
        except codec.UnsupportedCache as error:
            self._tell(f"not saved: {error}")
            return True
        if not n:
            return True
        report = self._space(tenant).save(tokens[:n], state, boundary=boundary, label=label)
        return report.reason is not Dropped.QUEUE_FULL

    def _space(self, tenant: bytes) -> Namespace:
        """The model's states that are one tenant's."""
        found = self._spaces.get(tenant)
        if found is None:
            found = self._spaces[tenant] = self._cache.namespace(self._identity, tenant=tenant)
            while len(self._spaces) > _MOST_TENANTS:
                self._spaces.popitem(last=False)
        self._spaces.move_to_end(tenant)
        return found

    def _miss(self, match: Match, reason: Reason, start: float) -> Restored:
        return Restored(None, 0, reason, explain(reason, match.detail), time.perf_counter() - start)

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("rewarm: %s", what)
