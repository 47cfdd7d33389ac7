"""`rewarm ls`: the entries of a cache folder, latest match first."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from rewarm.cache.prefix_cache import PrefixCache
from rewarm.cli.output import ago, cell, console, plain, print_json, table
from rewarm.cli.roots import SHORT_FINGERPRINT, SHORT_ID, Folder, existing, model_names
from rewarm.units import format_bytes


def ls(
    folder: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list, alone.")] = False,
) -> None:
    """List what the cache holds."""
    with existing(folder) as (root, cache):
        if as_json:
            print_json(_rows(cache) if cache else [])
        elif cache is None:
            typer.echo(f"There is no cache in {root}.")
        else:
            _show(cache)


def _rows(cache: PrefixCache) -> list[dict[str, object]]:
    names = model_names(cache)
    return [{**asdict(entry), "model": names.get(entry.fingerprint)} for entry in cache.entries()]


def _show(cache: PrefixCache) -> None:
    names, now_s = model_names(cache), time.time()
    numbers = ("tokens", "size", "own", "last match")
    rows = table("id", "entry", *numbers, "model", "", numbers=numbers)
    for entry in cache.entries():
        rows.add_row(
            entry.id[:SHORT_ID],
            cell(entry.label or f"({entry.boundary})"),
            f"{entry.n_tokens:,}",
            format_bytes(entry.nbytes),
            format_bytes(entry.own_nbytes),
            ago(entry.matched_s, now_s),
            cell(f"{names.get(entry.fingerprint, 'unnamed')} {entry.fingerprint[:SHORT_FINGERPRINT]}"),
            "pinned" if entry.pinned else "",
        )
    if rows.row_count:
        console().print(rows)
    used, limits = cache.store.usage(), cache.settings().limits
    limit = "" if limits.max_bytes is None else f" of {format_bytes(limits.max_bytes)}"
    console().print(
        f"{rows.row_count} entries; {format_bytes(used['bytes_used'])}{limit} in {used['files_used']} files, "
        f"in {plain(str(cache.root))}",
        soft_wrap=True,
        markup=False,
    )
