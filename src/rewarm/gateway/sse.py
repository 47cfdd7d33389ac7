"""Server-sent events, as bytes: taken apart and written. Knows nothing of what they say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import Any

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream.

    Attributes:
        raw: its bytes, with the empty line that ends it.
        data: the JSON object that it carries; None for a comment, for `[DONE]` and for what is no object.
        comment: the comment's text; "" for other events.
        is_done: whether it is `[DONE]`.
        name: after `event:`; "" where it has none.
    """

    raw: bytes
    data: dict[str, Any] | None = None
    comment: str = ""
    is_done: bool = False
    name: str = ""


async def read_events(pieces: AsyncIterable[bytes]) -> AsyncIterator[Event]:
    """The events in a body that arrives in pieces cut anywhere; what follows the last empty line is dropped.

    Lines end with a newline byte only: JSON may hold every other character that Unicode calls a line's end.
    """
    rest = b""
    async for piece in pieces:
        rest = (rest + piece).replace(b"\r\n", b"\n")
        *blocks, rest = rest.split(b"\n\n")
        for block in blocks:
            if block.strip():
                yield _event(block)


def write_event(data: dict[str, Any], name: str = "") -> bytes:
    """The bytes of an event that carries `data`, under `name` if it has one."""
    head = b"event: %s\n" % name.encode() if name else b""
    return head + b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def _event(block: bytes) -> Event:
    raw = block + b"\n\n"
    if block.startswith(b":"):
        return Event(raw, comment=block[1:].decode(errors="replace").strip())
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    payload = b"\n".join(lines)
    if payload.strip() == b"[DONE]":
        return Event(raw, is_done=True)
    try:
        data = json.loads(payload)
    except ValueError:
        return Event(raw)
    names = [line[6:].strip().decode(errors="replace") for line in block.split(b"\n") if line.startswith(b"event:")]
    return Event(raw, data if isinstance(data, dict) else None, name=names[-1] if names else "")
