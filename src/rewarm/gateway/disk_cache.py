"""The cache folder as the gateway sees it: opened for its limits, rules, entries and counters, never for states.

Workers open it themselves, and see every change within a second or at their next save. A folder that cannot be
used is told about; the gateway and its workers go on. Its methods wait for the disk: call them on a thread.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import rewarm
from rewarm.cache.description import identity_of, model_name
from rewarm.cache.explain import Explanation
from rewarm.cache.policy import Policy, read_policy
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.errors import RewarmError
from rewarm.gateway.place import Place
from rewarm.gateway.problems import Problem
from rewarm.gateway.replies import Replies
from rewarm.gateway.settings import Settings
from rewarm.store.room import Removal
from rewarm.store.settings import Limits
from rewarm.units import format_bytes

log = logging.getLogger(__name__)

UNNAMED = "unnamed model"
"""Shown where a namespace does not say whose it is."""


@dataclass(frozen=True, slots=True)
class ModelUse:
    """What one model keeps in the folder.

    Attributes:
        fingerprint: 64 hex characters.
        name: for a person.
        n_files: its records.
        nbytes: of these, rounded up to 4 KiB each.
    """

    fingerprint: str
    name: str
    n_files: int
    nbytes: int


class DiskCache:
    """One cache folder.

    Args:
        settings: where it is; limits that are given are set there.
        now: seconds since 1970.

    Attributes:
        folder: where it is now.
        problem: why it cannot be used, or "".
        limits_at_start: names of the limits that the start sets, each time.
        place: where it will be at the next start.
        replies: what the cache did for the latest replies.
    """

    def __init__(self, settings: Settings, now: Callable[[], float] = time.time) -> None:
        self.folder: Path = settings.cache_dir
        self.place = Place(settings)
        self.problem = ""
        self.replies = Replies(self._count_saved, now)
        self._cache: PrefixCache | None = None
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        given = {"max_bytes": settings.max_bytes, "max_files": settings.max_files}
        limits = {name: value for name, value in given.items() if value is not None}
        self.limits_at_start = tuple(limits)
        self.open(self.folder, Limits(**limits) if limits else None)

    # Opening and closing.

    def open(self, folder: Path, limits: Limits | None = None) -> bool:
        """Open `folder`, which becomes the cache folder; whether it can be used (`problem` says why not)."""
        with self._lock:
            before, self._cache = self._cache, None
            if before is not None:
                before.close()
            self.folder = folder
            try:
                self._cache = rewarm.open(folder, limits=limits)
                if limits is not None:
                    # `open` leaves the limits of a folder that was there alone; a setting is an order.
                    self._cache.set_limits(limits)
                self.problem = ""
            except (OSError, RewarmError) as error:
                self.problem = str(error)
                log.warning("The cache folder cannot be used, so replies are computed without it: %s", error)
            return not self.problem

    def close(self, why: str = "The gateway has ended.") -> None:
        """Give the folder back; from then on it cannot be used, for the reason `why`."""
        with self._lock:
            self.problem = self.problem or why
            cache, self._cache = self._cache, None
        if cache is not None:
            cache.close()

    @contextlib.contextmanager
    def use(self) -> Iterator[PrefixCache]:
        """The open cache.

        Raises:
            Problem: 503, it cannot be used now; says why.
        """
        cache = self._cache
        if cache is None:
            raise unusable(self.problem)
        try:
            yield cache
        except (OSError, RewarmError, TimeoutError) as error:
            raise unusable(str(error)) from error

    # Telling.

    def report(self) -> dict[str, Any]:
        """The folder, its limits and its counters."""
        limits: dict[str, Any] = {}
        counters: dict[str, Any] = {}
        problem = self.problem
        try:
            with self.use() as cache:
                limits = msgspec.to_builtins(cache.settings().limits)
                counters = cache.stats()
        except Problem as error:
            problem = self.problem or error.message
        return {
            "folder": str(self.folder),
            "usable": not problem,
            "problem": problem,
            "limits": limits,
            "counters": counters,
        }

    def told(self) -> str:
        """Where the folder is and how large it may grow, for a person."""
        report = self.report()
        if not report["usable"]:
            return f"none: {report['problem']}"
        max_bytes, max_files = report["limits"].get("max_bytes"), report["limits"].get("max_files")
        size = format_bytes(max_bytes) if max_bytes is not None else "any size"
        files = f"{max_files:,} files" if max_files is not None else "any number of files"
        return f"{self.folder}, up to {size} and {files}"

    def models(self) -> list[ModelUse]:
        """What each model keeps there, most bytes first."""
        with self.use() as cache:
            found = [(each.hex(), n_files, nbytes) for each, n_files, nbytes in cache.store.namespaces()]
            names = self.names(each[0] for each in found)
        uses = [ModelUse(each, names[each], n_files, nbytes) for each, n_files, nbytes in found if n_files]
        return sorted(uses, key=lambda one: -one.nbytes)

    def names(self, fingerprints: Any) -> dict[str, str]:
        """The names of models by fingerprint (hex), as their namespaces say."""
        with self.use() as cache:
            return {each: self._name(cache, each) for each in set(fingerprints)}

    def _name(self, cache: PrefixCache, fingerprint: str) -> str:
        if fingerprint not in self._names:
            said = cache.store.description(bytes.fromhex(fingerprint))
            name = model_name(said) if said else None
            if name is None:
                return UNNAMED
            self._names[fingerprint] = name
        return self._names[fingerprint]

    def explain(self, fingerprint: str, tokens: list[int]) -> Explanation:
        """What a prompt would find now, and why not more.

        Raises:
            Problem: 404, nothing is kept of such a model; 400, these are no token ids; 503.
        """
        with self.use() as cache:
            said = cache.store.description(_bytes(fingerprint))
            identity = identity_of(said) if said else None
            if identity is None:
                raise Problem(404, f"Nothing is kept of a model {fingerprint[:64]}.", "model_not_found", "fingerprint")
            try:
                return cache.explain(tokens, identity)
            except ValueError as error:
                raise Problem(400, str(error), param="tokens") from error

    # Changing.

    def rules(self) -> tuple[Limits, Policy]:
        """The limits and rules in force."""
        with self.use() as cache:
            settings = cache.settings()
            return settings.limits, read_policy(settings.policy)

    def change(self, limits: Mapping[str, int], rules: Mapping[str, Any]) -> Removal:
        """Change the limits and rules that are named; what had to be evicted.

        Raises:
            Problem: 400, a value makes no sense: nothing was changed. 503.
        """
        with self.use() as cache:
            try:
                wanted = Limits(**limits)
                wanted.check()
                stored = msgspec.to_builtins(read_policy(cache.settings().policy))
                policy = msgspec.convert({**stored, **rules}, Policy)
                policy.check()
            except (TypeError, ValueError) as error:  # msgspec's ValidationError is one
                raise Problem(400, f"Nothing was changed: {error}") from error
            if rules:
                cache.set_policy(policy)
            return cache.set_limits(wanted) if limits else Removal()

    def pin(self, entry_id: str, *, pinned: bool) -> None:
        """Pin an entry or take its pin away.

        Raises:
            Problem: 404, there is no such entry; 503.
        """
        _bytes(entry_id)
        with self.use() as cache:
            if not (cache.pin(entry_id) if pinned else cache.unpin(entry_id)):
                raise no_entry(entry_id)

    def forget(self, entry_id: str, *, dry_run: bool) -> Removal:
        """Erase an entry and every record that only it needs.

        Raises:
            Problem: 404, there is no such entry; 503.
        """
        _bytes(entry_id)
        with self.use() as cache:
            if all(entry.id != entry_id for entry in cache.entries()):
                raise no_entry(entry_id)
            return cache.forget(entry_id, dry_run=dry_run)

    def clear(self, fingerprint: str | None, *, dry_run: bool) -> Removal:
        """Erase everything, or everything of one model, pinned entries too.

        Raises:
            Problem: 404, this is no fingerprint; 503.
        """
        if fingerprint is not None:
            _bytes(fingerprint, 32)
        with self.use() as cache:
            return cache.clear(fingerprint, dry_run=dry_run)

    def _count_saved(self, seconds: float) -> None:
        cache = self._cache
        if cache is not None:
            cache.count_saved(seconds)


def unusable(why: str) -> Problem:
    """503: the cache folder cannot be used now."""
    return Problem(503, why, "cache_unavailable")


def no_entry(entry_id: str) -> Problem:
    """404: there is no such entry."""
    return Problem(404, f"There is no entry {entry_id[:64]!r}; it may have been evicted.", "entry_not_found")


def _bytes(text: str, n_bytes: int | None = None) -> bytes:
    """Hex of an entry's id (16 bytes) or a fingerprint (32).

    Raises:
        Problem: 404, it is neither.
    """
    with contextlib.suppress(ValueError):
        found = bytes.fromhex(text)
        if len(text) == 2 * len(found) and len(found) in ((16, 32) if n_bytes is None else (n_bytes,)):
            return found
    raise Problem(404, f"{text[:64]!r} names no entry and no model.", "entry_not_found")
