"""Where the cache folder is, when it was chosen on the page: remembered in the configuration file for the next start.

Ranks below what an argument or the environment says, since whoever starts the gateway so means it.
"""

from __future__ import annotations

import os
from pathlib import Path

from rewarm.cache.config_file import write_value
from rewarm.gateway.settings import Settings


class Place:
    """The place of the cache folder of one gateway.

    Attributes:
        forced_by: what names the folder at the start and so stands above a choice on the page; "" when nothing does.
    """

    def __init__(self, settings: Settings) -> None:
        self.forced_by = _forced_by(settings)

    def remember(self, folder: Path) -> None:
        """Choose `folder` for the next start, and for every command that is not told another one.

        Nothing is kept where the start named the folder: it may be one beside the usual cache, which stays the usual.

        Raises:
            ConfigurationError: it cannot be written; what was chosen before still holds.
        """
        if not self.forced_by:
            write_value("dir", str(folder))


def _forced_by(settings: Settings) -> str:
    if os.environ.get("REWARM_DIR"):
        return "REWARM_DIR in the environment"
    return "--dir at the start" if "cache_dir" in settings.model_fields_set else ""
