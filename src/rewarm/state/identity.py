"""What a model's KV depends on, as fields; their canonical form; the fingerprint over it.

Canonical form: every value is a tag byte, the payload's length as u64 little-endian, and the payload.

    n  null      nothing
    b  boolean   00 or 01; a boolean is not a number
    i  integer   two's complement, little-endian, no longer than needed; also floats of integer value
    f  float     IEEE 754 double, little-endian; never an integer value, NaN or infinity
    s  text      UTF-8
    y  bytes     as they are
    l  list      its values, one after the other
    m  mapping   key (as text), value, key, value, ..., in the order of the keys' UTF-8

    fingerprint = BLAKE3(domain, canonical form), each preceded by its length as u64

So equal numbers have one form (10000 and 10000.0, 0 and -0.0), the order of keys means nothing, and no two
different identities have the same bytes: every value says where it ends and what it is. It knows nothing
of files, models and engines.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from blake3 import blake3

Value: TypeAlias = "str | int | float | bool | bytes | Sequence[Value] | Mapping[str, Value] | None"
Plain: TypeAlias = "str | int | float | bool | bytes | list[Plain] | dict[str, Plain] | None"
Fields = Mapping[str, Value]

FINGERPRINT_NBYTES = 32
MAX_DEPTH = 64
"""Nested deeper than this is refused: what a file says must not exhaust the stack."""

_DOMAIN = b"rewarm/1 identity"
_BYTES, _INTEGER = "$bytes", "$int"
_JSON_INTEGERS = range(-(2**53), 2**53 + 1)  # what every reader of JSON keeps exactly


def normalise(fields: Fields) -> dict[str, Plain]:
    """A private copy of `fields` in which equal identities are equal: numbers in one form, keys sorted.

    Raises:
        ValueError: a value is NaN, infinite, no valid text, nested too deep, or of another type than
            str, int, float, bool, bytes, None, a list (or tuple) or a mapping of str to these.
    """
    if not isinstance(fields, Mapping):
        raise ValueError(f"an identity is a mapping of names to values, not {type(fields).__name__}")
    return _mapping(fields, "", 0)


def encode(fields: Fields) -> bytes:
    """The canonical form of `fields`.

    Raises:
        ValueError: as `normalise`.
    """
    return _encode(normalise(fields))


def fingerprint(fields: Fields) -> bytes:
    """The 32 bytes that name everything a model's KV depends on.

    Raises:
        ValueError: as `normalise`.
    """
    hasher = blake3()
    for part in (_DOMAIN, encode(fields)):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest(FINGERPRINT_NBYTES)


def differing(a: Fields, b: Fields) -> list[str]:
    """The dotted names of what differs, sorted: `["config.rope_theta", "kv_bits"]`.

    A field that only one has, or whose kind differs, is named itself, not what is in it. Items of lists have
    their number for a name.

    Raises:
        ValueError: as `normalise`.
    """
    return sorted(_differing(normalise(a), normalise(b), ""))


def to_json(fields: Fields) -> dict[str, Any]:
    """`fields` as values that JSON has, from which `from_json` makes the same identity.

    Bytes become `{"$bytes": hex}`, integers beyond 53 bits `{"$int": hex}`; a key that begins with a dollar
    gets another one in front.

    Raises:
        ValueError: as `normalise`.
    """
    return {_escape(key): _to_json(value) for key, value in normalise(fields).items()}


def from_json(tree: Mapping[str, Any]) -> dict[str, Plain]:
    """The fields that `to_json` made `tree` of, in normal form.

    Raises:
        ValueError: `tree` is nothing that `to_json` gives.
    """
    if not isinstance(tree, Mapping):
        raise ValueError("an identity in JSON is an object")
    return normalise({_unescape(key): _from_json(value, 0) for key, value in tree.items()})


def _normal(value: object, where: str, depth: int) -> Plain:
    if depth > MAX_DEPTH:
        raise ValueError(f"{where}: nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _number(value, where)
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, Mapping):
        return _mapping(value, where, depth)
    if isinstance(value, list | tuple):
        return [_normal(item, f"{where}.{i}", depth + 1) for i, item in enumerate(value)]
    raise ValueError(f"{where}: a {type(value).__name__} cannot be part of an identity")


def _mapping(value: Mapping[Any, object], where: str, depth: int) -> dict[str, Plain]:
    found: dict[str, Plain] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise ValueError(f"{where or 'the identity'}: the key {key!r} is no text")
        name = f"{where}.{key}" if where else str(key)
        found[_text(key, name)] = _normal(item, name, depth + 1)
    return {key: found[key] for key in sorted(found, key=str.encode)}


def _number(value: float, where: str) -> int | float:
    if not math.isfinite(value):
        raise ValueError(f"{where}: {value} cannot be part of an identity")
    return int(value) if value.is_integer() else float(value)


def _text(value: str, where: str) -> str:
    text = str.__str__(value)  # the text of a subclass, whatever it prints as
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where!r}: holds half a surrogate pair, which is no text") from None
    return text


def _encode(value: Plain) -> bytes:
    tag, payload = _tagged(value)
    return tag + len(payload).to_bytes(8, "little") + payload


def _tagged(value: Plain) -> tuple[bytes, bytes]:
    if value is None:
        return b"n", b""
    if isinstance(value, bool):
        return b"b", bytes((value,))
    if isinstance(value, int):
        return b"i", value.to_bytes(_width(value), "little", signed=True)
    if isinstance(value, float):
        return b"f", struct.pack("<d", value)
    if isinstance(value, str):
        return b"s", value.encode()
    if isinstance(value, bytes):
        return b"y", value
    if isinstance(value, list):
        return b"l", b"".join(map(_encode, value))
    return b"m", b"".join(_encode(key) + _encode(item) for key, item in value.items())


def _width(value: int) -> int:
    """Bytes of the shortest two's complement of `value`."""
    return (value if value >= 0 else ~value).bit_length() // 8 + 1


