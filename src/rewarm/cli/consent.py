"""Asking before something is erased. Where nobody can be asked, nothing is."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rewarm import Removal
from rewarm.units import format_bytes

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be erased.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def ask(question: str) -> None:
    """Ask on the terminal whether to go on; ends the command when not.

    Raises:
        typer.BadParameter: there is nobody to ask.
        typer.Abort: the answer was no.
    """
    if not is_somebody_there():
        raise typer.BadParameter(
            "Nobody can be asked here: say --yes to erase, or --dry-run to look. Nothing was erased."
        )
    if not typer.confirm(question, err=True):
        raise typer.Abort


def is_somebody_there() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def told(removal: Removal) -> str:
    """A removal for a person."""
    return f"{removal.n_files} files ({format_bytes(removal.nbytes)})"
