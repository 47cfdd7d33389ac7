"""`rewarm clear`: erases what is stored, of one model or of all."""

from __future__ import annotations

from typing import Annotated

import typer

from rewarm import Removal
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.cli.consent import DryRun, Yes, ask, told
from rewarm.cli.output import AsJson, plain, print_json
from rewarm.cli.roots import SHORT_FINGERPRINT, Folder, chosen, existing, model_names


def clear(
    folder: Folder = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="FINGERPRINT", help="Of this model only; `rewarm ls` shows it. Its start will do."),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Erase what the cache holds, pinned entries too."""
    with existing(folder) as (root, cache):
        # An empty text is the start of every fingerprint: it must not come to mean "all" by mistake.
        fingerprint = None if model is None else chosen(cache, model or "?", "Nothing was erased.")
        removal = Removal() if cache is None else cache.clear(fingerprint, dry_run=True)
        if cache is not None and not dry_run:
            if not yes:
                ask(f"Erase {told(removal)} of {_whose(cache, fingerprint)} in {root}?")
            removal = cache.clear(fingerprint)
    if as_json:
        done = {"dry_run": dry_run, "fingerprint": fingerprint, "n_files": removal.n_files, "nbytes": removal.nbytes}
        print_json(done)
    elif cache is None:
        typer.echo(f"There is no cache in {root}.")
    else:
        typer.echo(f"{'Would erase' if dry_run else 'Erased'} {told(removal)} in {root}.")


def _whose(cache: PrefixCache, fingerprint: str | None) -> str:
    if fingerprint is None:
        return "all models"
    return f"{plain(model_names(cache).get(fingerprint, 'the model'))} {fingerprint[:SHORT_FINGERPRINT]}"
