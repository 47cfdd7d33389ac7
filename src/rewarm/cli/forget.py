"""`rewarm forget`: erases entries, and every record that only they need."""

from __future__ import annotations

from typing import Annotated

import typer

from rewarm.cli.consent import DryRun, Yes, ask, told
from rewarm.cli.output import AsJson, plain, print_json
from rewarm.cli.roots import Folder, entry_named, opened


def forget(
    entry: Annotated[list[str], typer.Argument(help="Entries: labels, or the first characters of ids.")],
    folder: Folder = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Erase entries and every record that only they need, pinned ones too."""
    with opened(folder) as cache:
        known = cache.entries()
        named = (entry_named(known, name, "Nothing was erased.") for name in entry)
        found = list({each.id: each for each in named}.values())
        removal = cache.forget(*found, dry_run=True)
        if not dry_run:
            if not yes:
                names = ", ".join(plain(each.label or each.id) for each in found)
                ask(f"Erase {told(removal)} of {names} in {cache.root}?")
            removal = cache.forget(*found)
    if as_json:
        ids = [each.id for each in found]
        print_json({"dry_run": dry_run, "entries": ids, "n_files": removal.n_files, "nbytes": removal.nbytes})
    else:
        verb = "Would erase" if dry_run else "Erased"
        typer.echo(f"{verb} {told(removal)} of {len(found)} {'entry' if len(found) == 1 else 'entries'}.")
