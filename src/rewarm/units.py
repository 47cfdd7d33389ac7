"""Parse and print bytes and durations, as people write them. Knows nothing else."""

from __future__ import annotations

import re

_FACTORS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "kib": 2**10,
    "m": 10**6,
    "mb": 10**6,
    "mib": 2**20,
    "g": 10**9,
    "gb": 10**9,
    "gib": 2**30,
    "t": 10**12,
    "tb": 10**12,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes that `text` names: `"1500"`, `"64 GiB"`, `"1.5GB"`.

    Raises:
        ValueError: when `text` is no size.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no size; write a number and a unit, such as 500 MB or 64 GiB")
    whole, _, fraction = match[1].partition(".")
    scale: int = 10 ** len(fraction)
    return (int(whole) * scale + int(fraction or 0)) * factor // scale


def format_bytes(nbytes: int) -> str:
    """`nbytes` for a person, in binary units: `"0 B"`, `"1.5 MiB"`, `"64.0 GiB"`."""
    if abs(nbytes) < 2**10:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 2**10
        if abs(size) < 2**10 or unit == "TiB":
            return f"{size:.1f} {unit}"
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """`seconds` for a person: `"12 ms"`, `"3.4 s"`, `"2 min 5 s"`, `"3 h 4 min"`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
