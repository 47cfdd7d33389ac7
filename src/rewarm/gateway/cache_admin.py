"""What the Cache and Settings pages and their part of `/api` share: the folder, its entries, its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rewarm.gateway.disk_cache import DiskCache
from rewarm.gateway.entry_list import EntryList
from rewarm.gateway.problems import Problem
from rewarm.gateway.relocation import Relocation
from rewarm.gateway.workers import Workers


class CacheAdmin:
    """The cache of one gateway, as it is looked at and changed.

    Args:
        disk_cache: the folder.
        workers: the models' workers.
        titles: the titles of conversations, by id.

    Attributes:
        disk_cache: the folder.
        entries: what is kept there, for lists.
        relocation: changes of the folder.
        workers: the models' workers.
    """

    def __init__(self, disk_cache: DiskCache, workers: Workers, titles: Callable[[], Mapping[str, str]]) -> None:
        self.disk_cache = disk_cache
        self.workers = workers
        self.entries = EntryList(disk_cache, titles)
        self.relocation = Relocation(disk_cache, workers)

    def unload_idle_after(self, seconds: float | None) -> None:
        """Unload models that were not asked for so long; None keeps them. Waits for the disk.

        Raises:
            Problem: 500, it cannot be kept; all is as it was.
        """
        try:
            self.workers.options.put_idle_unload(seconds)
        except OSError as error:
            raise Problem(500, f"This cannot be written: {error.strerror or error}. Nothing was changed.") from error

    async def close(self) -> None:
        """End a change of the folder that goes on."""
        await self.relocation.close()
