"""What a request may ask of a worker: its body's forbidden parts, and the headers that the cache understands.

Knows the shapes of requests and no worker. Whose the request is was settled before (`keys`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rewarm.gateway.problems import Problem

CACHE, CONVERSATION, TENANT = "X-Rewarm-Cache", "X-Rewarm-Conversation", "X-Rewarm-Tenant"

_MODES = ("on", "read-only", "off")
_LABEL = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_LOADS = ("adapters", "draft_model", "lora")
"""Fields by which a request would have an engine load files that it names, or change what the model is."""

_LOADED = "default_model"
"""What mlx-lm calls the model of its command line."""

_CONTENT = ("messages", "input", "prompt", "system")
"""Fields that hold what is said, and so pictures."""

_POINTERS = frozenset({"image_url", "video_url", "audio_url", "file_url", "input_audio", "image", "video", "file"})
_NOT_CONTENT = frozenset({"tool_calls", "arguments"})
"""What a model said to a tool: nobody fetches it."""


def cache_headers(given: Mapping[str, str], tenant: bytes) -> dict[str, str]:
    """The headers that go to the worker: the client's own for the cache, and whose it is.

    Args:
        given: the client's headers, by names in any case; its own `X-Rewarm-Tenant` is left out.
        tenant: whose the request is; empty where nothing is kept apart.

    Raises:
        Problem: 400, one of them makes no sense.
    """
    found: dict[str, str] = {}
    mode, label = given.get(CACHE), given.get(CONVERSATION)
    if mode is not None:
        if mode not in _MODES:
            raise Problem(400, f"{CACHE} is on, read-only or off, not {mode[:100]!r}.", "invalid_header", CACHE)
        found[CACHE] = mode
    if label is not None:
        if _LABEL.fullmatch(label) is None:
            message = f"{CONVERSATION} is 1 to 128 letters, digits and any of . _ : -"
            raise Problem(400, message, "invalid_header", CONVERSATION)
        found[CONVERSATION] = label
    if tenant:
        found[TENANT] = tenant.hex()
    return found


def for_worker(payload: Mapping[str, Any], *, is_openai: bool) -> tuple[dict[str, Any], bool]:
    """The body for the worker, and whether the client asked for a stream's usage itself.

    Args:
        payload: the request's body, as the client sent it.
        is_openai: whether it is a completion of OpenAI's, whose streams tell their usage on request only.

    Raises:
        Problem: 400, it names files to load, or addresses to fetch.
    """
    for name in _LOADS:
        if payload.get(name) is not None:
            raise Problem(400, f"{name!r} cannot be chosen by a request: it belongs to the model.", param=name)
    for name in _CONTENT:
        _refuse_addresses(payload.get(name), name)
    body = {name: value for name, value in payload.items() if name not in _LOADS}
    # Not the path: mlx-lm takes that for another model when its own was loaded with an adapter.
    body["model"] = _LOADED
    if not is_openai:
        return body, True
    given = body.pop("stream_options", None)
    options = given if isinstance(given, dict) else {}
    if payload.get("stream") is True:
        # Asked for in any case: the report of what the cache did comes with it.
        body["stream_options"] = {**options, "include_usage": True}
    return body, options.get("include_usage") is True


def _refuse_addresses(content: Any, field: str) -> None:
    """See that no picture, sound or file is named by an address, which the engine would fetch from this machine.

    Raises:
        Problem: 400, one is.
    """
    # A stack of its own: what is nested deeply must not end in an error of the interpreter.
    left = [content]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left.extend(part)
        elif isinstance(part, dict):
            left.extend(value for name, value in part.items() if name not in _NOT_CONTENT and _holds(part, name))
            if any(not _is_inline(part[name]) for name in _POINTERS & part.keys()) or _is_address(part):
                raise Problem(
                    400,
                    "Pictures, sounds and files must be in the request itself (data:...;base64,...): "
                    "this gateway fetches no addresses.",
                    "address_not_allowed",
                    field,
                )


def _holds(part: Mapping[str, Any], name: str) -> bool:
    """Whether `part[name]` is content. What is handed to a tool (`tool_use`) is not."""
    return not (name == "input" and part.get("type") == "tool_use")


def _is_inline(pointer: Any) -> bool:
    url = pointer.get("url") if isinstance(pointer, dict) else pointer
    # Base64 by itself has no colon; an address has one after its scheme, `file:` included.
    return not isinstance(url, str) or url.startswith("data:") or ":" not in url


def _is_address(part: Mapping[str, Any]) -> bool:
    """Whether it is a source as Anthropic's API has them: `{"type": "url", "url": ...}`."""
    return part.get("type") == "url" and "url" in part
