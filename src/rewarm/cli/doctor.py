"""`rewarm doctor`: looks at everything that keeping states needs, and says what stands in the way."""

from __future__ import annotations

import contextlib
import enum
import http.client
import importlib.metadata
import os
import platform
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import rewarm
from rewarm.cache.config_file import config_path, read_config
from rewarm.cache.prefix_cache import PrefixCache, open_cache
from rewarm.cli import extras
from rewarm.cli.asking import Server
from rewarm.cli.disk_speed import Speed, measure
from rewarm.cli.output import AsJson, plain, print_json
from rewarm.cli.roots import Folder, folder_meant, is_there, model_names
from rewarm.errors import RewarmError
from rewarm.store.entries import Entry
from rewarm.store.location import describe_location
from rewarm.store.lock import holders
from rewarm.store.settings import format_limits
from rewarm.units import format_bytes

ENGINES = {"mlx-lm": ("mlx-lm", "mlx"), "llama.cpp": ("xllamacpp",)}


class State(enum.StrEnum):
    """What a look found."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        about: what.
        state: how it is.
        message: that in words.
    """

    about: str
    state: State
    message: str


def doctor(
    folder: Folder = None,
    no_speed: Annotated[bool, typer.Option("--no-speed", help="Do not measure the disk.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check the folder, its disk and the engines; ends with 1 when something is at fault."""
    console = Console(stderr=True, highlight=False)
    findings: list[Finding] = []
    for finding in _look(folder, no_speed, console):
        findings.append(finding)
        if not as_json:
            mark = "" if finding.state is State.OK else f"{finding.state.upper()}: "
            typer.echo(f"{finding.about:<15}{mark}{plain(finding.message)}")
    faults = sum(finding.state is State.FAULT for finding in findings)
    if as_json:
        print_json({"ok": not faults, "findings": [asdict(finding) for finding in findings]})
    if faults:
        raise typer.Exit(1)


def _look(folder: Path | None, no_speed: bool, console: Console) -> Iterator[Finding]:
    yield Finding(
        "rewarm", State.OK, f"{rewarm.__version__}, Python {platform.python_version()}, {platform.platform()}"
    )
    yield from _engines()
    try:
        yield from _configuration()
        root = folder_meant(folder)
    except RewarmError as error:
        yield Finding("configuration", State.FAULT, str(error))
        return
    yield from _place(root)
    yield from _locks(root)
    speed = None
    if not no_speed:
        with console.status("Measuring the disk") if console.is_terminal else contextlib.nullcontext():
            speed = measure(root)
        yield _told(speed)
    try:
        if is_there(root):
            with open_cache(root) as cache:
                yield from _cache(cache)
                yield from _worth(cache, speed)
        else:
            yield Finding("cache", State.OK, "none yet: it is made at the first start of an engine")
    except RewarmError as error:
        yield Finding("cache", State.FAULT, str(error))
    yield from _gateway()


def _engines() -> Iterator[Finding]:
    for engine, packages in ENGINES.items():
        versions = [version for package in packages if (version := _version(package))]
        if len(versions) == len(packages):
            told = ", ".join(f"{name} {version}" for name, version in zip(packages, versions, strict=True))
            yield Finding(engine, State.OK, told)
        else:
            extra = "mlx" if engine == "mlx-lm" else "llama"
            yield Finding(engine, State.OK, f"not installed (pip install 'rewarm[{extra}]')")
    own = shutil.which("llama-server")
    if own:
        yield Finding("llama-server", State.OK, f"{own}; named with --llama-server")
    if not own and not any(all(map(_version, packages)) for packages in ENGINES.values()):
        yield Finding("engines", State.FAULT, "none is installed, so there are no states to keep")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _configuration() -> Iterator[Finding]:
    given = read_config()
    extras.gateway_settings()
    told = f"{len(given)} settings" if config_path().exists() else "no such file: defaults"
    yield Finding("configuration", State.OK, f"{config_path()}: {told}")


def _place(root: Path) -> Iterator[Finding]:
    place = describe_location(root)
    free = "unknown" if place.free_bytes is None else format_bytes(place.free_bytes)
    if place.writable:
        yield Finding("folder", State.OK, f"{place.path}, {free} free on its disk")
    else:
        yield Finding("folder", State.FAULT, f"{place.path} cannot be written: nothing can be saved there")
    for warning in place.warnings:
        yield Finding("folder", State.WARNING, warning)
    if place.exists and hasattr(os, "geteuid"):
        try:
            status = place.path.stat()
        except OSError as error:
            yield Finding("permissions", State.FAULT, f"they cannot be read: {error.strerror}")
            return
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid():
            yield Finding("permissions", State.WARNING, f"the folder belongs to another user ({status.st_uid})")
        elif mode & 0o077:
            yield Finding("permissions", State.WARNING, f"others can look into the folder (mode {mode:04o}): chmod 700")
        else:
            yield Finding("permissions", State.OK, f"only you can look into it (mode {mode:04o})")


def _locks(root: Path) -> Iterator[Finding]:
    try:
        names = [path for path in (root / "tmp").iterdir() if path.suffix == ".lock"]
        living = holders(root / "tmp")
    except OSError:
        return
    numbers = ", ".join(str(each or "?") for each in living) or "none"
    yield Finding("in use by", State.OK, f"processes {numbers}" if living else "no process")
    if len(names) > len(living):
        n = len(names) - len(living)
        yield Finding("in use by", State.OK, f"{n} processes ended without closing it; what they left is finished now")


def _told(speed: Speed | None) -> Finding:
    if speed is None:
        return Finding("disk", State.WARNING, "its speed was not measured: there is no room, or it cannot be written")
    read, write = (f"{format_bytes(int(each))}/s" for each in (speed.read_per_s, speed.write_per_s))
    how = "" if speed.is_cold else " (from the system's memory, which could not be bypassed)"
    return Finding("disk", State.OK, f"reads {read}{how}, writes {write}")


def _cache(cache: PrefixCache) -> Iterator[Finding]:
    usage, settings = cache.store.usage(), cache.settings()
    yield Finding(
        "cache",
        State.OK,
        f"{format_bytes(usage['bytes_used'])} in {usage['files_used']:,} files, {format_limits(settings.limits)}",
    )
    for caution in cache.cautions():
        yield Finding("limits", State.WARNING, caution)
    if cache.policy().paused:
        yield Finding("rules", State.WARNING, "caching is paused: `rewarm config set paused false` goes on")
    known = sum(n_files for _, n_files, _ in cache.store.namespaces())
    there = sum(1 for each in cache.root.glob("*/??/*") if each.suffix in (".block", ".point"))
    if known == there:
        yield Finding(
            "index", State.OK, f"it knows {known:,} records, as many as there are (`rewarm verify` reads them)"
        )
    else:
        told = f"it knows {known:,} records, and there are {there:,}: run `rewarm verify`, then `rewarm repair`"
        yield Finding("index", State.WARNING, told)
    aside = usage.get("quarantined_files", 0)
    if aside:
        yield Finding("damage", State.WARNING, f"{aside} damaged records were set aside so far: look at the disk")


def _worth(cache: PrefixCache, speed: Speed | None) -> Iterator[Finding]:
    """Of each model how quickly its states load: where its engine prefills more quickly, loading is not worth it."""
    names = model_names(cache)
    longest: dict[str, Entry] = {}
    for entry in cache.entries():
        if entry.n_tokens and entry.n_tokens > getattr(longest.get(entry.fingerprint), "n_tokens", 0):
            longest[entry.fingerprint] = entry
    for fingerprint, entry in longest.items():
        per_token = entry.nbytes / entry.n_tokens
        told = f"{format_bytes(int(per_token))} a token"
        if speed is not None and per_token:
            told += f"; loads {speed.read_per_s / per_token:,.0f} tokens/s: worth it where prefill is slower than that"
        yield Finding("restoring", State.OK, f"{names.get(fingerprint, 'unnamed')} {fingerprint[:12]}: {told}")


def _gateway() -> Iterator[Finding]:
    address = extras.gateway_address()
    if address is None:
        yield Finding("gateway", State.OK, "not installed (pip install 'rewarm[gateway]')")
        return
    try:
        status, said = Server(*address).get("/api/stats", 3.0)
    except (OSError, http.client.HTTPException):
        yield Finding("gateway", State.OK, f"none answers at {address[0]}:{address[1]}")
        return
    usable = status == 200 and isinstance(said, dict) and said.get("usable")
    told = f"{address[0]}:{address[1]} answers"
    if isinstance(said, dict) and "folder" in said:
        told += f", cache in {said['folder']}{'' if usable else ': ' + str(said.get('problem'))}"
    yield Finding("gateway", State.OK if usable else State.WARNING, told)
