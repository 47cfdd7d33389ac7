"""`rewarm demo`: shows, with a real model, what a restart costs with the cache and without it."""

from __future__ import annotations

import enum
import json
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rewarm.cli import extras, story
from rewarm.cli.story import StartWorker, Story
from rewarm.cli.worker import Reply
from rewarm.errors import EngineError
from rewarm.units import format_seconds


class Engine(enum.StrEnum):
    """Engines that the demo runs on."""

    MLX = "mlx"


def demo(
    engine: Annotated[Engine, typer.Option(help="The engine to show it with.")] = Engine.MLX,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, alone.")] = False,
) -> None:
    """Show what a restart costs, with the cache and without it.

    Tells a conversation's story four ways: cold, restored after a restart, uninterrupted, and with the
    cache off. Uses the bundled model and temporary stores; nothing of yours is touched. Takes a minute or a few.
    """
    console = Console(stderr=True, highlight=False)
    _end_on_signals()
    start = ENGINES[engine](console)
    told = story.tell(start, lambda what: console.print(f"demo: {what}"))
    if as_json:
        typer.echo(json.dumps(as_object(told), indent=2, ensure_ascii=False))
    else:
        _show(told)
    if not told.identical:
        raise EngineError(
            "The restored reply differs from the uninterrupted one, which must not be: please report it, with "
            "the output of --json."
        )


def as_object(told: Story) -> dict[str, Any]:
    """The story as it is printed by `--json`."""
    return {
        **asdict(told),
        "speedup": told.speedup,
        "identical": told.identical,
    }


def _mlx(console: Console) -> StartWorker:
    told = -1

    def progress(part: float, what: str) -> None:
        nonlocal told
        tenth = int(part * 10)
        if tenth > told:
            console.print(f"demo: making the bundled model, once: {part:4.0%} {what}")
        told = max(told, tenth)

    model = extras.bundled_model(progress)

    def start(folder: Path | None) -> Sequence[str]:
        command = [sys.executable, "-m", "rewarm", "mlx-lm", "--model", str(model)]
        return [*command, "--rewarm-off"] if folder is None else [*command, "--rewarm-dir", str(folder)]

    return start


ENGINES: dict[Engine, Callable[[Console], StartWorker]] = {Engine.MLX: _mlx}


def _show(told: Story) -> None:
    table = Table(title="One conversation, the second turn after a restart", title_justify="left")
    for heading in ("run", "time to first token", "prompt tokens", "cached tokens"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    table.add_column("reply")
    for name in ("cold", "restored", "uninterrupted", "reference"):
        reply: Reply = getattr(told, name)
        table.add_row(
            name,
            format_seconds(reply.ttft_s),
            str(reply.prompt_tokens),
            str(reply.cached_tokens),
            reply.text.strip(),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"After the restart the first token came {told.speedup:.1f} times sooner than with the cache off "
        f"({format_seconds(told.restored.ttft_s)} instead of {format_seconds(told.reference.ttft_s)})."
    )
    if told.identical:
        console.print("The reply is the same as without the restart.")


def _end_on_signals() -> None:
    """Turn the signals that end a process silently into an exit that ends the workers first."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), leave)
