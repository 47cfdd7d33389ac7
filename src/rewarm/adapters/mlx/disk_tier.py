"""One model's share of a prefix cache, in mlx-lm's terms: caches in, caches out, and the reason of a miss.

What `PromptCache` and the server's seam have in common. Everything runs on the calling thread, which
must be the one that generates. Knows nothing of requests and of what the engine keeps in memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from rewarm.adapters.mlx import codec, epoch_probe, self_test
from rewarm.adapters.reports import explain
from rewarm.cache.identity import Identity
from rewarm.cache.namespace import Match
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.state.reason import Boundary, Reason

log = logging.getLogger(__name__)


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

    Raises:
        UnsupportedCache: the model uses a cache class without a codec, or fails the self-test.
    """

    def __init__(self, cache: PrefixCache, identity: Identity, model: nn.Module) -> None:
        self_test.run(model)
        # On this thread, which generates; before it is known whether another version of the engine has stored the same.
        self._space = cache.namespace(cache.adopt_epoch(identity, lambda: epoch_probe.states(model)))
        self._model = model
        self._told: set[str] = set()

    def heed(self) -> None:
        """Hear what was forgotten since: before the engine's memory is asked."""
        self._space.heed()

    def restore(self, tokens: Sequence[int], *, at_most: int, longer_than: int = 0) -> Restored:
        """The longest stored prefix of `tokens`, up to `at_most`, if it is longer than `longer_than`.

        When it is not longer, nothing is read: what the caller has serves, and looking has noted its use.
        """
        start = time.perf_counter()
        match = self._space.find(tokens, at_most=at_most)
        if match.n_tokens <= longer_than:
            return self._miss(match, match.reason, start)
        state = self._space.restore(match)
        if state.n_tokens <= longer_than:
            return self._miss(match, state.reason, start)
        try:
            caches = codec.decode(state, make_prompt_cache(self._model))
        except codec.UnsupportedCache as error:
            self._tell(f"a stored state does not fit the model: {error}")
            return self._miss(match, Reason.UNAVAILABLE, start)
        reason = match.reason if state.n_tokens == match.n_tokens else state.reason
        return Restored(caches, state.n_tokens, reason, explain(reason, match.detail), time.perf_counter() - start)

    def save(self, tokens: Sequence[int], caches: Sequence[Any], boundary: Boundary) -> None:
        """Keep the state of `caches` after `tokens`; a list longer than the caches is cut to them.

        Saves nothing, and says so once, when the caches are of a class without a codec, as they become when
        the engine begins to quantise them.
        """
        try:
            n = codec.n_held(caches, len(tokens))
            state = codec.encode(caches, n)
        except codec.UnsupportedCache as error:
            self._tell(f"not saved: {error}")
            return
        if n:
            self._space.save(tokens[:n], state, boundary=boundary)

    def _miss(self, match: Match, reason: Reason, start: float) -> Restored:
        return Restored(None, 0, reason, explain(reason, match.detail), time.perf_counter() - start)

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("rewarm: %s", what)
