"""`rewarm pin` and `rewarm unpin`: which entries are spared when room is made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rewarm.cli.output import AsJson, plain, print_json
from rewarm.cli.roots import Folder, entry_named, opened
from rewarm.errors import RootError

Entries = Annotated[list[str], typer.Argument(help="Entries: labels, or the first characters of ids.")]


def pin(entry: Entries, folder: Folder = None, as_json: AsJson = False) -> None:
    """Spare entries, and all that they need, when room is made."""
    _set(entry, folder, as_json, pinned=True)


def unpin(entry: Entries, folder: Folder = None, as_json: AsJson = False) -> None:
    """Spare entries no more."""
    _set(entry, folder, as_json, pinned=False)


def _set(names: list[str], folder: Path | None, as_json: bool, *, pinned: bool) -> None:
    with opened(folder) as cache:
        known = cache.entries()
        # All names are looked up before anything is changed.
        found = {each.id: each for each in (entry_named(known, name, "Nothing was changed.") for name in names)}
        for each in found.values():
            if not (cache.pin(each) if pinned else cache.unpin(each)):
                raise RootError(f"The entry {each.id} went away meanwhile, evicted or forgotten.")
    if as_json:
        print_json({"pinned": pinned, "entries": list(found)})
        return
    for each in found.values():
        typer.echo(f"{'Pinned' if pinned else 'Unpinned'} {each.id} {plain(each.label or f'({each.boundary})')}.")
