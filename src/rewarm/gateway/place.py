"""Where the cache folder is, when it was chosen on the page: remembered in the data folder for the next start.

Ranks below what an argument or the environment says, since whoever starts the gateway so means it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from rewarm.gateway.settings import Settings

log = logging.getLogger(__name__)

FILE = "gateway.json"


class _State(msgspec.Struct, omit_defaults=True):
    """`gateway.json`.

    Attributes:
        cache_dir: the folder that was chosen on the page.
    """

    cache_dir: str | None = None


class Place:
    """The place of the cache folder of one gateway.

    Attributes:
        forced_by: what names the folder at the start and so stands above a choice on the page; "" when nothing does.
    """

    def __init__(self, settings: Settings) -> None:
        self._file = settings.data_dir / FILE
        self.forced_by = _forced_by(settings)

    def chosen(self) -> Path | None:
        """The folder that was chosen, if one was and nothing stands above it."""
        if self.forced_by:
            return None
        try:
            state = msgspec.json.decode(self._file.read_bytes(), type=_State)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("%s cannot be read, so the cache folder is the usual one: %s", self._file, error)
            return None
        return Path(state.cache_dir) if state.cache_dir else None

    def remember(self, folder: Path) -> None:
        """Choose `folder` for the next start.

        Raises:
            OSError: it cannot be written; what was chosen before still holds.
        """
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self._file.with_name(f".{FILE}.part")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(_State(str(folder)))) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._file)


def with_chosen_place(settings: Settings) -> Settings:
    """`settings` with the folder that was chosen on the page, if nothing stands above it."""
    chosen = Place(settings).chosen()
    return settings if chosen is None else settings.model_copy(update={"cache_dir": chosen})


def _forced_by(settings: Settings) -> str:
    if os.environ.get("REWARM_DIR"):
        return "REWARM_DIR in the environment"
    if os.environ.get("REWARM_CACHE_DIR"):
        return "REWARM_CACHE_DIR in the environment"
    return "--dir at the start" if "cache_dir" in settings.model_fields_set else ""
