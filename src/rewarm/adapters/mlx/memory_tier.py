"""mlx-lm's memory tier, and the disk beneath it.

The memory tier stays mlx-lm's own and answers first; the disk serves when it has more. Everything runs on the
generation thread, but for what says otherwise. Knows nothing of HTTP.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx_lm.server as engine
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from rewarm.adapters.asked import Asked, Mode
from rewarm.adapters.mlx.ahead import Ahead
from rewarm.adapters.mlx.disk_tier import DiskTier
from rewarm.adapters.mlx.provider import Loaded, ModelProvider
from rewarm.adapters.reports import Report
from rewarm.state.reason import Boundary, Reason

log = logging.getLogger(__name__)

_IN_FLIGHT = 64
"""Prompts remembered, to tell a prompt's end from a reply's end."""

_MOST_LATER = 64
"""Saves remembered, to be made when the engine has nothing else to do, or at the end."""

_OFF = (Reason.DISABLED, "This request asks for no cache (X-Rewarm-Cache is off).")
_PAUSED = (Reason.DISABLED, "The cache is paused: nothing is read or written.")


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A request in the engine: its prompt, and what it asks of the cache."""

    tokens: list[int]
    asked: Asked


@dataclass(frozen=True, slots=True)
class _Later:
    """A save to be made from the memory tier: what ends there, for whom, and whether idleness is enough."""

    boundary: Boundary
    asked: Asked
    at_idle: bool


