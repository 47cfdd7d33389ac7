"""`rewarm forget`: erases entries, and every record that only they need."""

from __future__ import annotations

from typing import Annotated

import typer

from rewarm import Removal
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.cli.consent import DryRun, Yes, ask, told
from rewarm.cli.output import AsJson, plain, print_json
from rewarm.cli.roots import Folder, entry_named, opened
from rewarm.store.entries import Entry


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
        removal = _sum(cache, found, dry_run=True)
        if not dry_run:
            if not yes:
                names = ", ".join(plain(each.label or each.id) for each in found)
                ask(f"Erase {told(removal)} of {names} in {cache.root}?")
            removal = _sum(cache, found, dry_run=False)
    if as_json:
        ids = [each.id for each in found]
        print_json({"dry_run": dry_run, "entries": ids, "n_files": removal.n_files, "nbytes": removal.nbytes})
    else:
        verb, least = ("Would erase", " at least" if len(found) > 1 else "") if dry_run else ("Erased", "")
        typer.echo(f"{verb}{least} {told(removal)} of {len(found)} {'entry' if len(found) == 1 else 'entries'}.")


def _sum(cache: PrefixCache, entries: list[Entry], *, dry_run: bool) -> Removal:
    """What goes; of a dry run without what several of them share, which goes too."""
    total = Removal()
    for each in entries:
        removal = cache.forget(each, dry_run=dry_run)
        total = Removal(total.n_files + removal.n_files, total.nbytes + removal.nbytes)
    return total
