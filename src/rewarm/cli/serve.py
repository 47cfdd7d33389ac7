"""`rewarm serve`: opens the gateway. Knows its options; what it does is the gateway's."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from rewarm.cli import extras
from rewarm.cli.roots import Folder
from rewarm.units import parse_bytes


class BundledEngine(enum.StrEnum):
    """What can run the bundled model."""

    AUTO = "auto"
    MLX = "mlx"
    LLAMA = "llama"


def serve(
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="The address to listen at; another than a loopback one needs an API key."),
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, metavar="PORT", help="The port to listen at.")] = None,
    folder: Folder = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH", help="A model to offer beside the bundled one: a folder or a GGUF file; repeatable."
        ),
    ] = None,
    engine: Annotated[
        BundledEngine | None,
        typer.Option(help="What runs the bundled model; auto: llama.cpp off Apple silicon."),
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The most that the cache may hold, such as 20GiB.")
    ] = None,
    max_files: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The most files that the cache may have.")
    ] = None,
) -> None:
    """Open a chat page and an OpenAI-compatible API."""
    given = {
        "host": host,
        "port": port,
        "cache_dir": folder,
        "models": model or None,
        "engine": engine.value if engine else None,
        "max_bytes": None if max_bytes is None else _size(max_bytes),
        "max_files": max_files,
    }
    extras.serve_gateway({name: value for name, value in given.items() if value is not None})


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-bytes") from None
