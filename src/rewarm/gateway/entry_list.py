"""The entries of the cache folder as people look at them: with titles and models, searched, sorted, a page at a time.

A title comes from the chat history, where an entry's label is a conversation there; tokens are no text without a
tokenizer. Its methods read the disk: call them on a thread.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rewarm.cache.prefix_cache import PrefixCache
from rewarm.gateway.disk_cache import DiskCache
from rewarm.state.reason import Boundary
from rewarm.store.entries import Entry

FRESH_S = 1.0
"""How long a list that was read is used again: several pages may be open."""

MAX_ROWS = 200
"""Rows of one page at most."""

Sort = Literal["title", "model", "tokens", "size", "own", "matched", "hits", "pinned"]

_PLAIN_TITLES = {
    Boundary.SYSTEM.value: "System prompt",
    Boundary.PREFILL.value: "Prompt, read in part",
    Boundary.USER.value: "Prompt",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One entry, for a person.

    Attributes:
        entry: itself.
        title: what it is called.
        model: whose it is.
    """

    entry: Entry
    title: str
    model: str


@dataclass(frozen=True, slots=True)
class Query:
    """Which entries are wanted.

    Attributes:
        search: words that must all be in the title, the model's name or the label, or begin the id; "" for all.
        sort: by what.
        is_descending: largest, or latest, first.
        offset, limit: the page; at most 200 rows.
        model: a fingerprint (hex), or None for all models.
    """

    search: str = ""
    sort: Sort = "matched"
    is_descending: bool = True
    offset: int = 0
    limit: int = 25
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a query gave: the rows of the page, how many match in all, and how many there are."""

    rows: list[Row]
    n_found: int
    n_all: int


_KEYS: Mapping[Sort, Callable[[Row], object]] = {
    "title": lambda row: row.title.casefold(),
    "model": lambda row: row.model.casefold(),
    "tokens": lambda row: row.entry.n_tokens,
    "size": lambda row: row.entry.nbytes,
    "own": lambda row: row.entry.own_nbytes,
    "matched": lambda row: row.entry.matched_s,
    "hits": lambda row: row.entry.hits,
    "pinned": lambda row: row.entry.pinned,
}


class EntryList:
    """The entries of a gateway's cache folder.

    Args:
        disk_cache: where they are.
        titles: the titles of conversations by id, as the chat history has them.
    """

    def __init__(self, disk_cache: DiskCache, titles: Callable[[], Mapping[str, str]]) -> None:
        self._disk_cache = disk_cache
        self._titles = titles
        self._lock = threading.Lock()
        self._read_at = 0.0
        self._folder: Path | None = None
        self._stamp: object = None
        self._rows: list[Row] = []

    def rows(self) -> list[Row]:
        """All entries, latest match first, as of a second ago at most; the same list while nothing has changed.

        Raises:
            Problem: 503, the cache folder cannot be used now.
        """
        with self._lock:
            folder = self._disk_cache.folder
            if folder != self._folder or time.monotonic() - self._read_at > FRESH_S:
                titles = self._titles()
                with self._disk_cache.use() as cache:
                    stamp = (folder, _changes(cache), id(titles))
                    entries = cache.entries() if stamp != self._stamp else None
                if entries is not None:
                    names = self._disk_cache.names(entry.fingerprint for entry in entries)
                    self._rows = [Row(entry, title_of(entry, titles), names[entry.fingerprint]) for entry in entries]
                    self._stamp = stamp
                self._folder, self._read_at = folder, time.monotonic()
            return self._rows

    def changed(self) -> None:
        """Read anew at the next look: something was pinned or removed."""
        with self._lock:
            self._read_at = 0.0

    def find(self, query: Query) -> Found:
        """The page that `query` asks for.

        Raises:
            Problem: 503, the cache folder cannot be used now.
        """
        rows = self.rows()
        words = query.search.casefold().split()
        found = [row for row in rows if _is_meant(row, words, query.model)]
        if query.sort != "matched" or not query.is_descending:
            # Sorting is stable: of equals the latest match stays first.
            found = sorted(found, key=_KEYS[query.sort], reverse=query.is_descending)  # type: ignore[arg-type]
        limit = max(1, min(query.limit, MAX_ROWS))
        return Found(found[max(0, query.offset) :][:limit], len(found), len(rows))


def _changes(cache: PrefixCache) -> tuple[object, ...]:
    """Differs when an entry may have: been made, used, evicted, forgotten, pinned."""
    usage = cache.store.usage()
    return (*(usage.get(name) for name in ("recency", "forgets", "files_used", "bytes_used")), cache.settings().pins)


def title_of(entry: Entry, titles: Mapping[str, str]) -> str:
    """What an entry is called: its conversation's title, else its label, else what ended there, or when it began."""
    if entry.label:
        return titles.get(entry.label) or entry.label
    plain = _PLAIN_TITLES.get(entry.boundary)
    if plain is not None:
        return plain
    begun = dt.datetime.fromtimestamp(entry.created_s).astimezone()
    return f"Unnamed, of {begun.day} {begun:%b %Y, %H:%M}"


def _is_meant(row: Row, words: list[str], model: str | None) -> bool:
    if model is not None and row.entry.fingerprint != model:
        return False
    if not words:
        return True
    said = f"{row.title}\n{row.model}\n{row.entry.label or ''}".casefold()
    # Of an id only the beginning counts: any few characters are somewhere in one of many ids.
    return all(word in said or row.entry.id.startswith(word) for word in words)
