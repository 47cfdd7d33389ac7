"""What the cache did for the latest replies: kept in memory, for the page and the API. Holds no text and no tokens."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rewarm.state.reason import Reason

KEPT = 2000
"""Replies that are remembered."""

BYPASSED = frozenset({Reason.DISABLED, Reason.TOO_SHORT, Reason.NOT_WORTH_LOADING})
"""Reasons by which the disk was not meant to serve: such a reply is neither a hit nor a miss."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply, as the worker's object `rewarm` and the gateway's clock tell it.

    Attributes:
        at_s: seconds since 1970 when it was noted.
        model: by its name on the API.
        prompt_tokens: all of the prompt.
        disk_tokens: those restored from disk.
        memory_tokens: those that the engine still held.
        reason: why not more; a `Reason`'s value.
        detail: the same as a sentence, or "".
        restore_s: seconds spent on finding and restoring.
        saved_s: seconds of prefill saved, estimated; 0 where unknown.
        ttft_s: seconds to the first token; None of a reply that was not streamed.
    """

    at_s: float
    model: str
    prompt_tokens: int = 0
    disk_tokens: int = 0
    memory_tokens: int = 0
    reason: str = Reason.NOTHING_STORED.value
    detail: str = ""
    restore_s: float = 0.0
    saved_s: float = 0.0
    ttft_s: float | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not evaluated."""
        return self.disk_tokens + self.memory_tokens

    @property
    def kind(self) -> str:
        """`disk`: something was restored; `memory`: only the engine's memory served; `none`: prefilled."""
        if self.disk_tokens:
            return "disk"
        return "memory" if self.memory_tokens else "none"

    @property
    def is_miss(self) -> bool:
        """Whether it was to be served from what is kept, and nothing of it was."""
        return not self.cached_tokens and self.reason not in BYPASSED


@dataclass(frozen=True, slots=True)
class Summary:
    """What the remembered replies come to.

    Attributes:
        n_replies: all of them.
        n_misses: those of which nothing was reused though it might have been.
        n_bypassed: those that the cache was not meant to serve.
        prompt_tokens, disk_tokens, memory_tokens: sums.
        saved_s: seconds of prefill saved, estimated.
        ttft_restored_s, ttft_prefilled_s: medians over streamed replies; None where there is none.
    """

    n_replies: int
    n_misses: int
    n_bypassed: int
    prompt_tokens: int
    disk_tokens: int
    memory_tokens: int
    saved_s: float
    ttft_restored_s: float | None
    ttft_prefilled_s: float | None


class Replies:
    """The latest replies; safe to use from several threads.

    Args:
        on_saved: told the seconds that each reply saved, if any.
        now: seconds since 1970.
    """

    def __init__(self, on_saved: Callable[[float], None] | None = None, now: Callable[[], float] = time.time) -> None:
        self._kept: deque[Reply] = deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._on_saved = on_saved
        self._now = now
        self.n_ever = 0

    def note(self, model: str, report: Mapping[str, Any], ttft_s: float | None) -> None:
        """A reply has ended.

        Args:
            model: by its name on the API.
            report: the worker's object `rewarm`; what it lacks, or what is no number, counts as 0.
            ttft_s: seconds to the first token, of a stream.
        """
        reply = Reply(
            at_s=self._now(),
            model=model,
            prompt_tokens=int(_number(report, "prompt_tokens")),
            disk_tokens=int(_number(report, "disk_tokens")),
            memory_tokens=int(_number(report, "memory_tokens")),
            reason=str(report.get("reason") or ""),
            detail=str(report.get("detail") or "")[:500],
            restore_s=_number(report, "restore_s"),
            saved_s=_number(report, "saved_s"),
            ttft_s=ttft_s,
        )
        with self._lock:
            self._kept.append(reply)
            self.n_ever += 1
        if self._on_saved is not None and reply.saved_s > 0:
            self._on_saved(reply.saved_s)

    def latest(self) -> list[Reply]:
        """All that are remembered, oldest first."""
        with self._lock:
            return list(self._kept)

    def misses(self, n: int) -> list[Reply]:
        """The last `n` misses, latest first."""
        return [reply for reply in reversed(self.latest()) if reply.is_miss][:n]

    def summary(self) -> Summary:
        """What the remembered replies come to."""
        kept = self.latest()
        return Summary(
            n_replies=len(kept),
            n_misses=sum(reply.is_miss for reply in kept),
            n_bypassed=sum(not reply.cached_tokens and not reply.is_miss for reply in kept),
            prompt_tokens=sum(reply.prompt_tokens for reply in kept),
            disk_tokens=sum(reply.disk_tokens for reply in kept),
            memory_tokens=sum(reply.memory_tokens for reply in kept),
            saved_s=sum(reply.saved_s for reply in kept),
            ttft_restored_s=_median(reply.ttft_s for reply in kept if reply.kind == "disk"),
            ttft_prefilled_s=_median(reply.ttft_s for reply in kept if reply.kind == "none"),
        )


def _number(report: Mapping[str, Any], name: str) -> float:
    value = report.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**53
    return float(value) if is_number and value is not None else 0.0


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
