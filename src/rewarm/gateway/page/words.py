"""The page's words for what the cache did, what a model does, and what went wrong. Knows no page."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rewarm.gateway.page.engine import ModelView, State
from rewarm.state.reason import Reason
from rewarm.units import format_seconds

_MISSES = {
    Reason.HIT: "Nothing was reused for this prompt",
    Reason.DIVERGED: "Nothing stored begins like this prompt",
    Reason.NOTHING_STORED: "Nothing stored for this prompt yet",
    Reason.NO_RESTORE_POINT: "Something is stored, but nothing that this prompt can go on from",
    Reason.EVICTED: "What was stored was evicted to make room",
    Reason.CORRUPT: "A stored file was damaged; it was set aside, and the prompt was read anew",
    Reason.IDENTITY_CHANGED: "The model is not the one that the stored state was made with",
    Reason.IDENTITY_PENDING: "The model's files are still being checked",
    Reason.UNAVAILABLE: "The cache cannot be used at the moment",
    Reason.TIMEOUT: "The disk took too long",
    Reason.DISABLED: "The cache is off",
    Reason.TOO_SHORT: "The prompt is too short to be worth storing",
    Reason.NOT_WORTH_LOADING: "Reading the prompt is quicker than loading what is stored",
    Reason.BUSY: "Not enough memory was free to restore",
}
# After a part was reused: why no more. Others go without saying: the rest of the prompt is new.
_THEN = {
    Reason.DIVERGED: "the rest differs from what is stored",
    Reason.NO_RESTORE_POINT: "the rest has no restore point",
    Reason.EVICTED: "the rest was evicted to make room",
    Reason.CORRUPT: "the rest was damaged and set aside",
    Reason.TIMEOUT: "the disk took too long for the rest",
    Reason.BUSY: "not enough memory was free for the rest",
    Reason.UNAVAILABLE: "the cache cannot be used for the rest",
}
_TELLING = {Reason.DIVERGED, Reason.NO_RESTORE_POINT, Reason.IDENTITY_CHANGED, Reason.UNAVAILABLE}
_DETAIL_CHARS = 110
_TOLD_S = 0.05
# Two prompts share a few tokens of the chat template at least: to a person that is a miss.
_FEW = 0.05
_STATES = {
    State.STOPPED: ("Not loaded", "idle"),
    State.LOADING: ("Loading", "busy"),
    State.READY: ("Ready", "ready"),
    State.STOPPING: ("Stopping", "busy"),
    State.FAILED: ("Failed", "failed"),
}


def quiet_line(report: Mapping[str, Any] | None, ttft_s: float | None) -> str:
    """One line on a reply: what was reused of the prompt, or why nothing was, and the time to first token.

    Args:
        report: the object `rewarm` beside a reply's `usage`; None when the engine sent none.
        ttft_s: seconds from the request to the first token; None when none came.
    """
    parts = _reused(report) if report else []
    saved_s = report.get("saved_s") if report else None
    if isinstance(saved_s, int | float) and saved_s >= _TOLD_S:
        parts.append(f"about {format_seconds(saved_s)} saved")
    if ttft_s is not None:
        parts.append(f"first token after {format_seconds(ttft_s)}")
    line = " · ".join(parts)
    return line[:1].upper() + line[1:]


def share(report: Mapping[str, Any]) -> float:
    """The part of the prompt that was not computed, 0 to 1."""
    n_cached, n_prompt = int(report.get("cached_tokens") or 0), int(report.get("prompt_tokens") or 0)
    return min(1.0, max(0.0, n_cached / n_prompt)) if n_prompt else 0.0


def progress(n_done: int, n_tokens: int, left_s: float | None = None) -> str:
    """How far the prompt has been read, and how long the rest will take where that is known."""
    left = f" · about {round_seconds(left_s)} left" if left_s is not None else ""
    return f"Reading the prompt: {n_done:,} of {_tokens(n_tokens)}{left}"


def day_of(at_s: float, now_s: float) -> str:
    """Which part of the list a conversation of the time `at_s` stands in; both in seconds since the epoch."""
    try:
        then, today = (datetime.fromtimestamp(each).astimezone().date() for each in (at_s, now_s))
    except (OSError, OverflowError, ValueError):
        return "Older"
    n_days = (today - then).days
    if n_days <= 0:
        return "Today"
    if n_days == 1:
        return "Yesterday"
    return "Last 7 days" if n_days <= 7 else "Last 30 days" if n_days <= 30 else "Older"


def round_seconds(seconds: float) -> str:
    """A time that is estimated, in whole seconds or minutes."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min"


def _reused(report: Mapping[str, Any]) -> list[str]:
    n_cached, n_disk, n_memory, n_prompt = (
        int(report.get(name) or 0) for name in ("cached_tokens", "disk_tokens", "memory_tokens", "prompt_tokens")
    )
    reason, detail = _reason(report.get("reason")), str(report.get("detail") or "").strip()
    if n_cached <= 0:
        return [_miss(reason, detail)]
    if reason is Reason.DIVERGED and n_cached < n_prompt * _FEW:
        return [f"Differs from what is stored from token {n_cached:,} on"]
    of_prompt = f"of {_tokens(n_prompt)}"
    if n_disk and n_memory:
        line = f"Reused {n_cached:,} {of_prompt}: {n_disk:,} from disk, {n_memory:,} still in memory"
    elif n_disk:
        line = f"Restored {n_disk:,} {of_prompt} from disk"
    else:
        line = f"{n_cached:,} {of_prompt} still in memory"
    then = _THEN.get(reason) if reason else None
    return [line, then] if then else [line]


def _miss(reason: Reason | None, detail: str) -> str:
    if reason is Reason.DIVERGED and "token 0 " in detail:
        return _MISSES[reason]
    if detail and (reason is None or reason in _TELLING):
        return detail.rstrip(".") if len(detail) <= _DETAIL_CHARS else detail[: _DETAIL_CHARS - 1].rstrip() + "…"
    return _MISSES[reason or Reason.NOTHING_STORED]


def _reason(value: object) -> Reason | None:
    try:
        return Reason(str(value))
    except ValueError:
        return None


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count:,} tokens"


def model_state(view: ModelView | None) -> tuple[str, str]:
    """A model's state in a word or two, and its tone: `idle`, `busy`, `ready` or `failed`."""
    if view is None:
        return "No model", "failed"
    if view.state is State.PREPARING:
        return f"Preparing the model{_part(view)}", "busy"
    return _STATES[view.state]


def starting(view: ModelView | None) -> str:
    """What is being done until the model can answer."""
    if view is not None and view.state is State.PREPARING:
        return f"{(view.message or 'preparing the model').capitalize()}{_part(view)}"
    return "Loading the model"


def _part(view: ModelView) -> str:
    return f" · {view.progress:.0%}" if view.progress is not None else ""