class StoredPromptCache(engine.LRUPromptCache):
    """mlx-lm's memory tier, and the disk beneath it.

    Args:
        max_size: sequences held in memory.
        provider: knows the model in use.

    Attributes:
        keep_rest: tokens that the next fetch must leave to evaluate: 1, or more where penalties look back.
        asked: what the request that is served now asks; of all requests in a batch, mode and tenant are the same.
        is_alone: the engine serves one request, not a batch.
        planned: what was read ahead for the request that is served now, or None.
        live: of a request that is served alone: its tokens, those that were reused, and the caches that it fills.
    """

    def __init__(self, max_size: int, provider: ModelProvider) -> None:
        super().__init__(max_size)
        self.keep_rest = 1
        self.asked = Asked()
        self.is_alone = False
        self.planned: Ahead | None = None
        self.live: tuple[list[int], int, list[Any]] | None = None
        self._provider = provider
        self._prompts: deque[_Prompt] = deque(maxlen=_IN_FLIGHT)
        self._later: OrderedDict[tuple[Any, tuple[int, ...]], _Later] = OrderedDict()
        self._report = Report()
        self._context: Any = None
        self._to_forget = threading.Event()

    # Letting go.

    def forget_soon(self, _: object) -> None:
        """A conversation was forgotten (any thread): hold nothing more, from the generation thread's next look on.

        All of it, not only what was forgotten: the rest comes back from disk when it is asked for.
        """
        self._to_forget.set()

    def let_go(self) -> None:
        """On the generation thread: hold nothing more of what was to be forgotten."""
        if self._to_forget.is_set():
            self._to_forget.clear()
            self._prompts.clear()
            self._later.clear()
            self.trim_to(n_sequences=0)

    # The engine's own face.

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """The longest known prefix's caches and the rest of `tokens`, of at least `keep_rest` tokens."""
        loaded = self._provider.loaded
        if loaded is not None and loaded.tier is not None:
            loaded.tier.heed()
        self.let_go()
        self._prompts.append(_Prompt(tokens[:], self.asked))
        if self.asked.mode is Mode.OFF:
            self._tell(_memory_report(0, len(tokens), *_OFF))
            return None, tokens
        at_most = max(0, len(tokens) - self.keep_rest)
        caches, rest = super().fetch_nearest_cache(self._key(model), tokens)
        n_memory = len(tokens) - len(rest)
        if caches is None or n_memory > at_most:
            caches, n_memory = _shortened(caches, n_memory, at_most)
        try:
            caches, report = self._fetch_from_disk(model, tokens, caches, n_memory, at_most)
        except Exception:
            # The last line of defence: whatever goes wrong in the cache, the request is served without it.
            log.exception("rewarm: fetching failed; the request is served without the disk")
            report = _memory_report(n_memory, len(tokens), Reason.UNAVAILABLE, "The disk cache failed; see the log.")
        self._tell(report)
        if self.is_alone:
            # The engine would make them itself, and nobody would know them.
            caches = make_prompt_cache(self._provider.model) if caches is None else caches
            self.live = (tokens, report.cached_tokens, caches)
        return caches, tokens[report.cached_tokens :]

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Keep a state in memory; at the ends that count on disk too, now or when it is time for it."""
        self.live = None
        prompt, boundary = self._boundary(tokens, cache_type)
        asked = prompt.asked if prompt is not None else replace(self.asked, label=None)
        if asked.mode is not Mode.ON:
            return
        super().insert_cache(self._key(model), tokens, prompt_cache, cache_type=cache_type)
        loaded = self._provider.loaded
        if loaded is None or loaded.tier is None or loaded.key != model or _has_images(tokens):
            return
        policy = loaded.tier.policy
        if policy.paused:
            return
        if policy.save_at != "turn":
            self._save_later(model, tokens, _Later(boundary, asked, at_idle=policy.save_at == "idle"))
        elif not self._save(loaded.tier, tokens, prompt_cache, boundary, asked):
            self._save_later(model, tokens, _Later(boundary, asked, at_idle=True))

    def plan(self, tokens: list[int], asked: Asked) -> Ahead | None:
        """What is to be read for a prompt before it is queued; None where the engine's memory or a moment will do."""
        loaded = self._provider.loaded
        if asked.mode is Mode.OFF or loaded is None or loaded.tier is None or self._to_forget.is_set():
            return None
        if _why_no_disk(loaded, loaded.key, tokens) is not None or len(tokens) <= self.keep_rest:
            return None
        n_memory = self._n_in_memory(self._key(loaded.key, asked), tokens)
        at_most = len(tokens) - self.keep_rest
        return loaded.tier.plan(tokens, at_most=at_most, longer_than=n_memory, tenant=asked.tenant)

    def _n_in_memory(self, key: Any, tokens: list[int]) -> int:
        """Tokens that the memory tier would serve."""
        found = self._trie.search(key, tokens)
        if found.exact is not None:
            return len(tokens)
        n_short = len(found.shorter) if found.shorter is not None else 0
        if found.longer is None or found.common_prefix <= n_short:
            return n_short
        longer = self._trie.get(found.model, found.longer).prompt_cache
        return min(len(tokens) - 1, found.common_prefix) if can_trim_prompt_cache(longer) else n_short

    # Chunks of long prompts.

    def evaluated(self, n_done: int, n_all: int) -> None:
        """So many tokens of the rest of a prompt have been evaluated, of a request that is served alone."""
        if self.live is not None and n_done < n_all:
            tokens, n_reused, caches = self.live
            self.keep_chunk(tokens[: n_reused + n_done], caches)

    def keep_chunk(self, tokens: list[int], caches: list[Any]) -> None:
        """Keep what has been evaluated of a prompt so far, on disk only: whoever cancels loses one chunk at most."""
        loaded = self._provider.loaded
        if self.asked.mode is not Mode.ON or loaded is None or loaded.tier is None or _has_images(tokens):
            return
        policy = loaded.tier.policy
        if policy.paused or policy.save_at != "turn":
            return
        prompt = next((p for p in self._ours() if p.tokens[: len(tokens)] == tokens), None)
        self._save(loaded.tier, tokens, caches, Boundary.PREFILL, prompt.asked if prompt else self.asked)

    # Saving later.

    def save_what_waits(self, *, at_end: bool = False) -> None:
        """Make saves that were put off, the oldest first, from what the memory tier still holds.

        Args:
            at_end: also those that are for the engine's end.
        """
        loaded = self._provider.loaded
        if loaded is None or loaded.tier is None:
            return
        for name, later in list(self._later.items()):
            if not (later.at_idle or at_end):
                continue
            key, tokens = name
            found = self._trie.search(key, list(tokens))
            if found.exact is None:
                del self._later[name]  # a longer state has taken its place, with a save of its own, or it was let go
                continue
            entry = self._trie.get(key, list(tokens))
            if not self._save(loaded.tier, list(tokens), entry.prompt_cache, later.boundary, later.asked):
                return
            del self._later[name]

    @property
    def n_waiting(self) -> int:
        """Saves that were put off."""
        return len(self._later)

    def _save_later(self, model: Any, tokens: list[int], later: _Later) -> None:
        self._later[self._key(model, later.asked), tuple(tokens)] = later
        while len(self._later) > _MOST_LATER:
            self._later.popitem(last=False)

    def _save(self, tier: DiskTier, tokens: list[int], caches: Sequence[Any], boundary: Boundary, asked: Asked) -> bool:
        """Hand a state to the disk; false when it is to be tried again later."""
        try:
            on_the_way = boundary in (Boundary.USER, Boundary.PREFILL)
            return tier.save(tokens, caches, boundary, label=asked.label, tenant=asked.tenant, on_the_way=on_the_way)
        except Exception:
            # As above: a reply that was given is not taken back because it could not be kept.
            log.exception("rewarm: saving failed; this reply is not kept on disk")
            return True

    # Telling.

    def begin(self, context: Any) -> None:
        """Attach the report of this request to `context`: the last fetch's, or the next one's to come."""
        context.rewarm = self._report
        self._context = context

    def expect_fetch(self) -> None:
        """The engine will make its context before it fetches: forget the last report."""
        self._report = Report()

    def prefilled(self, n_tokens: int, took_s: float) -> None:
        """Note how long the engine took to evaluate so many prompt tokens."""
        loaded = self._provider.loaded
        if loaded is not None and loaded.tier is not None:
            loaded.tier.prefilled(n_tokens, took_s)

    def _tell(self, report: Report) -> None:
        loaded = self._provider.loaded
        if loaded is not None and loaded.tier is not None and report.cached_tokens:
            prefill_s = loaded.tier.prefill_s(report.cached_tokens)
            report = replace(report, saved_s=round(max(0.0, prefill_s - report.restore_s), 6))
            if report.disk_tokens:
                loaded.tier.count_saved(report.saved_s)
        self._report = report
        if self._context is not None and self._context.prompt_cache_count < 0:
            self._context.rewarm = report
        self._context = None

    def _fetch_from_disk(
        self, model: Any, tokens: list[int], caches: list[Any] | None, n_memory: int, at_most: int
    ) -> tuple[list[Any] | None, Report]:
        loaded = self._provider.loaded
        why = _why_no_disk(loaded, model, tokens)
        if loaded is None or loaded.tier is None or why is not None:
            return caches, _memory_report(n_memory, len(tokens), *(why or (Reason.UNAVAILABLE, "")))
        if at_most == 0:
            return None, _memory_report(0, len(tokens), Reason.TOO_SHORT, "All of this prompt must be evaluated.")
        planned, self.planned = self.planned, None
        if planned is not None and planned.tokens == tokens and planned.waiting is loaded.tier.waiting:
            found = loaded.tier.finish(planned, at_most=at_most, longer_than=n_memory)
        else:
            found = loaded.tier.restore(tokens, at_most=at_most, longer_than=n_memory, tenant=self.asked.tenant)
        if found.caches is None:
            reason, detail = (Reason.HIT, "") if n_memory == at_most else (found.reason, found.detail)
            return caches, _memory_report(n_memory, len(tokens), reason, detail, found.took_s)
        n = found.n_tokens
        return found.caches, Report(n, n, 0, len(tokens), found.reason.value, found.detail, found.took_s)

    def _ours(self) -> list[_Prompt]:
        """The prompts of those served now. Others' may have been left behind by requests that were cancelled."""
        return [p for p in self._prompts if (p.asked.mode, p.asked.tenant) == (self.asked.mode, self.asked.tenant)]

    def _boundary(self, tokens: list[int], cache_type: str) -> tuple[_Prompt | None, Boundary]:
        """Whose state this is, and what ends here for the disk."""
        n = len(tokens)
        prompts = self._ours()
        inside = next((p for p in prompts if len(p.tokens) > n and p.tokens[:n] == tokens), None)
        if cache_type == "system":
            return inside, Boundary.SYSTEM
        if inside is not None:
            return inside, Boundary.USER
        answered = next((p for p in prompts if tokens[: len(p.tokens)] == p.tokens), None)
        if answered is not None:
            self._prompts.remove(answered)
        return answered, Boundary.ASSISTANT

    def _key(self, model: Any, asked: Asked | None = None) -> Any:
        loaded = self._provider.loaded
        tenant = (asked or self.asked).tenant
        return (model, loaded.stamp, tenant) if loaded is not None and loaded.key == model else (model, tenant)


def _why_no_disk(loaded: Loaded | None, model: Any, tokens: Sequence[int]) -> tuple[Reason, str] | None:
    """Why the disk has no part in a request, or None."""
    if loaded is None or loaded.tier is None or loaded.key != model:
        return loaded.why_not if loaded is not None else (Reason.UNAVAILABLE, "")
    if loaded.tier.policy.paused:
        return _PAUSED
    if _has_images(tokens):
        return (Reason.DISABLED, "Requests with images are served without the disk cache.")
    return None


def _shortened(caches: list[Any] | None, n: int, at_most: int) -> tuple[list[Any] | None, int]:
    """`caches` of `n` tokens, cut to `at_most`; none where nothing is left or they cannot be cut."""
    if caches is None or at_most == 0 or not can_trim_prompt_cache(caches):
        return None, 0
    trim_prompt_cache(caches, n - at_most)
    return caches, at_most


def _memory_report(n: int, n_prompt: int, reason: Reason, detail: str, took_s: float = 0.0) -> Report:
    return Report(n, 0, n, n_prompt, reason.value, detail, took_s)


def _has_images(tokens: Sequence[int]) -> bool:
    """mlx-lm puts negative numbers made from an image's content in the place of its tokens."""
    return any(token < 0 for token in tokens)
