"""`rewarm clear`: erases what is stored, of one model or of all."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from rewarm import Removal
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.cli.ls import SHORT_FINGERPRINT
from rewarm.cli.roots import Folder, existing, model_names
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
        fingerprint = _chosen(cache, model)
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


def _chosen(cache: PrefixCache | None, prefix: str | None) -> str | None:
    """The whole fingerprint that `prefix` begins."""
    if prefix is None:
        return None
    known = [fingerprint.hex() for fingerprint, _, _ in cache.store.namespaces()] if cache else []
    found = [fingerprint for fingerprint in known if prefix and fingerprint.startswith(prefix.lower())]
    if len(found) == 1:
        return found[0]
    if found:
        short = ", ".join(fingerprint[: max(SHORT_FINGERPRINT, len(prefix) + 4)] for fingerprint in found)
        raise typer.BadParameter(f"{prefix} begins several fingerprints: {short}. Nothing was erased.")
    raise typer.BadParameter(f"No model stored here has a fingerprint that begins with {prefix!r}. Nothing was erased.")


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
