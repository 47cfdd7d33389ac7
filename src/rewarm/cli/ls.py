"""`rewarm ls`: the entries of a cache folder, latest match first."""

from __future__ import annotations

import datetime as dt
import json
import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rewarm.cache.prefix_cache import PrefixCache
from rewarm.cli.roots import SHORT_FINGERPRINT, Folder, existing, model_names
from rewarm.units import format_bytes, format_seconds

_DAYS_2 = 2 * 86_400


def ls(
    folder: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list, alone.")] = False,
) -> None:
    """List what the cache holds."""
    with existing(folder) as (root, cache):
        if as_json:
            typer.echo(json.dumps(_rows(cache) if cache else [], indent=2, ensure_ascii=False))
        elif cache is None:
            typer.echo(f"There is no cache in {root}.")
        else:
            _show(cache)


def _rows(cache: PrefixCache) -> list[dict[str, object]]:
    names = model_names(cache)
    return [{**asdict(entry), "model": names.get(entry.fingerprint)} for entry in cache.entries()]


def _show(cache: PrefixCache) -> None:
    console, names, now_s = Console(highlight=False), model_names(cache), time.time()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("entry", overflow="fold")
    for heading in ("tokens", "size", "own", "last match"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("model", overflow="fold")
    table.add_column("")
    for entry in cache.entries():
        table.add_row(
            entry.label or f"({entry.boundary})",
            f"{entry.n_tokens:,}",
            format_bytes(entry.nbytes),
            format_bytes(entry.own_nbytes),
            _ago(entry.matched_s, now_s),
            f"{names.get(entry.fingerprint, 'unnamed')} {entry.fingerprint[:SHORT_FINGERPRINT]}",
            "pinned" if entry.pinned else "",
        )
    if table.row_count:
        console.print(table)
    used, limits = cache.store.usage(), cache.settings().limits
    limit = "" if limits.max_bytes is None else f" of {format_bytes(limits.max_bytes)}"
    console.print(
        f"{table.row_count} entries; {format_bytes(used['bytes_used'])}{limit} in {used['files_used']} files, "
        f"in {cache.root}",
        soft_wrap=True,
    )


def _ago(then_s: float, now_s: float) -> str:
    """When that was, as one says it: `3 min 20 s ago`, or the day when it is two days ago or more."""
    if now_s - then_s >= _DAYS_2:
        return dt.datetime.fromtimestamp(then_s).astimezone().date().isoformat()
    return f"{format_seconds(max(0.0, now_s - then_s))} ago"
