"""`rewarm clear`: erases what is stored, of one model or of all."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from rewarm import Removal
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.cli.roots import SHORT_FINGERPRINT, Folder, chosen, existing, model_names
from rewarm.units import format_bytes


def clear(
    folder: Folder = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="FINGERPRINT", help="Of this model only; `rewarm ls` shows it. Its start will do."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be erased.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, alone.")] = False,
) -> None:
    """Erase what the cache holds, pinned entries too."""
    with existing(folder) as (root, cache):
        # An empty text is the start of every fingerprint: it must not come to mean "all" by mistake.
        fingerprint = None if model is None else chosen(cache, model or "?", "Nothing was erased.")
        removal = Removal() if cache is None else cache.clear(fingerprint, dry_run=True)
        if cache is not None and not dry_run:
            if not yes:
                _ask(f"Erase {_what(removal)} of {_whose(cache, fingerprint)} in {root}?")
            removal = cache.clear(fingerprint)
    if as_json:
        done = {"dry_run": dry_run, "fingerprint": fingerprint, "n_files": removal.n_files, "nbytes": removal.nbytes}
        typer.echo(json.dumps(done))
    elif cache is None:
        typer.echo(f"There is no cache in {root}.")
    else:
        typer.echo(f"{'Would erase' if dry_run else 'Erased'} {_what(removal)} in {root}.")


def _ask(question: str) -> None:
    if not _is_somebody_there():
        raise typer.BadParameter(
            "Nobody can be asked here: say --yes to erase, or --dry-run to look. Nothing was erased."
        )
    if not typer.confirm(question, err=True):
        raise typer.Abort


def _is_somebody_there() -> bool:
    return sys.stdin.isatty()


def _what(removal: Removal) -> str:
    return f"{removal.n_files} files ({format_bytes(removal.nbytes)})"


def _whose(cache: PrefixCache, fingerprint: str | None) -> str:
    if fingerprint is None:
        return "all models"
    return f"{model_names(cache).get(fingerprint, 'the model')} {fingerprint[:SHORT_FINGERPRINT]}"
