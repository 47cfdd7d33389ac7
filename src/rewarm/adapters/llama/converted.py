"""Requests of other APIs that llama-server converts inside: the chat completion that they become.

`/v1/messages` (Anthropic's) and `/v1/responses` (OpenAI's newer one), text and tools only. The server compares
what a slot holds with the prompt that it makes itself, so a conversion that differs from its own costs reuse
and never a wrong token. Pure: asks no server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rewarm.state.reason import Reason

_VOLATILE = "x-anthropic-billing-header:"
"""The server rewrites a part of a system prompt that begins so."""


class NotConverted(ValueError):
    """A request that is not text and tools alone, or of a form that is not known here; says what."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route whose requests the server converts.

    Attributes:
        convert: gives the body of the chat completion.
        keeps_slot: whether the server heeds `id_slot` in such a request.
        why_not: why it is served uncached where the server has several slots and chooses among them.
        reason: the same as a reason.
    """

    convert: Callable[[Mapping[str, Any]], dict[str, Any]]
    keeps_slot: bool
    why_not: str = ""
    reason: Reason = Reason.DISABLED


def from_messages(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion of a request to `/v1/messages`.

    Raises:
        NotConverted: it holds more than text and tools.
    """
    messages: list[dict[str, Any]] = []
    if body.get("system") is not None:
        system = "".join(_texts(body["system"], "text"))
        if system.startswith(_VOLATILE):
            raise NotConverted("its system prompt begins with a line that the server rewrites")
        messages.append({"role": "system", "content": system})
    for message in _objects(body.get("messages")):
        content = message.get("content")
        if isinstance(content, str):
            messages.append(dict(message))
        elif content is not None:
            messages += _from_blocks(str(message.get("role", "")), _objects(content))
    found: dict[str, Any] = {"messages": messages}
    if body.get("tools"):
        found["tools"] = [_tool(tool, tool.get("input_schema", {})) for tool in _objects(body["tools"])]
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("auto", "any", "tool"):
        found["tool_choice"] = "auto" if choice["type"] == "auto" else "required"
    if "chat_template_kwargs" in body:
        found["chat_template_kwargs"] = body["chat_template_kwargs"]
    return found


def _from_blocks(role: str, blocks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thoughts = ""
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            parts.append(block)
        elif kind == "thinking":
            thoughts += str(block.get("thinking", ""))
        elif kind == "tool_use":
            # As the server prints it: no blanks, keys in order.
            arguments = json.dumps(block.get("input", {}), separators=(",", ":"), ensure_ascii=False, sort_keys=True)
            call = {"name": block.get("name", ""), "arguments": arguments}
            calls.append({"id": block.get("id", ""), "type": "function", "function": call})
        elif kind == "tool_result":
            text = "".join(_texts(block.get("content", ""), "text"))
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": text})
        else:
            raise NotConverted(f"it holds a block of the kind {kind!r}")
    if parts or calls or thoughts:
        message: dict[str, Any] = {"role": role, "content": parts or ""}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": thoughts} if thoughts else {}
        yield message
    yield from results


def from_responses(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion of a request to `/v1/responses`.

    Raises:
        NotConverted: it holds more than text and tools.
    """
    asked = body.get("input")
    messages: list[dict[str, Any]] = []
    if "instructions" in body:
        messages.append({"role": "system", "content": str(body["instructions"] or "")})
    if isinstance(asked, str):
        messages.append({"role": "user", "content": asked})
    else:
        for item in _objects(asked):
            messages.append(_from_item(item))
    found = {"messages": messages}
    if body.get("tools"):
        tools = [tool for tool in _objects(body["tools"]) if tool.get("type") == "function"]
        found["tools"] = [{"type": "function", "function": _strict(tool)} for tool in tools]
    effort = body["reasoning"].get("effort") if isinstance(body.get("reasoning"), dict) else None
    rest = {name: body[name] for name in ("tool_choice", "chat_template_kwargs") if name in body}
    return {**found, **rest, **({"reasoning_effort": effort} if effort else {})}


def _from_item(item: dict[str, Any]) -> dict[str, Any]:
    kind, role = item.get("type"), item.get("role")
    if role in ("user", "system", "developer", "assistant") and kind in (None, "message"):
        named = "output_text" if role == "assistant" else "input_text"
        parts = [{"type": "text", "text": text} for text in _texts(item.get("content", ""), named, "input_text")]
        return {"role": role, "content": parts}
    if kind == "function_call_output" and isinstance(item.get("output"), str):
        return {"role": "tool", "tool_call_id": item.get("call_id", ""), "content": item["output"]}
    if kind == "function_call":
        call = {"name": item.get("name", ""), "arguments": item.get("arguments", "")}
        return {
            "role": "assistant",
            "tool_calls": [{"id": item.get("call_id", ""), "type": "function", "function": call}],
        }
    raise NotConverted(f"it holds an item of the kind {kind!r}")


def _strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {"strict": True, **{name: value for name, value in tool.items() if name != "type"}}


def _tool(tool: dict[str, Any], parameters: Any) -> dict[str, Any]:
    told = {"name": tool.get("name", ""), "description": tool.get("description", ""), "parameters": parameters}
    return {"type": "function", "function": told}


def _objects(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise NotConverted("a list of objects is missing")
    return value


def _texts(content: Any, *kinds: str) -> Iterator[str]:
    """The texts of a content that is one, or of its parts."""
    if isinstance(content, str):
        yield content
        return
    for part in _objects(content):
        if part.get("type") not in kinds:
            raise NotConverted(f"it holds a part of the kind {part.get('type')!r}")
        yield str(part.get("text", ""))


_CHOOSES = "The server itself chooses a slot for this route; with one slot (-np 1) it is cached."

_MESSAGES = Route(from_messages, keeps_slot=False, why_not=_CHOOSES)
_RESPONSES = Route(from_responses, keeps_slot=True)

ROUTES = {"/v1/messages": _MESSAGES, "/v1/responses": _RESPONSES, "/responses": _RESPONSES}
