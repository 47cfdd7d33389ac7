"""`rewarm explain`: what a prompt would find, and why not more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from rewarm import Identity
from rewarm.cache.description import identity_of
from rewarm.cache.explain import Decode
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.cli.extras import tokenizer_of
from rewarm.cli.output import AsJson, print_json
from rewarm.cli.roots import Folder, chosen, opened
from rewarm.state.chain import as_tokens


def explain(
    prompt: Annotated[Path, typer.Argument(help="A file: text with --tokenizer, else a JSON list of token ids.")],
    folder: Folder = None,
    model: Annotated[
        str | None, typer.Option(metavar="FINGERPRINT", help="The model; its start will do. `rewarm ls` shows it.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A model folder or tokenizer.json: shows tokens as text.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a prompt would find, and why not more."""
    words = tokenizer_of(tokenizer) if tokenizer is not None else None
    tokens = _tokens(prompt, words)
    with opened(folder) as cache:
        found = cache.explain(tokens, _identity(cache, model))
    decode: Decode | None = words.decode if words is not None else None
    if as_json:
        print_json({**found.as_dict(), "sentence": found.sentence(decode)})
    else:
        typer.echo(found.sentence(decode))


def _tokens(path: Path, words: Any) -> Sequence[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from None
    try:
        found = msgspec.json.decode(text, type=list[int])
    except (msgspec.DecodeError, RecursionError, ValueError):
        if words is None:
            raise typer.BadParameter(f"{path} is no JSON list of token ids; for text, name a --tokenizer.") from None
        return list(words.encode(text).ids)
    try:
        return as_tokens(found).tolist()
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(f"{path}: {error}.") from None


def _identity(cache: PrefixCache, prefix: str | None) -> Identity:
    """The model that is meant: the only one, or the one whose fingerprint `prefix` begins."""
    fingerprint = chosen(cache, prefix or "", "Nothing was looked up.")
    for known, description in cache.store.descriptions():
        if known.hex() == fingerprint and (identity := identity_of(description)) is not None:
            return identity
    raise typer.BadParameter(f"The description of {fingerprint} cannot be read.")
