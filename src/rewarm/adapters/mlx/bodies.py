"""What a request's body may hold: checked before it reaches the engine, where a wrong value would end every reply.

mlx-lm checks some fields by itself; what it lets through, and fails at on the thread that generates, is refused
here. What depends on the model (ids within its vocabulary) is the generator's to check. Knows nothing of HTTP.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_NBYTES = 64 * 2**20
_MOST = 2**31 - 1
_MAX_BIASES = 4096

_TEMPLATE_OWN = frozenset(
    {"add_generation_prompt", "chat_template", "conversation", "messages", "return_dict", "return_tensors"}
    | {"tokenize", "tools"}
)
"""Arguments of `apply_chat_template` that are the server's."""


class BadRequest(ValueError):
    """A request makes no sense.

    Attributes:
        field: the field in question, or None.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def read(raw: bytes, *, is_chat: bool) -> dict[str, Any]:
    """The body as an object that the engine can be given: every field right, those that are null left out.

    Raises:
        BadRequest: it is no JSON object, or a field has a value that the engine would fail at.
    """
    try:
        body = json.loads(raw.decode())
    except UnicodeDecodeError:
        raise BadRequest("Invalid JSON in request body: it is not UTF-8.") from None
    except ValueError as error:
        raise BadRequest(f"Invalid JSON in request body: {error}.") from None
    except RecursionError:
        raise BadRequest("Invalid JSON in request body: it is nested too deep.") from None
    if not isinstance(body, dict):
        raise BadRequest("The request body must be a JSON object.")
    found = {name: value for name, value in body.items() if value is not None}
    for name, check in _CHECKS.items():
        if name in found:
            found[name] = check(name, found[name])
    (_check_messages if is_chat else _check_prompt)(found)
    return found


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false.", name)
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a string.", name)
    return value


def _integer(least: int, most: int = _MOST) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise BadRequest(f"{name} must be an integer from {least} to {most}.", name)
        return value

    return check


def _number(least: float, most: float) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise BadRequest(f"{name} must be a number from {least:g} to {most:g}.", name)
        return float(value)

    return check


def _stop(name: str, value: Any) -> list[str]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise BadRequest("stop must be a string or a list of strings.", name)
    return [word for word in words if word]


def _bias(name: str, value: Any) -> dict[str, float]:
    problem = BadRequest("logit_bias must map token ids to numbers.", name)
    if not isinstance(value, dict):
        raise problem
    if len(value) > _MAX_BIASES:
        raise BadRequest(f"logit_bias must have at most {_MAX_BIASES} token ids.", name)
    for key, bias in value.items():
        if not (key.isdecimal() and key.isascii() and int(key[:20]) <= _MOST):
            raise problem
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not math.isfinite(bias):
            raise problem
    return value


def _alone(name: str, value: Any) -> int:
    if value != 1 or isinstance(value, bool):
        raise BadRequest("n must be 1: this server gives one choice for each request.", name)
    return 1


def _objects(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise BadRequest(f"{name} must be a list of objects.", name)
    return value


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object.", name)
    return value


def _template_arguments(name: str, value: Any) -> dict[str, Any]:
    if own := sorted(_TEMPLATE_OWN & set(_object(name, value))):
        raise BadRequest(f"{name} cannot set {', '.join(own)}.", name)
    return dict(value)


_context = _integer(0)
_penalty = _number(-1000, 1000)

_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "model": _text,
    "adapters": _text,
    "draft_model": _text,
    "stream": _flag,
    "stream_options": _object,
    "n": _alone,
    "max_tokens": _integer(1),
    "max_completion_tokens": _integer(1),
    "temperature": _number(0, 1000),
    "top_p": _number(0, 1),
    "min_p": _number(0, 1),
    "top_k": _integer(0),
    "seed": _integer(0, 2**63 - 1),
    "repetition_penalty": _number(0, 1000),
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "repetition_context_size": _context,
    "presence_context_size": _context,
    "frequency_context_size": _context,
    # Beyond one half, and for all tokens at once, nothing would be left to choose from.
    "xtc_probability": _number(0, 1),
    "xtc_threshold": _number(0, 0.5),
    "num_draft_tokens": _integer(0, 64),
    "logit_bias": _bias,
    "stop": _stop,
    "tools": _objects,
    "role_mapping": _object,
    "chat_template_kwargs": _template_arguments,
}


def _check_messages(body: dict[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message.", "messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{i}] must be an object with a role.", "messages")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            _check_parts(i, content)


def _check_parts(i: int, content: Any) -> None:
    if not isinstance(content, list):
        raise BadRequest(f"messages[{i}].content must be a string or a list of parts.", "messages")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise BadRequest(f"messages[{i}].content has a part without a type.", "messages")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise BadRequest(f"messages[{i}].content has a text part without text.", "messages")


def _check_prompt(body: dict[str, Any]) -> None:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = body["prompt"] = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise BadRequest("prompt must be one string that is not empty.", "prompt")
