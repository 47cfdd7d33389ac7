"""The engine's replies on their way to the client: what is read out of them, and what is added.

Whole bodies and streams of server-sent events; all but the parts that tell about the cache passes untouched.
Knows the shapes of llama-server's replies and nothing of sockets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from rewarm.adapters.llama.seam import Turn

DATA = b"data: "


def whole(turn: Turn, raw: bytes) -> bytes:
    """A reply's body, with what the cache did; as it came when it is no JSON object."""
    try:
        body = json.loads(raw)
    except ValueError:
        return raw
    if not isinstance(body, dict):
        return raw
    note(turn, body)
    tell(turn, body)
    return json.dumps(body, ensure_ascii=False).encode()


def events(turn: Turn, lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a stream; in those that tell the usage, with what the cache did."""
    for line in lines:
        telling = line.startswith(DATA) and (b'"timings"' in line or b'"usage"' in line)
        yield _event(turn, line) if telling else line


def note(turn: Turn, body: dict[str, Any]) -> None:
    """Take the engine's count of reused tokens out of a reply, or of a chunk that has it."""
    timings, usage = body.get("timings"), body.get("usage")
    if isinstance(timings, dict):
        turn.timings = timings
    elif isinstance(usage, dict) and not turn.timings:
        details = usage.get("prompt_tokens_details") or {}
        cached, n_prompt = int(details.get("cached_tokens") or 0), int(usage.get("prompt_tokens") or 0)
        turn.timings = {"cache_n": cached, "prompt_n": n_prompt - cached}
    turn.truncated = turn.truncated or body.get("truncated") is True


def tell(turn: Turn, body: dict[str, Any]) -> None:
    """Add what the cache did beside `usage`, or to a reply of the engine's own kind."""
    report = turn.report()
    usage = body.get("usage")
    if isinstance(usage, dict):
        usage["prompt_tokens_details"] = {**(usage.get("prompt_tokens_details") or {})}
        usage["prompt_tokens_details"]["cached_tokens"] = report.cached_tokens
    if isinstance(usage, dict) or "stop_type" in body or "tokens_evaluated" in body:
        body["rewarm"] = report.as_dict()


def error(message: str, kind: str, code: int) -> dict[str, Any]:
    """An error in the shape that OpenAI's clients read."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _event(turn: Turn, line: bytes) -> bytes:
    try:
        chunk = json.loads(line[len(DATA) :])
    except ValueError:
        return line
    if not isinstance(chunk, dict):
        return line
    note(turn, chunk)
    before = chunk.get("usage"), chunk.get("stop_type")
    if before == (None, None):
        return line
    tell(turn, chunk)
    end = line[len(line.rstrip(b"\r\n")) :]
    return DATA + json.dumps(chunk, ensure_ascii=False).encode() + end
