"""`rewarm stats`: what a cache folder holds and what it has done, in numbers."""

from __future__ import annotations

from typing import Any

import msgspec
import typer

from rewarm.cli.output import AsJson, plain, print_json
from rewarm.cli.roots import Folder, existing, model_names
from rewarm.units import format_bytes, format_seconds


def stats(folder: Folder = None, as_json: AsJson = False) -> None:
    """Show what the cache holds, and what it has done so far."""
    said: dict[str, Any] = {}
    with existing(folder) as (root, cache):
        if cache is not None:
            names = model_names(cache)
            said = {
                "folder": str(root),
                "limits": msgspec.to_builtins(cache.settings().limits),
                "counters": cache.stats(),
                "n_entries": len(cache.entries()),
                "models": [
                    {"fingerprint": each.hex(), "model": names.get(each.hex()), "n_files": n_files, "nbytes": nbytes}
                    for each, n_files, nbytes in cache.store.namespaces()
                ],
            }
    if as_json:
        print_json(said or {"folder": str(root), "limits": None, "counters": {}, "n_entries": 0, "models": []})
    elif not said:
        typer.echo(f"There is no cache in {root}.")
    else:
        _tell(said)


def _tell(said: dict[str, Any]) -> None:
    limits, counters = said["limits"], said["counters"]
    lookups = counters["hits"] + sum(counters["misses"].values())
    rate = f" ({counters['hits'] / lookups:.0%})" if lookups else ""
    lines = {
        "folder": plain(said["folder"]),
        "bytes": f"{format_bytes(counters['bytes_used'])} of {format_bytes(limits['max_bytes'])}",
        "files": f"{counters['files_used']:,} of {limits['max_files']:,}",
        "left free": f"{format_bytes(limits['min_free_bytes'])} on the disk",
        "entries": f"{said['n_entries']:,}",
        "hits": f"{counters['hits']:,} of {lookups:,}{rate}",
        "misses": _by_reason(counters["misses"]),
        "restored": f"{counters['tokens_restored']:,} tokens, {format_bytes(counters['bytes_read'])} read",
        "time saved": format_seconds(counters["saved_ms"] / 1000),
        "written": f"{format_bytes(counters['bytes_written'])}, "
        f"of which {format_bytes(counters['bytes_written_today'])} today",
        "not saved": _by_reason(counters["dropped_saves"]),
        "evicted": f"{counters['evicted_files']:,} files",
        "expired": f"{counters['expired_entries']:,} entries",
        "set aside": f"{counters['quarantined_files']:,} damaged files",
    }
    for name, value in lines.items():
        typer.echo(f"{name:<12}{value}")
    for each in said["models"]:
        name = plain(each["model"] or "unnamed")
        typer.echo(
            f"model       {name} {each['fingerprint'][:12]}: {each['n_files']:,} files, {format_bytes(each['nbytes'])}"
        )


def _by_reason(counts: dict[str, int]) -> str:
    return ", ".join(f"{n:,} {reason}" for reason, n in sorted(counts.items(), key=lambda one: -one[1])) or "none"
