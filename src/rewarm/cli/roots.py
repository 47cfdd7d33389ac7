"""Opening a cache folder from the command line: one that is there, and none that is not.

A look at a mistyped path must make no cache there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from rewarm.cache.description import model_name
from rewarm.cache.prefix_cache import PrefixCache, default_root, open_cache
from rewarm.errors import RootError

Folder = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="The cache folder; REWARM_DIR, or one in your user cache, by default."),
]
"""The option that names the cache folder."""


SHORT_FINGERPRINT = 12
"""Hex characters of a fingerprint that a table shows; options take them."""


@contextlib.contextmanager
def existing(folder: Path | None) -> Iterator[tuple[Path, PrefixCache | None]]:
    """The root that is meant and its open cache, None when there is none; closed at the end.

    Raises:
        RootError: the folder cannot be used.
    """
    root = folder.expanduser() if folder is not None else default_root()
    try:
        is_there = (root / "store.json").exists()
    except OSError as error:
        raise RootError(f"The cache folder {root} cannot be read: {error.strerror}.") from None
    if not is_there:
        yield root, None
        return
    with open_cache(root) as cache:
        yield root, cache


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
