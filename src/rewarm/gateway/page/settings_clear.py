"""The part of the Settings page that erases: says first what would go, and asks."""

from __future__ import annotations

import asyncio
from typing import Any

from rewarm.gateway.cache_admin import CacheAdmin
from rewarm.gateway.disk_cache import ModelUse
from rewarm.gateway.page import cache_words as words
from rewarm.gateway.page.cache_parts import action, set_prop, set_text
from rewarm.gateway.page.parts import element, text
from rewarm.gateway.page.settings_parts import Row, Said, settle, toggle
from rewarm.gateway.problems import Problem

_ALL = "all"


class ClearCard:
    """Erases everything, or everything of one model."""

    def __init__(self, admin: CacheAdmin) -> None:
        self._admin = admin
        self._models: list[ModelUse] | None = None
        self._chosen = _ALL
        with element("section", "rw-card", aria_label="Erase"):
            text("Erase", tag="h2")
            with Row("What to erase", "Pinned conversations too. Chats themselves stay; they are read anew.") as row:
                self._select = row.control("select", "rw-text rc-short")
                self._select.on("change", lambda e: self._choose(e.args), js_handler="(e) => emit(e.target.value)")
                self._look_button = action("See what would go", self._look)
            self._said: Said = row.said
            self._asking = element("div", "rc-offer rw-hidden", role="group", aria_label="Erase")
            with self._asking:
                self._question = text("", tag="div")
                with element("div", "rw-row"):
                    self._yes = action("Erase it", self._erase, "rw-danger-button")
                    action("Keep it", self._keep)

    async def refresh(self) -> None:
        """Offer the models that keep something."""
        try:
            models = await asyncio.to_thread(self._admin.disk_cache.models)
        except Problem:
            models = []
        if [use.fingerprint for use in models] == [use.fingerprint for use in self._models or []] and self._models:
            return
        if self._models is not None and not models and not self._models:
            return
        self._models = models
        if self._chosen not in {use.fingerprint for use in models}:
            self._chosen = _ALL
        self._select.clear()
        with self._select:
            text("Everything", tag="option").props["value"] = _ALL
            for use in models:
                text(f"All of {use.name} ({use.fingerprint[:8]})", tag="option").props["value"] = use.fingerprint
        set_prop(self._select, "value", self._chosen)

    def _choose(self, value: Any) -> None:
        self._chosen = str(value)
        set_prop(self._select, "value", self._chosen)
        self._keep()

    def _keep(self) -> None:
        toggle(self._asking, is_shown=False)

    @property
    def _fingerprint(self) -> str | None:
        return None if self._chosen == _ALL else self._chosen

    async def _look(self) -> None:
        fingerprint = self._fingerprint
        found = ""

        def look() -> str:
            nonlocal found
            removal = self._admin.disk_cache.clear(fingerprint, dry_run=True)
            if not removal.n_files:
                return "Nothing is kept."
            rows = [row for row in self._admin.entries.rows() if fingerprint in (None, row.entry.fingerprint)]
            n_pinned = sum(row.entry.pinned for row in rows)
            pinned = f", {n_pinned} of them pinned" if n_pinned else ""
            n = "1 conversation" if len(rows) == 1 else f"{len(rows):,} conversations"
            found = f"This erases {n}{pinned}: {words.removal(removal)}. It cannot be undone."
            return ""

        self._admin.entries.changed()
        await settle(self._said, look)
        set_text(self._question, found)
        toggle(self._asking, is_shown=bool(found))
        if found:
            self._yes.run_method("focus")

    async def _erase(self) -> None:
        fingerprint = self._fingerprint

        def erase() -> str:
            removal = self._admin.disk_cache.clear(fingerprint, dry_run=False)
            return f"{words.removal(removal)} erased."

        self._keep()
        await settle(self._said, erase)
        self._admin.entries.changed()
