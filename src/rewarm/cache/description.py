"""`identity.json` beside a namespace's records: whose they are, and what changed when nothing is found.

The identity in it is canonical and hashed. What stands beside it is not, and is a hint: the display name, where
the model lay, when it was last used, and which later versions of the engine were seen to compute the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rewarm.cache.digest_memo import printable
from rewarm.cache.identity import Identity
from rewarm.state.identity import differing, from_json, to_json

MAX_EPOCHS = 64
"""Later versions of an engine that are listed."""


class Description(msgspec.Struct, frozen=True):
    """What the file holds.

    Attributes:
        identity: the hashed fields, as JSON has them.
        name: what people call the model.
        last_seen_s: when it was last used, seconds since 1970, to the hour.
        path: where the model lay, absolute; None where it has no files.
        epochs: later versions of the engine whose probe agreed, oldest first.
    """

    identity: dict[str, Any]
    name: str | None = None
    last_seen_s: float = 0.0
    path: str | None = None
    epochs: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """The file's bytes."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def fields(self) -> Mapping[str, Any]:
        """The hashed fields.

        Raises:
            ValueError: they are none.
        """
        return from_json(self.identity)


def read_description(data: bytes | None) -> Description | None:
    """What a file's bytes say, or None where that cannot be read."""
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=Description)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def describe(identity: Identity, now_s: float, before: bytes | None = None) -> bytes:
    """The file's bytes for an identity whose fingerprint is known, seen at `now_s` (seconds since 1970).

    Args:
        identity: whose namespace it is.
        now_s: when it is used.
        before: what the file says now: the versions that it lists stay.
    """
    known = read_description(before)
    epochs = known.epochs if known is not None else ()
    path = identity.path
    if path is not None and printable(path) != path:
        path = None  # another path than the model's would say that the model is gone
    return Description(to_json(identity.fields), identity.name, round(now_s, 3), path, epochs).encode()


def model_name(description: bytes) -> str | None:
    """The display name in a file's bytes."""
    read = read_description(description)
    return read.name if read is not None else None


def identity_of(description: bytes) -> Identity | None:
    """The identity in a file's bytes, or None where it cannot be read."""
    read = read_description(description)
    try:
        return Identity(read.fields(), read.name) if read is not None else None
    except ValueError:
        return None


def explain_change(identity: Identity, described: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Names of the fields that differ from the nearest namespace of the same model name, or None."""
    nearest: list[str] | None = None
    for fingerprint, description in described:
        fields = _fields(description, identity.name)
        if fields is None or fingerprint == identity.fingerprint_bytes:
            continue
        differs = differing(fields, identity.fields)
        if nearest is None or len(differs) < len(nearest):
            nearest = differs
    return ", ".join(nearest) if nearest else None


def _fields(description: bytes, name: str | None) -> Mapping[str, Any] | None:
    read = read_description(description)
    try:
        return read.fields() if read is not None and name is not None and read.name == name else None
    except ValueError:
        return None
