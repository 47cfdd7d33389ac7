"""`store.json`: format, block size, limits, policy, pins. The truth about a root, replaced as a whole.

Knows values and their bounds, not when they are read or who may change them: the facade reads and
replaces the file inside a transaction of the index only.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import msgspec

from rewarm.errors import SettingsError
from rewarm.units import format_bytes

FORMAT = 1
GIB = 2**30
DEFAULT_MAX_FILES = 100_000


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much a root may hold. A field left None stays as it is; in a new root it takes its default.

    Attributes:
        max_bytes: of records, temporaries, quarantine, index and log, each rounded up to 4 KiB.
        max_files: of records, temporaries and quarantine.
        min_free_bytes: that must stay free on the disk.
    """

    max_bytes: int | None = None
    max_files: int | None = None
    min_free_bytes: int | None = None

    def over(self, other: Limits) -> Limits:
        """These limits, and `other`'s where these say nothing."""
        return Limits(
            max_bytes=other.max_bytes if self.max_bytes is None else self.max_bytes,
            max_files=other.max_files if self.max_files is None else self.max_files,
            min_free_bytes=other.min_free_bytes if self.min_free_bytes is None else self.min_free_bytes,
        )

    def check(self) -> None:
        """Refuse values that make no sense.

        Raises:
            ValueError: a limit is no integer, negative, or 2**63 and more.
        """
        for name in ("max_bytes", "max_files", "min_free_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63):
                raise ValueError(f"{name} must be a whole number from 0 to 2**63 - 1, not {value!r}")


def format_limits(limits: Limits) -> str:
    """`limits` for a person: `"up to 20.0 GiB in 100,000 files, 5.0 GiB left free on the disk"`."""
    return (
        f"up to {format_bytes(limits.max_bytes or 0)} in {limits.max_files or 0:,} files, "
        f"{format_bytes(limits.min_free_bytes or 0)} left free on the disk"
    )


def default_limits(free_bytes: int, total_bytes: int) -> Limits:
    """The limits of a new root on a disk with `free_bytes` of `total_bytes` free."""
    return Limits(
        max_bytes=min(64 * GIB, free_bytes // 5),
        max_files=DEFAULT_MAX_FILES,
        min_free_bytes=max(5 * GIB, total_bytes // 20),
    )


_NAME = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What `store.json` holds.

    Attributes:
        format: of the root; a later one is refused.
        block_tokens: tokens per block, fixed when the root is made.
        limits: every field set.
        policy: the switchable rules, by name; read by the cache, kept as it is here.
        pins: ids of pinned entries, hex.
        ttls: seconds that an entry (by id) or the entries of a namespace (by fingerprint) live without a match.
    """

    format: int
    block_tokens: int
    limits: Limits
    policy: dict[str, Any] = {}
    pins: tuple[str, ...] = ()
    ttls: dict[str, float] = {}

    def encode(self) -> bytes:
        """The file's bytes."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @classmethod
    def decode(cls, data: bytes, where: str | os.PathLike[str]) -> Settings:
        """Read the file's bytes; `where` is named in errors.

        Raises:
            SettingsError: no such settings, values out of range, or a later format.
        """
        try:
            settings = msgspec.json.decode(data, type=cls)
            settings.limits.check()
            _check_names(settings)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise SettingsError(
                f"{where} cannot be read ({error}). The records beside it are untouched. Mend the file, or move "
                "it away: a new one is then made with default limits."
            ) from None
        if settings.format > FORMAT:
            raise SettingsError(
                f"{where} was written by a later version of rewarm (format {settings.format}). Nothing was "
                "changed. Use that version, or another folder."
            )
        limits = settings.limits
        if settings.block_tokens < 1 or None in (limits.max_bytes, limits.max_files, limits.min_free_bytes):
            raise SettingsError(f"{where} lacks a limit or has an impossible block size. Nothing was changed.")
        return settings


def _check_names(settings: Settings) -> None:
    """Refuse pins and times to live that name nothing, or make no sense.

    Raises:
        ValueError: one does.
    """
    for name in (*settings.pins, *settings.ttls):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is neither an entry's id nor a fingerprint")
    for ttl_s in settings.ttls.values():
        if not 0 <= ttl_s < math.inf:
            raise ValueError(f"a time to live is 0 seconds or more, not {ttl_s}")
