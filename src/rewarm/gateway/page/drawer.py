"""The list of conversations beside the chat: search, rename. Knows `Chats`; what opening one means is the page's."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from rewarm.gateway.page.parts import act, button, element, icon, on_click, text, word_button
from rewarm.gateway.page.turns import Chat, Chats
from rewarm.gateway.page.words import day_of

ROWS = 60
"""So many are listed at first: a list of thousands would make every page slow."""

_SEARCH = "(e) => { clearTimeout(window.rewarmFind); window.rewarmFind = setTimeout(() => emit(e.target.value), 120); }"
# Leaving the field keeps what was typed, as Enter does; Escape does not.
_RENAME = (
    "(e) => { if (e.key === 'Enter' && !e.isComposing) { e.preventDefault(); emit(e.target.value); }"
    " else if (e.key === 'Escape') { e.target.dataset.left = '1'; emit(null); } }"
)
_LEFT = "(e) => { if (!e.target.dataset.left) emit(e.target.value); }"


@dataclass(frozen=True, slots=True)
class DrawerActs:
    """What the list asks of the page.

    Attributes:
        open: show a conversation.
        new: begin one.
        new_private: begin one that is not kept.
        delete: ask whether to delete one.
    """

    open: Callable[[Chat], None]
    new: Callable[[], None]
    new_private: Callable[[], None]
    delete: Callable[[Chat], Awaitable[None]]


class Drawer:
    """Beside the page where there is room, over it on a phone.

    Args:
        chats: what is listed.
        acts: what the user can do with it.
    """

    def __init__(self, chats: Chats, acts: DrawerActs) -> None:
        self._chats = chats
        self._acts = acts
        self._shown: tuple[object, ...] = ()
        self._words = ""
        self._rows = ROWS
        self._renaming: str | None = None
        self._current: Chat | None = None
        on_click(element("div", "rw-scrim", aria_hidden="true"), script="window.rewarm.closeDrawer()")
        with element("nav", "rw-drawer", aria_label="Conversations"):
            with element("div", "rw-drawer-head"):
                on_click(button("plus", "New chat", "rw-new", "New chat"), acts.new)
                private = button("lock", "New private chat: nothing of it is kept", "rw-new-private")
                on_click(private, acts.new_private)
            with element("div", "rw-find"):
                icon("search")
                find = element(
                    "input", "rw-find-words", type="search", placeholder="Search", aria_label="Search the conversations"
                )
                find.on("input", lambda e: self._find(e.args), js_handler=_SEARCH)
            self._list = element("div", "rw-list")

    def refresh(self, current: Chat) -> None:
        """Draw the list again if it changed."""
        self._current = current
        found = self._chats.find(self._words)
        now_s = time.time()
        rows = [
            (
                chat.conversation.id,
                chat.conversation.title,
                day_of(chat.conversation.updated_s, now_s),
                chat is current,
                chat.is_busy,
            )
            for chat in found[: self._rows]
        ]
        wanted = (self._renaming, self._words, len(found), *rows)
        if wanted != self._shown:
            self._shown = wanted
            self._draw(found, now_s)

    def _draw(self, found: list[Chat], now_s: float) -> None:
        self._list.clear()
        with self._list:
            day = ""
            for chat in found[: self._rows]:
                of = day_of(chat.conversation.updated_s, now_s)
                if of != day:
                    day = of
                    text(day, "rw-day", tag="h2")
                    rows = element("ul", "rw-rows", aria_label=day)
                with rows:
                    self._draw_one(chat)
            if len(found) > self._rows:
                word_button(f"Show all {len(found):,}", self._all, "rw-quiet rw-more")
            if not found:
                text("Nothing found" if self._words else "No conversations yet", "rw-none", tag="p")

    def _draw_one(self, chat: Chat) -> None:
        is_current = chat is self._current
        name = chat.conversation.title
        with element("li", "rw-item rw-current" if is_current else "rw-item"):
            if self._renaming == chat.conversation.id:
                self._draw_field(chat)
                return
            title = element("button", "rw-title", type="button", title=name)
            if is_current:
                title.props["aria-current"] = "page"
            with title:
                if chat.is_private:
                    icon("lock")
                    text("Private: ", "rw-visually-hidden")
                text(name)
            on_click(title, lambda: self._acts.open(chat))
            if chat.is_busy:
                element("span", "rw-pulse", role="img", aria_label="A reply is being made")
            act(f"Rename “{name}”", "pencil", lambda: self._rename(chat))
            act(f"Delete “{name}”", "trash", lambda: self._acts.delete(chat))

    def _draw_field(self, chat: Chat) -> None:
        field = element("input", "rw-rename", type="text", aria_label="New name", maxlength="200")
        field.props["value"] = chat.conversation.name or chat.conversation.title
        field.on("keydown", lambda e: self._renamed(chat, e.args), js_handler=_RENAME)
        field.on("blur", lambda e: self._renamed(chat, e.args), js_handler=_LEFT)
        ui.context.client.run_javascript(f"window.rewarm.select({field.html_id!r})")

    def _rename(self, chat: Chat) -> None:
        self._renaming = chat.conversation.id
        self._again()

    async def _renamed(self, chat: Chat, name: Any) -> None:
        if self._renaming != chat.conversation.id:
            return  # Enter has done it; the field that goes away is left, too
        self._renaming = None
        if name is not None and str(name).strip() != chat.conversation.title:
            await chat.set(name=str(name))
        self._again()

    def _find(self, words: Any) -> None:
        self._words, self._rows = str(words)[:200], ROWS
        self._again()

    def _all(self) -> None:
        self._rows = 1_000_000
        self._again()

    def _again(self) -> None:
        if self._current is not None:
            self.refresh(self._current)
