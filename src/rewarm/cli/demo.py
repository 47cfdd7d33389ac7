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
    LLAMA = "llama"


def demo(
    engine: Annotated[
        Engine | None, typer.Option(help="The engine to show it with; by default llama off Apple silicon, else mlx.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A model of your own: a GGUF file for llama, a folder for mlx."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, alone.")] = False,
) -> None:
    """Show what a restart costs, with the cache and without it.

    Tells a conversation's story four ways: cold, restored after a restart, uninterrupted, and with the
    cache off. Uses the bundled model (or yours) and temporary stores; nothing of yours is touched. Takes a
    minute or a few.
    """
    console = Console(stderr=True, highlight=False)
    _end_on_signals()
    make, system = ENGINES[engine or _fitting(model)]
    start = make(console, model)
    told = story.tell(start, lambda what: console.print(f"demo: {what}"), system)
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


def _mlx(console: Console, own: Path | None) -> StartWorker:
    told = -1

    def progress(part: float, what: str) -> None:
        nonlocal told
        tenth = int(part * 10)
        if tenth > told:
            console.print(f"demo: making the bundled model, once: {part:4.0%} {what}")
        told = max(told, tenth)

    return _starting("mlx-lm", own or extras.bundled_model(progress))


def _llama(_console: Console, own: Path | None) -> StartWorker:
    model = own or extras.bundled_gguf()
    flags = extras.template_flags(model)
    return _starting("llama-server", model, "--ctx-size", "4096", "--parallel", "1", *flags)


def _fitting(own: Path | None) -> Engine:
    """The engine for a model of the user's, or for the bundled one on this machine."""
    if own is not None:
        return Engine.LLAMA if own.suffix.lower() == ".gguf" else Engine.MLX
    return Engine.LLAMA if extras.prefers_llama() else Engine.MLX


def _starting(command: str, model: Path, *flags: str) -> StartWorker:
    def start(folder: Path | None) -> Sequence[str]:
        words = [sys.executable, "-m", "rewarm", command, "--model", str(model), *flags]
        return [*words, "--rewarm-off"] if folder is None else [*words, "--rewarm-dir", str(folder)]

    return start


ENGINES: dict[Engine, tuple[Callable[[Console, Path | None], StartWorker], str]] = {
    Engine.MLX: (_mlx, story.SYSTEM),
    Engine.LLAMA: (_llama, story.LONG_SYSTEM),
}
"""Of each engine how its workers are started, and the system prompt of its story."""


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
