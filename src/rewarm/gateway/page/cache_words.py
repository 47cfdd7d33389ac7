"""The Cache and Settings pages' words: sizes, times, shares, reasons. Knows values and no page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewarm.gateway.page.words import quiet_line
from rewarm.gateway.replies import Reply
from rewarm.state.reason import Reason
from rewarm.store.room import Removal
from rewarm.units import format_bytes, format_seconds

DAY_S = 86_400


def size(nbytes: int) -> str:
    """`nbytes` without a fraction that says nothing: `"64 GiB"`, `"1.5 MiB"`."""
    return format_bytes(nbytes).replace(".0 ", " ")


def ago(at_s: float, now_s: float) -> str:
    """How long ago: `"just now"`, `"5 min ago"`, `"3 h ago"`, `"12 days ago"`."""
    past_s = max(0.0, now_s - at_s)
    if past_s < 60:
        return "just now"
    if past_s < 3600:
        return f"{past_s // 60:.0f} min ago"
    if past_s < 2 * DAY_S:
        return f"{past_s // 3600:.0f} h ago"
    return f"{past_s // DAY_S:.0f} days ago"


def duration(seconds: float) -> str:
    """A long time in its two largest units: `"45 s"`, `"12 min"`, `"3 h 4 min"`, `"2 days 5 h"`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 600:
        return format_seconds(seconds)
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * DAY_S:
        return format_seconds(seconds)
    days, rest = divmod(seconds, DAY_S)
    return f"{days:.0f} days {rest // 3600:.0f} h"


def files(count: int) -> str:
    """`"1 file"`, `"1,204 files"`."""
    return "1 file" if count == 1 else f"{count:,} files"


def removal(found: Removal) -> str:
    """`"3 files, 120 MiB"`."""
    return f"{files(found.n_files)}, {size(found.nbytes)}"


def share(part: float, whole: float) -> float:
    """The part, 0 to 1; 0 of nothing."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def per_cent(part: float) -> str:
    """A share for a person: no 100 % that is not all, no 0 % that is something."""
    if 0 < part < 0.01:
        return "under 1 %"
    if 0.99 < part < 1:
        return "99 %"
    return f"{part:.0%}".replace("%", " %")


def hit_rate(counters: Mapping[str, Any]) -> tuple[str, str]:
    """The hit rate of look-ups on the disk, and what it is of."""
    hits = int(counters.get("hits", 0))
    misses = counters.get("misses") or {}
    n_misses = sum(by for reason, by in misses.items() if reason not in _NO_LOOK_UP)
    n = hits + n_misses
    if not n:
        return "none yet", "nothing was looked up"
    return per_cent(hits / n), f"{hits:,} of {n:,} look-ups"


# A prompt that nothing was to be found for counts neither way.
_NO_LOOK_UP = frozenset({Reason.DISABLED, Reason.TOO_SHORT, Reason.NOT_WORTH_LOADING})


def miss(reply: Reply) -> str:
    """Why nothing was reused for a reply, as a sentence."""
    told = {"reason": reply.reason, "detail": reply.detail, "prompt_tokens": reply.prompt_tokens}
    return quiet_line(told, None)


def tokens(count: int) -> str:
    """`"1 token"`, `"1,204 tokens"`."""
    return "1 token" if count == 1 else f"{count:,} tokens"


def short(count: int) -> str:
    """A count on an axis: `"500"`, `"8k"`, `"1M"`."""
    for factor, unit in ((10**6, "M"), (10**3, "k")):
        if count >= factor:
            return f"{count / factor:g}{unit}"
    return str(count)
