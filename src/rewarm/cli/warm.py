"""`rewarm warm`: prefills a system prompt or a file ahead of time, so that the first who asks need not wait.

A running gateway is asked where one answers for this cache folder; else a worker process is started for it alone.
"""

from __future__ import annotations

import contextlib
import enum
import http.client
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from blake3 import blake3
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rewarm.cache.prefix_cache import open_cache
from rewarm.cli import extras
from rewarm.cli.asking import NoReply, Reply, Server
from rewarm.cli.output import AsJson, print_json
from rewarm.cli.roots import Folder, folder_meant
from rewarm.cli.worker import Worker
from rewarm.errors import EngineError, RootError
from rewarm.store.entries import Entry
from rewarm.units import format_bytes, format_seconds

SAVE_DEADLINE_S = 30.0
"""How long a save may take until its entry is seen."""

_LABEL = re.compile(r"[A-Za-z0-9._:-]{1,128}")

Ask = Callable[[str, Mapping[str, Any], Mapping[str, str], Callable[[int, int], None]], Reply]


class As(enum.StrEnum):
    """What the text is in a conversation."""

    SYSTEM = "system"
    USER = "user"
    TEXT = "text"


def warm(
    prompt: Annotated[Path, typer.Argument(help="A file with the text; - reads standard input.")],
    model: Annotated[str, typer.Option(metavar="NAME", help="A model's name, as `rewarm models` shows it, or a path.")],
    role: Annotated[
        As, typer.Option("--as", help="What the text is: a system prompt, a message, or bare.")
    ] = As.SYSTEM,
    label: Annotated[str | None, typer.Option(metavar="NAME", help="The entry's label.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Spare the entry when room is made.")] = False,
    folder: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Prefill a text with a model, so that what begins so is restored."""
    text = _text(prompt)
    label = _label(label, prompt, text)
    root = folder_meant(folder)
    console = Console(stderr=True, highlight=False)
    path, body = _request(role, text)
    server = _gateway(root, folder is not None)
    with _asking(server, model, root, console) as ask, _bar(console) as progress:
        reply = ask(path, body, {"X-Rewarm-Conversation": label}, progress)
    entry = _saved(root, label, pin)
    said = {
        "label": label,
        "entry": entry.id,
        "n_tokens": entry.n_tokens,
        "nbytes": entry.nbytes,
        "pinned": entry.pinned or pin,
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "took_s": reply.ttft_s,
        "by": "worker" if server is None else "gateway",
    }
    if as_json:
        print_json(said)
        return
    typer.echo(
        f"{reply.prompt_tokens:,} tokens are kept as {label} ({entry.id[:8]}, {format_bytes(entry.nbytes)}"
        f"{', pinned' if said['pinned'] else ''}); {reply.cached_tokens:,} of them were there already, the others took "
        f"{format_seconds(reply.ttft_s)}."
    )


def _text(prompt: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(prompt) == "-" else prompt.read_bytes()
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{prompt} cannot be read as text: {error}") from None
    if not text.strip():
        raise typer.BadParameter(f"{prompt} is empty.")
    return text


def _label(given: str | None, prompt: Path, text: str) -> str:
    if given is None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", prompt.stem).strip("-")[:40] or "text"
        return f"warm:{name}:{blake3(text.encode()).hexdigest()[:8]}"
    if not _LABEL.fullmatch(given):
        raise typer.BadParameter(f"{given!r} is no label: 1 to 128 letters, digits and any of . _ : -")
    return given


def _request(role: As, text: str) -> tuple[str, dict[str, Any]]:
    """Where the text is sent, and the body without its model. One token is generated: the least that saves."""
    body: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
    if role is As.TEXT:
        return "/v1/completions", {**body, "prompt": text}
    if role is As.USER:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "Hello"}]
    return "/v1/chat/completions", {**body, "messages": messages}


def _gateway(root: Path, is_folder_given: bool) -> Server | None:
    """The gateway that answers at the configured address for this cache folder, if one does."""
    address = extras.gateway_address()
    if address is None:
        return None
    server = Server(*address)
    try:
        status, said = server.get("/api/stats", 3.0)
    except (OSError, http.client.HTTPException):
        return None
    theirs = said.get("folder") if status == 200 and isinstance(said, dict) else None
    if theirs is None:
        return None
    if Path(theirs).resolve() == root.absolute().resolve():
        return server
    if is_folder_given:
        return None
    raise typer.BadParameter(
        f"The gateway at {server.host}:{server.port} keeps its cache in {theirs}, not in {root}: say which with --dir."
    )


@contextlib.contextmanager
def _asking(server: Server | None, model: str, root: Path, console: Console) -> Iterator[Ask]:
    """What sends a request: to the gateway, or to a worker that lives as long as the block."""
    if server is not None:
        yield lambda path, body, headers, progress: _from(server, path, {**body, "model": model}, headers, progress)
        return
    told = ""

    def prepared(part: float, what: str) -> None:
        nonlocal told
        line = f"warm: making the model ready, once: {part:4.0%} {what}"
        if line != told:
            console.print(line)
        told = line

    command = extras.worker_command(model, prepared)
    console.print("warm: no gateway answers for this folder; loading the model in a process of its own")
    with tempfile.TemporaryDirectory(prefix="rewarm-warm-", ignore_cleanup_errors=True) as name:
        line = [sys.executable, "-m", "rewarm", *command, "--rewarm-dir", str(root.absolute())]
        with Worker(line, Path(name) / "worker.log") as worker:
            yield worker.ask


def _from(
    server: Server,
    path: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    progress: Callable[[int, int], None],
) -> Reply:
    try:
        return server.ask(path, body, headers, progress)
    except NoReply as error:
        raise EngineError(f"The gateway at {server.host}:{server.port} {error}") from error


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("Reading the prompt"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("prompt", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _saved(root: Path, label: str, pin: bool) -> Entry:
    """The entry that the request left, pinned if asked.

    Raises:
        RootError: none is there after a while.
    """
    deadline = time.monotonic() + SAVE_DEADLINE_S
    with open_cache(root) as cache:
        while True:
            found = [each for each in cache.entries() if each.label == label]
            if found:
                entry = max(found, key=lambda each: each.matched_s)
                if pin:
                    cache.pin(entry)
                return entry
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        rules = cache.policy()
    why = " Caching is paused." if rules.paused else ""
    raise RootError(
        f"The prompt was read, and nothing was kept of it in {root}.{why} `rewarm stats` shows why saves were dropped."
    )
