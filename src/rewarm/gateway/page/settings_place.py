"""The part of the Settings page on where the cache is: looked at first, then moved or left, with progress."""

from __future__ import annotations

import asyncio
from typing import Any

from rewarm.gateway.cache_admin import CacheAdmin
from rewarm.gateway.page import cache_words as words
from rewarm.gateway.page.cache_parts import action, meter, set_class, set_part, set_prop, set_text
from rewarm.gateway.page.parts import element, text
from rewarm.gateway.page.settings_parts import Said, toggle, unique
from rewarm.gateway.problems import Problem
from rewarm.gateway.relocation import Checked, Progress, Records, Stage
from rewarm.units import format_bytes

_ENTER = "(e) => { if (e.key === 'Enter' && !e.isComposing) emit(e.target.value); }"


class PlaceCard:
    """Where the cache is, and changing that."""

    def __init__(self, admin: CacheAdmin) -> None:
        self._admin = admin
        self._path = ""
        self._checked: Checked | None = None
        self._records: Records = "move"
        self._ended = Progress()
        with element("section", "rw-card", aria_label="Location"):
            text("Where it is", tag="h2")
            self._folder = text("", "rc-folder rw-mono", tag="div")
            self._disk = text("", "rw-hint-text", tag="div")
            self._forced = text("", "rw-hint-text rw-hidden", tag="div")
            self._build_form()
            self._build_offer()
            self._build_progress()

    def _build_form(self) -> None:
        field_id = unique("folder")
        self._form = element("div", "rw-field rc-form")
        with self._form:
            text("Another folder", tag="label").props["for"] = field_id
            with element("div", "rc-line"):
                field = element(
                    "input", "rw-text", id=field_id, type="text", autocomplete="off", spellcheck="false",
                    placeholder="/mnt/ssd/rewarm", autocapitalize="off",
                )  # fmt: skip
                field.on("keydown", lambda e: self._look(e.args), js_handler=_ENTER)
                look = action("Check", lambda: None)
                look.on(
                    "click",
                    lambda e: self._look(e.args),
                    js_handler=f"() => emit(document.getElementById('{field_id}').value)",
                )
            self._said = Said()

    def _build_offer(self) -> None:
        self._offer = element("div", "rc-offer rw-hidden", role="group", aria_label="Use this folder")
        with self._offer:
            self._offer_path = text("", "rc-folder rw-mono", tag="div")
            self._offer_room = text("", "rw-hint-text", tag="div")
            self._warnings = element("ul", "rw-notice rw-warning rc-warnings rw-hidden")
            name = unique("records")
            with element("fieldset", "rc-choice"):
                text("What is kept so far", "rw-visually-hidden", tag="legend")
                hint = "It is copied, checked, and then removed here."
                self._move = self._radio(name, "move", "Bring along what is kept", hint)
                hint = "It is not used from there on."
                self._leave = self._radio(name, "leave", "Leave what is kept where it is", hint)
            with element("div", "rw-row"):
                action("Use this folder", self._use, "rw-primary")
                action("Cancel", self._cancel)

    def _radio(self, name: str, value: Records, label: str, hint: str) -> Any:
        made = element("label", "rw-radio")
        with made:
            radio = element("input", "", type="radio", name=name, value=value)
            radio.on("change", lambda: self._choose(value))
            with element("span"):
                text(label, tag="span")
                text(hint, "rw-hint-text", tag="div")
        return radio

    def _build_progress(self) -> None:
        self._going = element("div", "rc-going rw-hidden", role="status")
        with self._going:
            self._going_words = text("", tag="div")
            self._bar, self._part = meter()
            with element("div", "rw-row"):
                self._stop = action("Stop, and stay where it was", self._admin.relocation.stop)
        self._result = text("", "rw-notice rw-hidden", tag="div")
        self._result.props["role"] = "status"

    # What the user does.

    async def _look(self, path: Any) -> None:
        checked = await asyncio.to_thread(self._admin.relocation.check, str(path))
        self._said.bad(
            f"{checked.path}: {checked.problem}" if checked.problem and str(path).strip() else checked.problem
        )
        self._checked = None if checked.problem else checked
        if self._checked is not None:
            self._show_offer(checked)
        toggle(self._offer, is_shown=self._checked is not None)

    def _show_offer(self, checked: Checked) -> None:
        set_text(self._offer_path, str(checked.path))
        free = "Free space cannot be told" if checked.free_bytes is None else f"{format_bytes(checked.free_bytes)} free"
        there = " It holds a cache already, which is used as it is." if checked.holds_cache else ""
        set_text(self._offer_room, f"Can be written. {free}; {words.size(checked.needed_bytes)} are kept now.{there}")
        self._warnings.clear()
        with self._warnings:
            for warning in checked.warnings:
                text(warning, tag="li")
        toggle(self._warnings, is_shown=bool(checked.warnings))
        self._choose("leave" if checked.holds_cache else "move")
        set_prop(self._move, "disabled", checked.holds_cache)

    def _choose(self, records: Records) -> None:
        self._records = records
        for radio, value in ((self._move, "move"), (self._leave, "leave")):
            set_prop(radio, "checked", value == records)

    def _cancel(self) -> None:
        self._checked = None
        toggle(self._offer, is_shown=False)

    async def _use(self) -> None:
        if self._checked is None:
            return
        try:
            await self._admin.relocation.start(str(self._checked.path), self._records)
        except Problem as problem:
            self._said.bad(problem.message)
        self._cancel()
        await self.refresh()

    # Keeping it true.

    async def refresh(self) -> None:
        """Show where it is, and how far a change is."""
        folder = self._admin.disk_cache.folder
        progress = self._admin.relocation.progress
        is_going_on = progress.stage.is_going_on
        if not is_going_on:
            set_text(self._folder, str(folder))
            set_text(self._disk, await asyncio.to_thread(_room, self._admin))
        forced_by = self._admin.disk_cache.place.forced_by
        set_text(
            self._forced, f"Named by {forced_by}. A change here holds until the gateway ends; name the new folder then."
        )
        toggle(self._forced, is_shown=bool(forced_by))
        toggle(self._form, is_shown=not is_going_on)
        toggle(self._going, is_shown=is_going_on)
        set_text(self._going_words, _told(progress))
        set_part(self._part, words.share(progress.done_bytes, progress.total_bytes))
        set_class(self._bar, "rw-unknown", is_on=not progress.total_bytes)
        toggle(self._stop, is_shown=progress.stage is Stage.MOVING)
        self._show_result(progress)

    def _show_result(self, progress: Progress) -> None:
        if progress == self._ended:
            return
        self._ended = progress
        is_over = progress.stage in (Stage.DONE, Stage.STOPPED, Stage.FAILED)
        parts = [progress.message]
        if progress.unloaded:
            parts.append(f"Unloaded for it: {', '.join(progress.unloaded)}.")
        if progress.left_behind:
            parts.append(f"{words.files(len(progress.left_behind))} that are not rewarm's stay in {progress.source}.")
        set_text(self._result, " ".join(parts))
        tone = {Stage.DONE: "rw-good", Stage.FAILED: "rw-bad"}.get(progress.stage, "")
        self._result.classes(replace=f"rw-notice {tone}" if is_over else "rw-notice rw-hidden")


def _room(admin: CacheAdmin) -> str:
    """How full the disk of the cache folder is. On a thread."""
    place = admin.relocation.here()
    if place.free_bytes is None or place.total_bytes is None:
        return ""
    told = f"{format_bytes(place.free_bytes)} of {words.size(place.total_bytes)} free on its disk."
    return " ".join((told, *place.warnings))


def _told(progress: Progress) -> str:
    if progress.stage is Stage.CLOSING:
        return "The models write what they hold, and close the cache."
    if progress.stage is Stage.OPENING:
        return "The cache is being opened in its new place."
    done, total = format_bytes(progress.done_bytes), format_bytes(progress.total_bytes)
    return f"Moving to {progress.target}: {done} of {total}. Replies are made without the cache meanwhile."
