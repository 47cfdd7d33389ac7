"""One request on its way through the engine: what it may use and leave behind, and what became of it.

Values and their arithmetic; asks no server and no store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rewarm.adapters.asked import Asked
from rewarm.adapters.llama.prompts import Prompt
from rewarm.adapters.llama.slots import Slot
from rewarm.adapters.reports import Report
from rewarm.state.reason import Reason

_ENOUGH_TOKENS = 16


def _no_stall() -> float:
    return 0.0


@dataclass(slots=True, eq=False)
class Turn:
    """One request on its way through the engine.

    Attributes:
        prompt: of the request.
        asked: what it may do with the cache.
        slot: held for it; None where the server chooses.
        n_disk: tokens that were restored for it.
        n_memory: tokens that the slot held before.
        n_ours: tokens that were evaluated for it by a request of our own: not reused.
        reason: why not more.
        detail: the same as a sentence.
        restore_s: seconds spent on finding and restoring.
        token_s: seconds that the prefill of one token takes, as measured before; 0 where it is not known.
        keeps: whether what it leaves may be saved.
        from_scratch: whether the server must reuse nothing of the slot.
        stalled: tells for how many seconds saves of other slots have made the server stand still meanwhile.
        sent: whether the engine has been asked.
        status: of the engine's answer; 0 before there is one.
        timings: the engine's own, from the end of the reply.
        truncated: whether the reply ran out of context.
        progress: prompt tokens that were evaluated or reused so far, and all, as a build reports it.
    """

    prompt: Prompt
    asked: Asked = field(default_factory=Asked)
    slot: Slot | None = None
    n_disk: int = 0
    n_memory: int = 0
    n_ours: int = 0
    reason: Reason = Reason.NOTHING_STORED
    detail: str = ""
    restore_s: float = 0.0
    token_s: float = 0.0
    keeps: bool = True
    from_scratch: bool = False
    stalled: Callable[[], float] = _no_stall
    sent: bool = False
    status: int = 0
    timings: Mapping[str, Any] = field(default_factory=dict)
    truncated: bool = False
    progress: tuple[int, int] = (0, 0)

    @property
    def n_cached(self) -> int:
        """Prompt tokens that were truly reused, by the engine's own count."""
        return max(0, int(self.timings.get("cache_n", 0)) - self.n_ours)

    def report(self) -> Report:
        """What the cache did, by the engine's own count of what it reused."""
        found = int(self.timings.get("cache_n", 0))
        n_prompt = found + int(self.timings.get("prompt_n", 0)) or len(self.prompt.tokens)
        cached = self.n_cached
        n_disk = min(cached, self.n_disk)
        reason, detail = self.reason, self.detail
        if self.n_disk and cached < self.n_disk:
            reason, detail = Reason.UNAVAILABLE, "The server did not use the state that was restored."
        elif found + _ENOUGH_TOKENS <= self.n_memory:
            reason, detail = Reason.UNAVAILABLE, "The server did not use what its slot held."
        elif cached and found >= n_prompt - 1:
            reason, detail = Reason.HIT, ""
        return Report(cached, n_disk, cached - n_disk, n_prompt, reason.value, detail, round(self.restore_s, 6))

    def saved_s(self) -> float:
        """Seconds of prefill that reuse has saved, less what it took; 0 while prefill has not been measured."""
        token_s, evaluated = self.token_s, int(self.timings.get("prompt_n", 0))
        if not token_s and evaluated >= _ENOUGH_TOKENS:
            token_s = float(self.timings.get("prompt_ms", 0.0)) / 1000 / evaluated
        return max(0.0, self.n_cached * token_s - self.restore_s)

    def told(self) -> dict[str, Any]:
        """The object `rewarm` of the reply."""
        more = {"saved_s": round(self.saved_s(), 6), "stall_s": round(self.stalled(), 6)}
        return {**self.report().as_dict(), **more}
