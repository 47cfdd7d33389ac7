"""`rewarm config`: every setting with where it came from, and a change of one.

Where things are and how they start is in the configuration file; limits and rules are in the cache folder.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import typer

from rewarm.cache.config_file import Value, config_path, read_config, write_value
from rewarm.cache.policy import Policy, read_policy
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.cli import extras
from rewarm.cli.consent import told
from rewarm.cli.output import AsJson, cell, console, plain, print_json, table
from rewarm.cli.roots import Folder, existing, folder_meant, opened
from rewarm.errors import GatewayError
from rewarm.store.settings import Limits
from rewarm.units import format_bytes, parse_bytes

LIMITS = tuple(field.name for field in msgspec.structs.fields(Limits))
RULES = {field.name: field for field in msgspec.structs.fields(Policy)}
SIZES = ("max_bytes", "min_free_bytes", "write_bytes_per_day")

config = typer.Typer(rich_markup_mode=None, help="Show every setting with where it came from, or change one.")


@config.callback(invoke_without_command=True)
def show_config(context: typer.Context, folder: Folder = None, as_json: AsJson = False) -> None:
    """Show every setting with where it came from."""
    if context.invoked_subcommand is not None:
        return
    started = extras.gateway_settings()
    if folder is not None:
        started["dir"] = (str(folder_meant(folder)), "--dir")
    stored: dict[str, Any] = {}
    with existing(folder) as (root, cache):
        if cache is not None:
            stored = _stored(cache)
    if as_json:
        settings = {name: {"value": value, "from": source} for name, (value, source) in started.items()}
        print_json({"file": str(config_path()), "settings": settings, "store": str(root), "stored": stored or None})
        return
    rows = table("setting", "value", "from")
    for name, (value, source) in started.items():
        rows.add_row(name, cell(_shown(name, value)), cell(source))
    for name, value in stored.items():
        rows.add_row(name, cell(_shown(name, value)), cell(str(root / "store.json")))
    console().print(rows)
    if not stored:
        typer.echo(f"There is no cache in {plain(str(root))} yet: it will have default limits.")
    if len(started) == 1:
        typer.echo("The gateway is not installed (pip install 'rewarm[gateway]'): its settings are not shown.")


@config.command("set")
def set_config(
    name: Annotated[str, typer.Argument(help="A limit, a rule, or a name of the configuration file.")],
    value: Annotated[str, typer.Argument(help="Its value; `none` takes a rule's number, or a line of the file, away.")],
    folder: Folder = None,
) -> None:
    """Change a limit or a rule in the cache folder, or a line of the configuration file."""
    if name in LIMITS or name in RULES:
        with opened(folder) as cache:
            if name in LIMITS:
                _set_limit(cache, name, value)
            else:
                _set_rule(cache, name, value)
    elif folder is not None:
        raise typer.BadParameter(f"{name} is no limit and no rule, so --dir has no part in it. Nothing was changed.")
    else:
        path = write_value(name, _for_file(name, value))
        typer.echo(
            f"{name} is {'taken out of' if value == 'none' else 'set in'} {plain(str(path))}; what starts from now on "
            "heeds it."
        )


def _stored(cache: PrefixCache) -> dict[str, Any]:
    settings = cache.settings()
    return {**msgspec.to_builtins(settings.limits), **msgspec.to_builtins(read_policy(settings.policy))}


def _set_limit(cache: PrefixCache, name: str, value: str) -> None:
    try:
        limits = Limits(**{name: _number(name, value)})
        limits.check()
    except ValueError as error:
        raise typer.BadParameter(f"{error}. Nothing was changed.") from None
    removal = cache.set_limits(limits)
    evicted = f"; {told(removal)} were evicted" if removal.n_files else ""
    typer.echo(f"{name} of {plain(str(cache.root))} is {_shown(name, getattr(limits, name))} now{evicted}.")
    for caution in cache.cautions():
        typer.echo(caution, err=True)


def _set_rule(cache: PrefixCache, name: str, value: str) -> None:
    field = RULES[name]
    try:
        parsed: Any = _number(name, value) if name in SIZES and value != "none" else value
        parsed = None if value == "none" else parsed
        wanted = msgspec.convert(parsed, field.type, strict=False)
        rules = msgspec.to_builtins(read_policy(cache.settings().policy))
        policy = msgspec.convert({**rules, name: wanted}, Policy)
        cache.set_policy(policy)
    except ValueError as error:  # msgspec's ValidationError is one
        raise typer.BadParameter(f"{name} cannot be {value!r}: {error}. Nothing was changed.") from None
    typer.echo(f"{name} of {plain(str(cache.root))} is {_shown(name, getattr(policy, name))} now.")


def _number(name: str, value: str) -> int:
    if name in SIZES:
        return parse_bytes(value)
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise ValueError(f"{name} must be a whole number from 0 to 2**63 - 1, not {value!r}")
    return int(value)


def _for_file(name: str, text: str) -> Value | None:
    """`text` as a value of the file, checked as at a start of the gateway, where that is installed.

    Raises:
        typer.BadParameter: there is no such setting, or it cannot be so.
    """
    known = extras.names_in_file()
    if name not in known:
        raise typer.BadParameter(
            f"There is no setting {name!r}. Limits: {', '.join(LIMITS)}. Rules: {', '.join(RULES)}. "
            f"In the file: {', '.join(known)}. Nothing was changed."
        )
    if text == "none":
        return None
    value = _guessed(name, text)
    read_config()
    try:
        extras.check_setting(name, value)
    except GatewayError as error:
        raise typer.BadParameter(f"{error} Nothing was changed.") from None
    return value


def _guessed(name: str, text: str) -> Value:
    """Numbers, `true`, `false` and lists as JSON writes them; else the text itself; of `models` one path at least."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = text
    if name in ("dir", "data_dir", "host", "engine"):
        return text
    if name == "models" and not isinstance(found, list):
        return [text]
    if isinstance(found, str | bool | int | float) or (
        isinstance(found, list) and all(isinstance(each, str) for each in found)
    ):
        return found
    return text


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if name.endswith("_bytes") or name in SIZES:
        return f"{format_bytes(value)} ({value})"
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
