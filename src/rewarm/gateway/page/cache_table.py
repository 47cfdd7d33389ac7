"""The table of what is kept: searched, sorted, a page at a time; pin and forget. Knows `CacheAdmin`, no other part.

Rows are made once and filled anew, so that the keyboard's focus stays where it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from rewarm.gateway.cache_admin import CacheAdmin
from rewarm.gateway.entry_list import Found, Query, Row, Sort
from rewarm.gateway.page import cache_words as words
from rewarm.gateway.page.cache_parts import action, error_words, set_class, set_prop, set_text
from rewarm.gateway.page.parts import element, on_click, text
from rewarm.store.room import Removal

PAGE_ROWS = 15

_COLUMNS: tuple[tuple[Sort, str, str], ...] = (
    ("title", "Conversation", "rc-title"),
    ("tokens", "Tokens", "rc-number rc-w-tokens"),
    ("own", "Own", "rc-number rc-w-own"),
    ("size", "With shared", "rc-number rc-w-size"),
    ("matched", "Last match", "rc-number rc-w-matched"),
    ("hits", "Hits", "rc-number rc-w-hits"),
    ("pinned", "Pinned", "rc-number rc-w-pinned"),
)
_SORTS: tuple[tuple[Sort, str], ...] = (
    ("matched", "Last match"),
    ("title", "Title"),
    ("model", "Model"),
    ("tokens", "Tokens"),
    ("own", "Own size"),
    ("size", "Size with shared"),
    ("hits", "Hits"),
    ("pinned", "Pinned first"),
)


class EntryTable:
    """The table on one page."""

    def __init__(self, admin: CacheAdmin) -> None:
        self._admin = admin
        self._query = Query(limit=PAGE_ROWS)
        self._found = Found([], 0, 0)
        self._asking: tuple[str, str] | None = None
        self._failed = ""
        self._build()

    def _build(self) -> None:
        with element("section", "rw-card rc-entries", aria_label="Conversations"):
            with element("div", "rw-card-head"):
                text("Conversations", tag="h2")
                self._count = text("", "rc-count", tag="span")
                search = element(
                    "input",
                    "rw-text rc-search",
                    type="search",
                    placeholder="Search",
                    aria_label="Search the conversations",
                )
                search.on("input", lambda e: self._search(e.args), js_handler=_SEARCH)
                self._sort = element("select", "rw-text rc-sort", aria_label="Sort by")
                with self._sort:
                    for name, label in _SORTS:
                        text(label, tag="option").props["value"] = name
                self._sort.on("change", lambda e: self._choose(e.args), js_handler="(e) => emit(e.target.value)")
            self._trouble = text("", "rw-notice rw-bad rw-hidden", tag="div")
            self._trouble.props["role"] = "alert"
            self._empty = text("", "rc-empty", tag="p")
            with element("table", "rw-table rc-table", role="table"):
                self._build_head()
                with element("tbody", role="rowgroup"):
                    self._views = [_RowView(self, number) for number in range(PAGE_ROWS)]
            self._build_pager()

    def _build_head(self) -> None:
        self._heads = {}
        with element("thead", role="rowgroup"), element("tr", role="row"):
            for name, label, classes in _COLUMNS:
                head = element("th", classes, scope="col", role="columnheader")
                self._heads[name] = head
                with head:
                    by = element("button", "rc-head", type="button", aria_label=f"Sort by {label.lower()}")
                    with by:
                        text(label)
                    on_click(by, _later(self._sort_by, name))
            with element("th", "rc-acts", scope="col", role="columnheader"):
                text("Actions", "rw-visually-hidden")

    def _build_pager(self) -> None:
        self._pager = element("nav", "rc-pager rw-hidden", aria_label="Pages of the table")
        with self._pager:
            self._back = action("Back", lambda: self._turn(-1), "rw-plain rc-small")
            self._where = text("", "rc-where")
            self._on = action("Next", lambda: self._turn(1), "rw-plain rc-small")

    # What the user does.

    async def _search(self, words_given: Any) -> None:
        self._query = replace(self._query, search=str(words_given)[:200], offset=0)
        await self.refresh()

    async def _choose(self, name: Any) -> None:
        if name in get_args(Sort):
            is_text = name in ("title", "model")
            self._query = replace(self._query, sort=name, is_descending=not is_text, offset=0)
            await self.refresh()

    async def _sort_by(self, name: Sort) -> None:
        if name == self._query.sort:
            self._query = replace(self._query, is_descending=not self._query.is_descending, offset=0)
            await self.refresh()
        else:
            await self._choose(name)

    async def _turn(self, by: int) -> None:
        self._query = replace(self._query, offset=max(0, self._query.offset + by * PAGE_ROWS))
        await self.refresh()

    async def pin(self, entry_id: str) -> None:
        """Pin an entry, or take its pin away."""
        row = self._row(entry_id)
        if row is not None:
            await self._do(lambda: self._admin.disk_cache.pin(entry_id, pinned=not row.entry.pinned))

    async def ask(self, entry_id: str | None) -> None:
        """Ask whether an entry is to be forgotten; None: no more."""
        self._asking = None
        row = self._row(entry_id) if entry_id is not None else None
        if row is not None:
            found = await self._do(lambda: self._admin.disk_cache.forget(row.entry.id, dry_run=True))
            if isinstance(found, Removal):
                frees = f"It frees {words.removal(found)}." if found.n_files else "It frees nothing."
                shared = " What it shares with others stays." if row.entry.nbytes > row.entry.own_nbytes else ""
                self._asking = (row.entry.id, f"Forget “{row.title}”? {frees}{shared}")
        self._show()

    async def forget(self) -> None:
        """Erase the entry that was asked about."""
        asking, self._asking = self._asking, None
        if asking is not None:
            await self._do(lambda: self._admin.disk_cache.forget(asking[0], dry_run=False))

    def _row(self, entry_id: str) -> Row | None:
        return next((row for row in self._found.rows if row.entry.id == entry_id), None)

    async def _do(self, act: Callable[[], Any]) -> Any:
        """Do something on a thread, tell what went wrong, and show how it is now; what `act` gave."""
        self._failed, result = "", None
        try:
            result = await asyncio.to_thread(act)
        except Exception as error:  # noqa: BLE001 - told on the page, whatever it is
            self._failed = error_words(error)
        self._admin.entries.changed()
        await self.refresh()
        return result

    # Keeping it true.

    async def refresh(self) -> None:
        """Read the page of entries anew, and show it."""
        query = self._query
        try:
            found = await asyncio.to_thread(self._admin.entries.find, query)
        except Exception as error:  # noqa: BLE001 - told on the page, whatever it is
            found, self._failed = Found([], 0, 0), error_words(error)
        if query is not self._query:
            return  # another one was asked for meanwhile
        if not found.rows and found.n_found:
            self._query = replace(query, offset=(found.n_found - 1) // PAGE_ROWS * PAGE_ROWS)
            await self.refresh()
            return
        self._found = found
        self._show()

    def _show(self) -> None:
        found, query, now_s = self._found, self._query, time.time()
        set_text(self._count, f"{found.n_found:,} of {found.n_all:,}" if query.search else f"{found.n_all:,}")
        set_text(self._trouble, self._failed)
        set_class(self._trouble, "rw-hidden", is_on=not self._failed)
        set_text(self._empty, _nothing(query, found))
        set_class(self._empty, "rw-hidden", is_on=bool(found.rows))
        for number, view in enumerate(self._views):
            row = found.rows[number] if number < len(found.rows) else None
            question = self._asking[1] if row and self._asking and self._asking[0] == row.entry.id else ""
            view.show(row, question, now_s)
        for name, head in self._heads.items():
            order = "descending" if query.is_descending else "ascending"
            set_prop(head, "aria-sort", order if name == query.sort else "none")
        set_prop(self._sort, "value", query.sort)
        set_class(self._pager, "rw-hidden", is_on=found.n_found <= PAGE_ROWS)
        last = min(query.offset + PAGE_ROWS, found.n_found)
        set_text(self._where, f"{query.offset + 1:,} to {last:,} of {found.n_found:,}")
        set_prop(self._back, "disabled", query.offset == 0)
        set_prop(self._on, "disabled", last >= found.n_found)


_SEARCH = (
    "(e) => { clearTimeout(window.rewarmSearch); window.rewarmSearch = setTimeout(() => emit(e.target.value), 150); }"
)


# The entry that the browser shows at the moment of the click: another one may have come to its place here.
_WHOSE = "(e) => emit(e.currentTarget.dataset.entry)"


class _RowView:
    """The elements of one row; and of the question below it."""

    def __init__(self, table: EntryTable, number: int) -> None:
        self._table = table
        self._line = element("tr", "rc-row rw-hidden", role="row")
        with self._line:
            with element("td", "rc-title", role="cell"):
                self._title = text("", "rc-name", tag="div")
                self._under = text("", "rc-under", tag="div")
            self._numbers = [text("", f"rc-number rc-n-{name}", tag="td") for name, _, _ in _COLUMNS[1:-1]]
            with element("td", "rc-number rc-pinned", role="cell"):
                self._pin = element("button", "rw-button rc-small rc-pin", type="button")
                with self._pin:
                    self._pin_words = text("Pin")
                self._pin.on("click", lambda e: self._on_pin(e.args), js_handler=_WHOSE)
            with element("td", "rc-acts", role="cell"):
                self._forget = element("button", "rw-button rc-small rc-forget", type="button")
                with self._forget:
                    text("Forget")
                self._forget.on("click", lambda e: self._on_ask(e.args), js_handler=_WHOSE)
        self._below = element("tr", "rc-asking rw-hidden", role="row")
        with self._below, element("td", colspan=str(len(_COLUMNS) + 1), role="cell"), element("div", "rc-question"):
            self._question = text("", "rc-question-words")
            self._yes = action("Forget it", self._on_yes, "rw-danger-button rc-small")
            action("Keep it", self._on_no, "rw-plain rc-small")

    def show(self, row: Row | None, question: str, now_s: float) -> None:
        """Fill the row; None: there is none at this place."""
        set_class(self._line, "rw-hidden", is_on=row is None)
        set_class(self._below, "rw-hidden", is_on=not question)
        set_text(self._question, question)
        if row is None:
            return
        entry = row.entry
        set_text(self._title, row.title)
        set_prop(self._title, "title", row.title)
        set_text(self._under, row.model)
        cells = (
            f"{entry.n_tokens:,}",
            words.size(entry.own_nbytes),
            words.size(entry.nbytes),
            words.ago(entry.matched_s, now_s),
            f"{entry.hits:,}",
        )
        for cell, said in zip(self._numbers, cells, strict=True):
            set_text(cell, said)
        set_prop(self._pin, "data-entry", entry.id)
        set_prop(self._forget, "data-entry", entry.id)
        set_prop(self._pin, "aria-pressed", "true" if entry.pinned else "false")
        set_prop(self._pin, "aria-label", f"{'Unpin' if entry.pinned else 'Pin'} “{row.title}”")
        set_class(self._pin, "rc-on", is_on=entry.pinned)
        set_text(self._pin_words, "Pinned" if entry.pinned else "Pin")
        set_prop(self._forget, "aria-label", f"Forget “{row.title}”")

    async def _on_pin(self, entry_id: Any) -> None:
        await self._table.pin(str(entry_id))

    async def _on_ask(self, entry_id: Any) -> None:
        await self._table.ask(str(entry_id))
        self._yes.run_method("focus")

    async def _on_yes(self) -> None:
        await self._table.forget()

    async def _on_no(self) -> None:
        await self._table.ask(None)
        self._forget.run_method("focus")


def _nothing(query: Query, found: Found) -> str:
    if query.search:
        return f"Nothing here is called “{query.search}”."
    return (
        "" if found.n_all else "Nothing is kept yet. What is said in a chat is kept here, so that it can go on later."
    )


def _later(act: Callable[[Sort], Any], name: Sort) -> Callable[[], Any]:
    return lambda: act(name)