def _differing(a: Plain, b: Plain, where: str) -> Iterator[str]:
    pairs: list[tuple[str, Plain, Plain]] | None = None
    if isinstance(a, dict) and isinstance(b, dict):
        yield from (f"{where}{key}" for key in a.keys() ^ b.keys())
        pairs = [(key, a[key], b[key]) for key in a.keys() & b.keys()]
    elif isinstance(a, list) and isinstance(b, list):
        shared = min(len(a), len(b))
        yield from (f"{where}{i}" for i in range(shared, max(len(a), len(b))))
        pairs = [(str(i), a[i], b[i]) for i in range(shared)]
    if pairs is not None:
        for name, one, other in pairs:
            yield from _differing(one, other, f"{where}{name}.")
    elif _encode(a) != _encode(b):  # True == 1 in Python, but not here
        yield where.removesuffix(".")


def _escape(key: str) -> str:
    return f"${key}" if key.startswith("$") else key


def _unescape(key: object) -> str:
    if not isinstance(key, str) or (key.startswith("$") and not key.startswith("$$")):
        raise ValueError(f"{key!r} is no name of a field")
    return key[1:] if key.startswith("$") else key


def _to_json(value: Plain) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    if isinstance(value, int) and not isinstance(value, bool) and value not in _JSON_INTEGERS:
        return {_INTEGER: f"{value:x}"}
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, dict):
        return {_escape(key): _to_json(item) for key, item in value.items()}
    return value


def _from_json(value: Any, depth: int) -> Value:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, list):
        return [_from_json(item, depth + 1) for item in value]
    if not isinstance(value, Mapping):
        return value  # type: ignore[no-any-return]
    if len(value) == 1:
        match next(iter(value.items())):
            case ("$bytes", str(text)):
                return bytes.fromhex(text)
            case ("$int", str(text)):
                return int(text, 16)
    return {_unescape(key): _from_json(item, depth + 1) for key, item in value.items()}
