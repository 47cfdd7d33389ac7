"""From a request's body to the tokens that llama-server will see, by asking the server itself.

What cannot be known for sure (images, several prompts at once, routes that the server converts inside) is
served uncached, with the reason. Knows no slots and no store.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewarm.adapters.llama import converted
from rewarm.adapters.llama.engine import Engine, Refused
from rewarm.adapters.llama.slots import NO_TOKENS, Tokens, n_common
from rewarm.state.reason import Reason

CHAT = frozenset({"/v1/chat/completions", "/chat/completions"})
TEXT = frozenset({"/v1/completions", "/completions", "/completion"})
CONVERTED = converted.ROUTES
READ = CHAT | TEXT | CONVERTED.keys()
"""Routes whose requests can be read."""

_SYSTEM_ROLES = ("system", "developer")
_PROBES = tuple({"role": "user", "content": text} for text in ("Hello", "1 + 1 = ?"))
"""Stand for whatever the user says, to see where the system prompt ends."""

_NOT_IN_TEMPLATES = frozenset(
    {"messages", "max_tokens", "n_predict", "seed", "stream", "stream_options", "temperature", "top_k", "top_p", "stop"}
)

_REMEMBERED = 64


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A request's prompt.

    Attributes:
        tokens: as the server will see them; none where that is not known.
        n_system: where the system prompt ends in them; 0 where there is none.
        why_not: why the request is served uncached; `HIT` when it is not.
        detail: the same as a sentence.
        taint: why the slot that serves it must not be reused afterwards; "" when it may.
    """

    tokens: Tokens
    n_system: int = 0
    why_not: Reason = Reason.HIT
    detail: str = ""
    taint: str = ""


NOT_READ = Prompt(NO_TOKENS)
"""Of a request whose prompt nobody needs to know."""


def uncached(detail: str, taint: str = "") -> Prompt:
    """A prompt that is served without the cache."""
    return Prompt(NO_TOKENS, why_not=Reason.DISABLED, detail=detail, taint=taint)


class Prompts:
    """Reads prompts, with the server's template and tokenizer.

    Args:
        engine: the server.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._systems: OrderedDict[str, Tokens] = OrderedDict()

    def read(self, path: str, body: Mapping[str, Any]) -> Prompt:
        """The prompt of a request to `path`, which is one of `READ`.

        Raises:
            EngineGone: the engine ended.
        """
        if taint := what_taints(body):
            return uncached(f"{taint}; it is served uncached.", taint)
        if body.get("cache_prompt") is False:
            return uncached("The request asks for no cache (cache_prompt is false).")
        if _number(body.get("n"), 1) != 1 or _number(body.get("n_cmpl"), 1) != 1:
            return uncached("Requests for several replies at once are served uncached.")
        try:
            if path in CONVERTED:
                return self._chat(CONVERTED[path].convert(body))
            return self._chat(body) if path in CHAT else self._text(body)
        except converted.NotConverted as error:
            return uncached(f"This request is served uncached: {error}.")
        except Refused as error:
            # The server will say the same of the request itself.
            return uncached(f"The server cannot read this prompt: {error}")

    def _chat(self, body: Mapping[str, Any]) -> Prompt:
        messages = body.get("messages")
        if not isinstance(messages, list) or _has_media(messages):
            return uncached("Requests with images or sound are served uncached.")
        tokens = self._tokenise(self._template(body))
        return Prompt(tokens, self._system_end(body, messages, tokens))

    def _text(self, body: Mapping[str, Any]) -> Prompt:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return Prompt(self._tokenise(prompt))
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return Prompt(np.array(prompt, np.int64))
        return uncached("Several prompts at once, or prompts with media, are served uncached.")

    def _template(self, body: Mapping[str, Any]) -> str:
        return str(self._engine.ask("POST", "/apply-template", body)["prompt"])

    def _tokenise(self, text: str) -> Tokens:
        wanted = {"content": text, "add_special": True, "parse_special": True}
        return np.array(self._engine.ask("POST", "/tokenize", wanted)["tokens"], np.int64)

    def _system_end(self, body: Mapping[str, Any], messages: list[Any], tokens: Tokens) -> int:
        """Tokens up to where the user begins to speak: what two conversations of one system prompt share."""
        first = messages[0] if messages else None
        if not isinstance(first, dict) or first.get("role") not in _SYSTEM_ROLES or len(messages) < 2:
            return 0
        rest = {name: value for name, value in body.items() if name not in _NOT_IN_TEMPLATES}
        key = json.dumps([first, rest], sort_keys=True)
        if key not in self._systems:
            one, two = (self._tokenise(self._template({**rest, "messages": [first, said]})) for said in _PROBES)
            self._systems[key] = one[: n_common(one, two)]
            while len(self._systems) > _REMEMBERED:
                self._systems.popitem(last=False)
        system = self._systems[key]
        return len(system) if n_common(system, tokens) == len(system) else 0


def what_taints(body: Mapping[str, Any]) -> str:
    """What in a request makes its slot hold cells that were not computed for its token list alone; or ""."""
    if body.get("lora"):
        return "The request brings LoRA scales of its own"
    if _number(body.get("n_cache_reuse"), 0) > 0:
        return "The request lets the server move its cache (n_cache_reuse)"
    return ""


def _has_media(messages: list[Any]) -> bool:
    for message in messages:
        parts = message.get("content") if isinstance(message, dict) else None
        if isinstance(parts, list) and any(not isinstance(p, dict) or p.get("type") != "text" for p in parts):
            return True
    return False


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
