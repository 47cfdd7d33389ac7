"""The Cache page: how full it is, what it saved, what is kept, who shares what, and why something was not found.

Reads through `CacheAdmin`, on a thread, every two seconds; sends to the browser only what changed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

from rewarm.gateway.branches import draw
from rewarm.gateway.cache_admin import CacheAdmin
from rewarm.gateway.disk_cache import ModelUse
from rewarm.gateway.entry_list import Row
from rewarm.gateway.page import cache_picture
from rewarm.gateway.page import cache_words as words
from rewarm.gateway.page.cache_chart import ttft_chart
from rewarm.gateway.page.cache_parts import error_words, meter, set_class, set_part, set_text
from rewarm.gateway.page.cache_table import EntryTable
from rewarm.gateway.page.frame import sheet
from rewarm.gateway.page.parts import element, text
from rewarm.gateway.problems import Problem
from rewarm.gateway.replies import Reply, Summary
from rewarm.units import format_seconds

REFRESH_S = 2.0
N_MISSES = 8


@dataclass(slots=True)
class _Seen:
    """What the page shows, read at one moment."""

    report: dict[str, Any]
    summary: Summary
    replies: list[Reply]
    misses: list[Reply]
    models: list[ModelUse] = field(default_factory=list)
    picture: str = ""
    n_left_out: int = 0
    n_alone: int = 0
    is_paused: bool = False
    budget: int | None = None


def cache_page(admin: CacheAdmin) -> None:
    """Fill the content area of a page, and keep it true from now on."""
    CachePage(admin).build()


class CachePage:
    """The elements of one page."""

    def __init__(self, admin: CacheAdmin) -> None:
        self._admin = admin
        self._n_noted = -1
        self._drawn = ""
        self._drawn_rows: list[Row] | None = None
        self._not_drawn = [0, 0]

    def build(self) -> None:
        """Draw the page."""
        with sheet("Cache", "What is kept on this disk, what it saves, and why something was not found."):
            self._notice = text("", "rw-notice rw-warning rw-hidden", tag="div")
            self._notice.props["role"] = "status"
            with element("section", "rw-tiles rc-tiles", aria_label="At a glance"):
                self._space = _Tile("Space used", has_meter=True)
                self._files = _Tile("Files", has_meter=True)
                self._rate = _Tile("Hit rate")
                self._saved = _Tile("Time saved")
                self._written = _Tile("Written today")
            with element("div", "rc-halves"):
                self._build_chart()
                self._build_models()
            self._table = EntryTable(self._admin)
            self._build_picture()
            self._build_misses()
            with element("p", "rc-place"):
                text("Kept in ")
                self._place = text("", "rw-mono")
                text(" · ")
                with element("a", href="/settings"):
                    text("Change")
        ui.timer(REFRESH_S, self._refresh)

    def _build_chart(self) -> None:
        with element("section", "rw-card", aria_label="Time to first token"):
            text("Time to first token", tag="h2")
            self._medians = element("div", "rc-legend")
            with self._medians:
                self._restored = _Key("rc-disk", "Restored")
                self._prefilled = _Key("rc-none", "Prefilled")
                self._memory = _Key("rc-memory", "From memory")
            self._chart = ui.html("", sanitize=False).classes("rc-chart-place")
            self._no_chart = text(
                "Each streamed reply becomes a dot here: how long its prompt was, and how long you waited.",
                "rc-empty",
                tag="p",
            )

    def _build_models(self) -> None:
        with element("section", "rw-card", aria_label="Use per model"):
            text("By model", tag="h2")
            self._models = element("ul", "rc-models")
            self._shown_models: list[ModelUse] | None = None

    def _build_picture(self) -> None:
        with element("section", "rw-card", aria_label="Shared prefixes"):
            text("Shared prefixes", tag="h2")
            self._picture_words = text("", "rw-hint-text", tag="p")
            self._picture = ui.html("", sanitize=False)
            self._shown_picture = ""

    def _build_misses(self) -> None:
        with element("section", "rw-card", aria_label="Latest misses"):
            text("Latest misses", tag="h2")
            self._no_misses = text("", "rc-empty", tag="p")
            self._misses = element("ul", "rc-misses")
            self._shown_misses: list[tuple[str, ...]] = []

    # Keeping it true.

    async def _refresh(self) -> None:
        seen = await asyncio.to_thread(self._look)
        self._show(seen)
        await self._table.refresh()

    def _look(self) -> _Seen:
        """Read what is to be shown. On a thread."""
        disk = self._admin.disk_cache
        seen = _Seen(disk.report(), disk.replies.summary(), disk.replies.latest(), disk.replies.misses(N_MISSES))
        try:
            seen.models = disk.models()
            _, policy = disk.rules()
            seen.is_paused, seen.budget = policy.paused, policy.write_bytes_per_day
            rows = self._admin.entries.rows()
            if rows is not self._drawn_rows:
                pictures, *self._not_drawn = draw(rows)
                self._drawn, self._drawn_rows = cache_picture.draw(pictures), rows
            seen.picture, (seen.n_left_out, seen.n_alone) = self._drawn, self._not_drawn
        except Problem as problem:
            seen.report = {**seen.report, "usable": False, "problem": problem.message}
        except Exception as error:  # noqa: BLE001 - told on the page, whatever it is
            seen.report = {**seen.report, "usable": False, "problem": error_words(error)}
        return seen

    def _show(self, seen: _Seen) -> None:
        report, counters = seen.report, seen.report["counters"]
        set_text(self._place, report["folder"])
        notice = _notice(seen)
        set_text(self._notice, notice)
        set_class(self._notice, "rw-hidden", is_on=not notice)
        self._show_tiles(report["limits"], counters, seen)
        self._show_chart(seen)
        self._show_models(seen.models, int(counters.get("bytes_used", 0)))
        if seen.picture != self._shown_picture:
            self._shown_picture = seen.picture
            self._picture.set_content(seen.picture)
        set_text(self._picture_words, _picture_words(seen))
        self._show_misses(seen)

    def _show_tiles(self, limits: dict[str, Any], counters: dict[str, Any], seen: _Seen) -> None:
        used, max_bytes = int(counters.get("bytes_used", 0)), int(limits.get("max_bytes") or 0)
        self._space.show(words.size(used), f"of {words.size(max_bytes)}", words.share(used, max_bytes))
        n_files, max_files = int(counters.get("files_used", 0)), int(limits.get("max_files") or 0)
        self._files.show(f"{n_files:,}", f"of {max_files:,}", words.share(n_files, max_files))
        self._rate.show(*words.hit_rate(counters))
        saved_s = int(counters.get("saved_ms", 0)) / 1000
        n_restored = int(counters.get("tokens_restored", 0))
        self._saved.show(words.duration(saved_s), f"{words.tokens(n_restored)} restored")
        today, ever = int(counters.get("bytes_written_today", 0)), int(counters.get("bytes_written", 0))
        budget = f"of {words.size(seen.budget)} a day; " if seen.budget is not None else ""
        self._written.show(words.size(today), f"{budget}{words.size(ever)} ever")

    def _show_chart(self, seen: _Seen) -> None:
        n_noted = self._admin.disk_cache.replies.n_ever
        if n_noted == self._n_noted:
            return
        self._n_noted = n_noted
        drawn = ttft_chart(seen.replies)
        self._chart.set_content(drawn)
        set_class(self._no_chart, "rw-hidden", is_on=bool(drawn))
        set_class(self._medians, "rw-hidden", is_on=not drawn)
        for key, kind, median in (
            (self._restored, "disk", seen.summary.ttft_restored_s),
            (self._prefilled, "none", seen.summary.ttft_prefilled_s),
            (self._memory, "memory", None),
        ):
            key.show(sum(reply.kind == kind and reply.ttft_s is not None for reply in seen.replies), median)

    def _show_models(self, models: list[ModelUse], used: int) -> None:
        if models == self._shown_models:
            return
        self._shown_models = models
        self._models.clear()
        with self._models:
            for use in models:
                with element("li", "rc-model"):
                    with element("div", "rc-model-line"):
                        text(use.name, "rc-name")
                        text(f"{words.size(use.nbytes)} · {words.files(use.n_files)}", "rc-model-size")
                    _, part = meter()
                    set_part(part, words.share(use.nbytes, used))
            if not models:
                text("Nothing is kept yet.", "rc-empty", tag="li")

    def _show_misses(self, seen: _Seen) -> None:
        now_s = time.time()
        wanted = [
            (words.miss(miss), miss.model, words.tokens(miss.prompt_tokens), words.ago(miss.at_s, now_s))
            for miss in seen.misses
        ]
        n = seen.summary.n_replies
        none = "No reply so far." if not n else f"None: something was reused for each of the last {n:,} replies."
        set_text(self._no_misses, none if n != seen.summary.n_bypassed or not n else "None: the cache was not asked.")
        set_class(self._no_misses, "rw-hidden", is_on=bool(wanted))
        if wanted == self._shown_misses:
            return
        self._shown_misses = list(wanted)
        self._misses.clear()
        with self._misses:
            for why, model, n_tokens, when in wanted:
                with element("li", "rc-miss"):
                    text(why, "rc-why", tag="div")
                    text(f"{model} · {n_tokens} · {when}", "rc-under", tag="div")


class _Tile:
    """A number, what it is, and what it is of."""

    def __init__(self, label: str, *, has_meter: bool = False) -> None:
        self._part: Element | None = None
        with element("div", "rw-tile", role="group", aria_label=label):
            text(label, "rw-tile-name", tag="div")
            self._value: TextElement = text("", "rw-tile-value", tag="div")
            self._of: TextElement = text("", "rw-tile-more", tag="div")
            if has_meter:
                self._bar, self._part = meter()

    def show(self, value: str, of: str, share: float = 0.0) -> None:
        """Show the number."""
        set_text(self._value, value)
        set_text(self._of, of)
        if self._part is not None:
            set_part(self._part, share)
            set_class(self._bar, "rc-full", is_on=share > 0.95)


class _Key:
    """One kind of dots, explained."""

    def __init__(self, kind: str, label: str) -> None:
        self._label = label
        self._place = element("span", "rc-key rw-hidden")
        with self._place:
            element("span", f"rc-swatch {kind}", aria_hidden="true")
            self._words = text("")

    def show(self, n: int, median_s: float | None) -> None:
        """Show how many there are and their median."""
        set_class(self._place, "rw-hidden", is_on=not n)
        median = f": {format_seconds(median_s)}, the median of {n:,}" if median_s is not None else f": {n:,}"
        set_text(self._words, f"{self._label}{median}")


def _notice(seen: _Seen) -> str:
    if not seen.report["usable"]:
        return f"The cache cannot be used now; replies are made without it. {seen.report['problem']}"
    return "Caching is paused: nothing is read and nothing is written. What is kept stays." if seen.is_paused else ""


def _picture_words(seen: _Seen) -> str:
    if not seen.picture:
        return "Conversations that begin alike share what is kept of their beginning. They are shown here."
    said = ["A bar is a conversation, as long as it has tokens. Its pale part is kept once, for it and for others."]
    if seen.n_left_out:
        said.append(f"{seen.n_left_out:,} more that share are not drawn.")
    if seen.n_alone:
        said.append(f"{seen.n_alone:,} share nothing.")
    return " ".join(said)
