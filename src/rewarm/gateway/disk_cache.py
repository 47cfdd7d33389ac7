"""The cache folder as the gateway sees it: opened for its limits and counters, never for states.

Workers open it themselves. A folder that cannot be used is told about; the gateway and its workers go on.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

import rewarm
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.errors import RewarmError
from rewarm.gateway.settings import Settings
from rewarm.units import format_bytes

log = logging.getLogger(__name__)


class DiskCache:
    """One cache folder.

    Args:
        settings: where it is; limits that are given are set there.
    """

    def __init__(self, settings: Settings) -> None:
        self.folder: Path = settings.cache_dir
        self.problem = ""
        self._cache: PrefixCache | None = None
        given = {"max_bytes": settings.max_bytes, "max_files": settings.max_files}
        limits = {name: value for name, value in given.items() if value is not None}
        try:
            self._cache = rewarm.open(self.folder, limits=rewarm.Limits(**limits) if limits else None)
            if limits:
                # `open` leaves the limits of a folder that was there alone; a setting is an order.
                self._cache.set_limits(rewarm.Limits(**limits))
        except (OSError, RewarmError) as error:
            self.problem = str(error)
            log.warning("The cache folder cannot be used, so replies are computed without it: %s", error)

    def report(self) -> dict[str, Any]:
        """The folder, its limits and its counters."""
        limits: dict[str, Any] = {}
        counters: dict[str, Any] = {}
        problem = self.problem
        if self._cache is not None:
            try:
                limits = msgspec.to_builtins(self._cache.settings().limits)
                counters = self._cache.stats()
            except (OSError, RewarmError) as error:
                problem = str(error)
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

    def close(self) -> None:
        """Give the folder back."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None
