"""`identity.json` beside a namespace's records: whose they are, and what changed when nothing is found.

The identity in it is canonical and hashed; name, last seen and engine are for people only and are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rewarm.cache.identity import Identity
from rewarm.state.identity import differing, from_json, to_json


class _Description(msgspec.Struct, frozen=True):
    identity: dict[str, Any]
    name: str | None = None
    last_seen_s: float = 0.0


def describe(identity: Identity, now_s: float) -> bytes:
    """The file's bytes for an identity whose fingerprint is known, seen at `now_s` (seconds since 1970)."""
    described = _Description(to_json(identity.fields), identity.name, round(now_s, 3))
    return msgspec.json.format(msgspec.json.encode(described), indent=2) + b"\n"


def model_name(description: bytes) -> str | None:
    """The display name in a file's bytes."""
    try:
        return msgspec.json.decode(description, type=_Description).name
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def identity_of(description: bytes) -> Identity | None:
    """The identity in a file's bytes, or None where it cannot be read."""
    try:
        read = msgspec.json.decode(description, type=_Description)
        return Identity(from_json(read.identity), read.name)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
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
    try:
        read = msgspec.json.decode(description, type=_Description)
        return from_json(read.identity) if name is not None and read.name == name else None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        return None
