"""`rewarm show`: one entry, with every record that it needs."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from rewarm.cli.output import AsJson, ago, plain, print_json
from rewarm.cli.roots import Folder, entry_named, model_names, opened
from rewarm.units import format_bytes

SHOWN_POINTS = 12


def show(
    entry: Annotated[str, typer.Argument(help="An entry: its label, or the first characters of its id.")],
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Show an entry: what it needs, what only it needs, where it can be restored."""
    with opened(folder) as cache:
        found = entry_named(cache.entries(), entry, "Nothing was shown.")
        records = [
            {
                "file": row.name.file_name,
                "kind": "point" if row.name.is_point else "block",
                "n_tokens": row.n,
                "nbytes": row.nbytes,
            }
            for row in cache.store.path(found.id)
        ]
        ttl_s = cache.settings().ttls.get(found.id)
        said = {**asdict(found), "model": model_names(cache).get(found.fingerprint), "ttl_s": ttl_s}
    said["records"] = records
    if as_json:
        print_json(said)
    else:
        _tell(said)


def _tell(said: dict[str, Any]) -> None:
    now_s = time.time()
    points = [each["n_tokens"] for each in said["records"] if each["kind"] == "point"]
    n_blocks = len(said["records"]) - len(points)
    more = f", and {len(points) - SHOWN_POINTS} before" if len(points) > SHOWN_POINTS else ""
    lines = {
        "entry": said["id"],
        "label": plain(said["label"]) if said["label"] else "none",
        "model": f"{plain(said['model'] or 'unnamed')} {said['fingerprint']}",
        "tokens": f"{said['n_tokens']:,}, up to the end of {said['boundary']}",
        "size": f"{format_bytes(said['nbytes'])}, of which only it needs {format_bytes(said['own_nbytes'])}",
        "records": f"{n_blocks} blocks, {len(points)} points",
        "points": (", ".join(f"{n:,}" for n in points[-SHOWN_POINTS:]) or "none") + more,
        "branches off": f"{said['parent']} at {said['fork_tokens']:,} tokens" if said["parent"] else "nothing",
        "pinned": "yes" if said["pinned"] else "no",
        "kept": "as the rules say" if said["ttl_s"] is None else f"{said['ttl_s']:.0f} s without a match",
        "made": ago(said["created_s"], now_s),
        "last match": f"{ago(said['matched_s'], now_s)}, {said['hits']} hits",
    }
    for name, value in lines.items():
        typer.echo(f"{name:<13}{value}")
