"""What every command prints with: JSON, tables, and text that came from elsewhere. Knows terminals and no cache."""

from __future__ import annotations

import codecs
import contextlib
import datetime as dt
import io
import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rewarm.units import format_seconds

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, alone.")]
"""The option of every command that reads."""

PIPE_COLUMNS = 200
_DAYS_2 = 2 * 86_400


def print_json(said: object) -> None:
    """Print a JSON value; characters that standard output cannot show are escaped, as JSON escapes them."""
    typer.echo(json.dumps(said, indent=2, ensure_ascii=not _is_utf8(sys.stdout)))


def be_safe() -> None:
    """Let the streams escape what they cannot show, so that no name in a cache makes a command fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):  # closed
                stream.reconfigure(errors="backslashreplace")


def plain(text: str) -> str:
    """`text` from elsewhere in one line: what would steer the terminal is shown as an escape."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def cell(text: str) -> Text:
    """`text` from elsewhere as a table's cell, in which no brackets mean anything."""
    return Text(plain(text), overflow="fold")


def console() -> Console:
    """Where tables go; into a file or a pipe they are as wide as they need to be to be searched."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=PIPE_COLUMNS)


def table(*headings: str, numbers: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns named in `numbers` are set right."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        is_number = heading in numbers
        made.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return made


def ago(then_s: float, now_s: float) -> str:
    """When that was, as one says it: `3 min 20 s ago`, or the day when it is two days ago or more."""
    if now_s - then_s >= _DAYS_2:
        with contextlib.suppress(ValueError, OverflowError, OSError):
            return dt.datetime.fromtimestamp(then_s).astimezone().date().isoformat()
    return f"{format_seconds(max(0.0, now_s - then_s))} ago"


def _is_utf8(stream: Any) -> bool:
    with contextlib.suppress(LookupError, TypeError):
        return codecs.lookup(stream.encoding).name == "utf-8"
    return False
