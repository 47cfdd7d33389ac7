"""The engine's replies on their way to the client: what is read out of them, and what is added.

Whole bodies and streams of server-sent events; all but the parts that tell about the cache passes untouched.
Knows the shapes of llama-server's replies and nothing of sockets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from rewarm.adapters.llama.turns import Turn

DATA = b"data: "
_TELLING = (b'"timings"', b'"usage"')


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


def events(turn: Turn, lines: Iterable[bytes], *, shows_progress: bool) -> Iterator[bytes]:
    """The lines of a stream; in those that tell the usage, with what the cache did.

    Args:
        turn: takes note.
        lines: ends included.
        shows_progress: whether the client itself asked for the chunks that tell how far the prompt's evaluation
            has come; else each becomes a comment, which clients skip.
    """
    skips_blank = False
    for line in lines:
        if skips_blank and not line.strip():
            continue
        skips_blank = False
        if line.startswith(DATA) and b'"prompt_progress"' in line:
            comment = _progress(turn, line)
            if comment and not shows_progress:
                skips_blank = True
                yield comment
                continue
        telling = line.startswith(DATA) and any(word in line for word in _TELLING)
        yield _event(turn, line) if telling else line


def note(turn: Turn, body: dict[str, Any]) -> None:
    """Take the engine's count of reused tokens out of a reply, or of a chunk that has it."""
    timings, usage = body.get("timings"), body.get("usage")
    if isinstance(timings, dict):
        turn.timings = timings
    elif isinstance(usage, dict) and not turn.timings:
        counted = _counted(usage)
        if counted is not None:
            turn.timings = {"cache_n": counted[0], "prompt_n": counted[1]}
    turn.truncated = turn.truncated or body.get("truncated") is True


def _counted(usage: dict[str, Any]) -> tuple[int, int] | None:
    """Tokens that were reused, and those that were evaluated, as the three APIs tell them."""
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"] or 0), int(usage.get("input_tokens") or 0)
    for name, details in (("prompt_tokens", "prompt_tokens_details"), ("input_tokens", "input_tokens_details")):
        if name in usage:
            cached = int((usage.get(details) or {}).get("cached_tokens") or 0)
            return cached, int(usage[name] or 0) - cached
    return None


def tell(turn: Turn, body: dict[str, Any]) -> None:
    """Add what the cache did beside `usage`, or to a reply of the engine's own kind."""
    usage = body.get("usage")
    if isinstance(usage, dict):
        # What was evaluated by a request of our own is not reused, though the engine counts it so.
        for details in ("prompt_tokens_details", "input_tokens_details"):
            if details.removesuffix("_details") in usage and "cache_read_input_tokens" not in usage:
                usage[details] = {**(usage.get(details) or {}), "cached_tokens": turn.n_cached}
    if isinstance(usage, dict) or "stop_type" in body or "tokens_evaluated" in body:
        body["rewarm"] = turn.told()


def error(message: str, kind: str, code: int) -> dict[str, Any]:
    """An error in the shape that OpenAI's clients read."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _progress(turn: Turn, line: bytes) -> bytes:
    """Note how far the prompt's evaluation has come; the chunk as a comment, where it tells nothing else."""
    try:
        chunk = json.loads(line[len(DATA) :])
        told = chunk["prompt_progress"]
        turn.progress = int(told["processed"]), int(told["total"])
    except (ValueError, KeyError, TypeError):
        return b""
    says_more = any(choice.get("delta", {}).get("content") for choice in chunk.get("choices") or ()) or (
        bool(chunk.get("content"))
    )
    return b"" if says_more else b": keepalive %d/%d\n\n" % turn.progress


def _event(turn: Turn, line: bytes) -> bytes:
    try:
        chunk = json.loads(line[len(DATA) :])
    except ValueError:
        return line
    if not isinstance(chunk, dict):
        return line
    # `/v1/responses` and the first event of `/v1/messages` tell their usage one level down.
    parts = [part for part in (chunk, chunk.get("response"), chunk.get("message")) if isinstance(part, dict)]
    for part in parts:
        note(turn, part)
    telling = [part for part in parts if part.get("usage") is not None or part.get("stop_type") is not None]
    if not telling or chunk.get("type") == "message_start":
        return line
    for part in telling:
        tell(turn, part)
    end = line[len(line.rstrip(b"\r\n")) :]
    return DATA + json.dumps(chunk, ensure_ascii=False).encode() + end
