"""`rewarm models`: the models that are found on this computer, and what the cache keeps of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from rewarm.cache.prefix_cache import PrefixCache
from rewarm.cli import extras
from rewarm.cli.output import AsJson, cell, console, plain, print_json, table
from rewarm.cli.roots import SHORT_FINGERPRINT, Folder, existing, model_names
from rewarm.units import format_bytes


def models(folder: Folder = None, as_json: AsJson = False) -> None:
    """List the models that are found, and what the cache keeps of each."""
    found = extras.found_models()
    with existing(folder) as (root, cache):
        kept = _kept(cache) if cache is not None else []
    # A namespace bears its model's name, as far as it says whose it is; one model may have several.
    for model in found or ():
        model["kept"] = [each for each in kept if each["model"] in (model["name"], model["file_name"])]
    known = [each["fingerprint"] for model in found or () for each in model["kept"]]
    others = [each for each in kept if each["fingerprint"] not in known]
    if as_json:
        shown = [{name: value for name, value in model.items() if name != "file_name"} for model in found or ()]
        print_json({"folder": str(root), "models": None if found is None else shown, "others": others})
    else:
        _tell(found, others, root)


def _kept(cache: PrefixCache) -> list[dict[str, Any]]:
    names = model_names(cache)
    return [
        {"fingerprint": each.hex(), "model": names.get(each.hex()), "n_files": n_files, "nbytes": nbytes}
        for each, n_files, nbytes in cache.store.namespaces()
    ]


def _tell(found: list[dict[str, Any]] | None, others: list[dict[str, Any]], root: Path) -> None:
    rows = table("model", "found", "engine", "weights", "in cache", "fingerprint", numbers=("weights", "in cache"))
    for model in found or ():
        first, *more = model["kept"] or [None]
        why = f" ({model['why_not']})" if model["why_not"] else ""
        size = format_bytes(model["nbytes"]) if model["nbytes"] else ""
        rows.add_row(cell(model["name"]), cell(model["source"]), cell(model["engine"] + why), size, *_cells(first))
        for each in more:
            rows.add_row("", "", "", "", *_cells(each))
    for each in others:
        rows.add_row(cell(each["model"] or "unnamed"), "in the cache only", "", "", *_cells(each))
    if rows.row_count:
        console().print(rows)
    else:
        typer.echo(f"No model is found, and none is kept in {plain(str(root))}.")
    if found is None:
        typer.echo("The gateway is not installed (pip install 'rewarm[gateway]'): models are not looked for.")


def _cells(kept: dict[str, Any] | None) -> tuple[str, str]:
    return ("", "") if kept is None else (format_bytes(kept["nbytes"]), kept["fingerprint"][:SHORT_FINGERPRINT])
