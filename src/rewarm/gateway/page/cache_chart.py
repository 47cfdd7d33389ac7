"""Time to first token against length of the prompt, as an SVG that takes the page's colours. Pure.

Drawn here and not by a charting library: two kinds of dots on two axes need no megabyte of script, follow the theme
by themselves, and can be read by a screen reader.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rewarm.gateway.page.cache_words import short, tokens
from rewarm.gateway.replies import Reply
from rewarm.units import format_seconds

WIDTH, HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 12, 34
_NAMES = {"disk": "restored", "memory": "from memory", "none": "prefilled"}


@dataclass(frozen=True, slots=True)
class _Axis:
    """A logarithmic axis from `low` to `high`, whole decades, over the pixels from `start` to `end`."""

    low: int
    high: int
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value."""
        part = (math.log10(max(value, 10.0**self.low)) - self.low) / (self.high - self.low)
        return self.start + min(1.0, part) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """The decades."""
        return [10.0**power for power in range(self.low, self.high + 1)]


def ttft_chart(replies: Iterable[Reply], n_most: int = 400) -> str:
    """The chart of the latest streamed replies; "" while there is none.

    Args:
        replies: oldest first.
        n_most: dots that are drawn.
    """
    shown = [reply for reply in replies if reply.ttft_s and reply.prompt_tokens][-n_most:]
    if not shown:
        return ""
    across = _axis([reply.prompt_tokens for reply in shown], _LEFT, WIDTH - _RIGHT)
    up = _axis([reply.ttft_s or 0.0 for reply in shown], HEIGHT - _BOTTOM, _TOP)
    # Restored dots lie above the others: they are what one looks for.
    ranked = sorted(shown, key=lambda reply: reply.kind == "disk")
    parts = [*_grid(across, up), *(_dot(reply, across, up) for reply in ranked)]
    told = html.escape(summary(shown))
    return f'<svg class="rc-chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{told}">{"".join(parts)}</svg>'


def summary(replies: Sequence[Reply]) -> str:
    """What the chart shows, in words."""
    counts = {kind: sum(reply.kind == kind for reply in replies) for kind in _NAMES}
    said = ", ".join(f"{n} {_NAMES[kind]}" for kind, n in counts.items() if n)
    return f"Time to first token by length of the prompt: {said}."


def _axis(values: Sequence[float], start: float, end: float) -> _Axis:
    logarithms = [math.log10(max(value, 1e-3)) for value in values]
    low, high = math.floor(min(logarithms)), math.ceil(max(logarithms))
    return _Axis(low, max(high, low + 1), start, end)


def _grid(across: _Axis, up: _Axis) -> list[str]:
    parts = []
    for value in up.ticks:
        y = up.at(value)
        parts.append(f'<line class="rc-grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="rc-tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_seconds(value)}</text>'
        )
    for value in across.ticks:
        x = across.at(value)
        parts.append(f'<line class="rc-grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        anchor = "end" if value == across.ticks[-1] else "middle"
        parts.append(
            f'<text class="rc-tick" x="{x:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="{anchor}">'
            f"{short(round(value))}{' tokens' if value == across.ticks[-1] else ''}</text>"
        )
    return parts


def _dot(reply: Reply, across: _Axis, up: _Axis) -> str:
    x, y = across.at(reply.prompt_tokens), up.at(reply.ttft_s or 0.0)
    words = (
        f"{reply.model}: {tokens(reply.prompt_tokens)}, {reply.cached_tokens:,} reused, "
        f"first token after {format_seconds(reply.ttft_s or 0.0)}"
    )
    place = f'class="rc-dot rc-{reply.kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"'
    return f"<circle {place}><title>{html.escape(words)}</title></circle>"


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1000:g} ms"
