"""`rewarm verify` and `rewarm repair`: look at every record, and build the index anew."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from rewarm.cache.prefix_cache import PrefixCache, open_cache
from rewarm.cli.output import AsJson, print_json
from rewarm.cli.roots import Folder, existing, folder_meant, remains
from rewarm.errors import RecordError, RootError
from rewarm.format.record import PRELUDE, read_header, read_prelude
from rewarm.store.check import Report
from rewarm.units import format_bytes


def verify(
    folder: Folder = None,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Move damaged records out of the way.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every record and check every byte; ends with 1 when something is wrong."""
    with existing(folder) as (root, cache):
        report = Report() if cache is None else _looked(cache, quarantine)
    if as_json:
        print_json(_as_dict(report, quarantine))
    elif cache is None:
        typer.echo(f"There is no cache in {root}.")
    else:
        _tell(report, quarantine)
    if not report.is_clean:
        raise typer.Exit(1)


def repair(folder: Folder = None, as_json: AsJson = False) -> None:
    """Build the index anew from the records; order of use and hits are lost, nothing else."""
    root = folder_meant(folder)
    made_settings = _made_settings(root)
    with existing(root) as (root, cache):
        n = 0 if cache is None else cache.repair()
    if as_json:
        print_json({"n_records": n, "made_settings": made_settings})
        return
    if made_settings:
        typer.echo(f"store.json was gone: {root} has default limits and no pins now.")
    typer.echo(f"There is no cache in {root}." if cache is None else f"The index in {root} has {n} records.")


def _made_settings(root: Path) -> bool:
    """Make a lost `store.json` anew, with the block size that the records were made with; whether it was."""
    try:
        if (root / "store.json").exists() or not remains(root):
            return False
    except OSError as error:
        raise RootError(f"The cache folder {root} cannot be read: {error.strerror}.") from None
    sizes = {n for n in map(_block_tokens, islice(root.glob("*/??/*.*"), 64)) if n}
    with open_cache(root, block_tokens=sizes.pop() if len(sizes) == 1 else 256):
        return True


def _block_tokens(path: Path) -> int:
    """The block size that a record file was made with; 0 where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(PRELUDE.size)
            prelude = read_prelude(data, path.stat().st_size)
            data += file.read(prelude.payload_at - len(data))
            return read_header(data[: prelude.payload_at], prelude).block_tokens
    except (OSError, RecordError, ValueError):
        return 0


def _looked(cache: PrefixCache, quarantine: bool) -> Report:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("Reading records", total=None)
        return cache.verify(
            lambda done, total: progress.update(bar, completed=done, total=total), quarantine=quarantine
        )


def _as_dict(report: Report, quarantined: bool) -> dict[str, object]:
    return {
        "clean": report.is_clean,
        "n_good": report.n_good,
        "n_newer": report.n_newer,
        "n_unreadable": report.n_unreadable,
        "nbytes_indexed": report.nbytes_indexed,
        "nbytes_allocated": report.nbytes_allocated,
        "damaged": [{"file": name, "why": why} for name, why in report.damaged],
        "missing": report.missing,
        "unknown": report.unknown,
        "quarantined": quarantined,
    }


def _tell(report: Report, quarantined: bool) -> None:
    typer.echo(
        f"{report.n_good} good records; {format_bytes(report.nbytes_indexed)} counted, "
        f"{format_bytes(report.nbytes_allocated)} allocated."
    )
    for name, why in report.damaged:
        typer.echo(f"damaged{' (moved to quarantine)' if quarantined else ''}: {name}: {why}")
    for name in report.missing:
        typer.echo(f"missing: {name}")
    for name in report.unknown:
        typer.echo(f"not in the index: {name}")
    if report.n_newer:
        typer.echo(f"{report.n_newer} records were written by a later version and are left alone.")
    if report.n_unreadable:
        typer.echo(f"{report.n_unreadable} files could not be read now; nothing was done to them.")
    if report.damaged and not quarantined:
        typer.echo("Damaged records are never used; --quarantine moves them out of the way.")
    if report.missing or report.unknown:
        typer.echo("`rewarm repair` makes the index agree with the disk.")
