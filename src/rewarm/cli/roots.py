"""Opening a cache folder from the command line, and which model or entry in it is meant.

A look at a mistyped path must make no cache there.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from rewarm.cache.config_file import expanded
from rewarm.cache.description import model_name
from rewarm.cache.prefix_cache import PrefixCache, default_root, open_cache
from rewarm.errors import RootError
from rewarm.store.entries import Entry

Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="DIR",
        help="The cache folder; REWARM_DIR, dir in the configuration file, or one in your user cache, by default.",
    ),
]
"""The option that names the cache folder."""

SHORT_FINGERPRINT = 12
"""Hex characters of a fingerprint that a table shows; options take them."""

SHORT_ID = 8
MIN_ID = 4
"""Hex characters of an entry's id that a table shows, and that a name must have at least."""

_NAMESPACE = re.compile(r"[0-9a-f]{64}")


def folder_meant(folder: Path | None) -> Path:
    """The cache folder: the one that is given, else the usual one."""
    return expanded(folder) if folder is not None else default_root()


@contextlib.contextmanager
def existing(folder: Path | None) -> Iterator[tuple[Path, PrefixCache | None]]:
    """The root that is meant and its open cache, None when there is none; closed at the end.

    Raises:
        RootError: the folder cannot be used, or is a cache that has lost its settings.
    """
    root = folder_meant(folder)
    if not is_there(root):
        yield root, None
        return
    with open_cache(root) as cache:
        yield root, cache


@contextlib.contextmanager
def opened(folder: Path | None) -> Iterator[PrefixCache]:
    """The open cache that is meant; closed at the end.

    Raises:
        RootError: as `existing`.
        typer.BadParameter: there is none.
    """
    with existing(folder) as (root, cache):
        if cache is None:
            raise typer.BadParameter(f"There is no cache in {root}.")
        yield cache


def is_there(root: Path) -> bool:
    """Whether `root` is a cache folder.

    Raises:
        RootError: it cannot be read, or is one whose `store.json` is gone.
    """
    try:
        if (root / "store.json").exists():
            return True
        left = remains(root)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RootError(f"The cache folder {root} cannot be read: {why}.") from None
    if left:
        raise RootError(
            f"{root} is a cache folder whose store.json, which holds its limits and pins, is gone ({', '.join(left)} "
            "are there). Nothing was changed. Put the file back, or let `rewarm repair` make one with default limits."
        )
    return False


def remains(root: Path) -> list[str]:
    """What in `root` only a cache folder has, by name: at most three."""
    if not root.is_dir():
        return []
    mine = (each.name for each in root.iterdir() if each.name == "index.db" or _NAMESPACE.fullmatch(each.name))
    return sorted(mine)[:3]


def model_names(cache: PrefixCache) -> dict[str, str]:
    """The display name of each namespace that has one, by fingerprint (64 hex characters)."""
    names = {fingerprint.hex(): model_name(said) for fingerprint, said in cache.store.descriptions()}
    return {fingerprint: name for fingerprint, name in names.items() if name}


def chosen(cache: PrefixCache | None, prefix: str, nothing_done: str) -> str:
    """The whole fingerprint (64 hex characters) that `prefix` begins.

    Args:
        cache: whose models are meant.
        prefix: the first characters; none where there is only one model.
        nothing_done: said when it is not clear which is meant.

    Raises:
        typer.BadParameter: none, or several, begin so.
    """
    known = [fingerprint.hex() for fingerprint, _, _ in cache.store.namespaces()] if cache else []
    found = [fingerprint for fingerprint in known if fingerprint.startswith(prefix.lower())]
    if len(found) == 1:
        return found[0]
    if found:
        short = ", ".join(fingerprint[: max(SHORT_FINGERPRINT, len(prefix) + 4)] for fingerprint in found)
        raise typer.BadParameter(f"{prefix!r} begins several fingerprints: {short}. {nothing_done}")
    raise typer.BadParameter(f"No model stored here has a fingerprint that begins with {prefix!r}. {nothing_done}")


def entry_named(entries: Sequence[Entry], name: str, nothing_done: str) -> Entry:
    """The entry whose label is `name`, or whose id `name` begins.

    Args:
        entries: those that can be meant.
        name: a label, or the first characters of an id: four at least.
        nothing_done: said when it is not clear which is meant.

    Raises:
        typer.BadParameter: none is meant, or several are.
    """
    found = [each for each in entries if each.label == name]
    if not found and len(name) >= MIN_ID:
        found = [each for each in entries if each.id.startswith(name.lower())]
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(each.id[: max(SHORT_ID, len(name) + 4)] for each in found[:8])
        raise typer.BadParameter(f"{name!r} names several entries: {several}. {nothing_done}")
    raise typer.BadParameter(
        f"No entry has the label {name!r}, or an id that begins so ({MIN_ID} characters at least); `rewarm ls` shows "
        f"them. {nothing_done}"
    )
