"""The few facts in a GGUF file's header that the cache needs: the sliding window and the trained context.

Reads metadata and the names of tensors, no weights; the long arrays of a tokenizer are skipped. Knows
nothing of servers and states.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"GGUF"

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_STRING_NBYTES = 1 << 24
_MAX_NESTING = 4


@dataclass(frozen=True, slots=True)
class Facts:
    """What the header says.

    Attributes:
        architecture: the model's family, such as `gemma3`.
        n_swa: tokens of the sliding window; 0 for models without one.
        n_ctx_train: tokens that the model was trained for.
        long_rope: whether the positions' factors are chosen by the size of the context.
        has_template: whether it brings a chat template; llama-server takes another model's for one that does not.
    """

    architecture: str
    n_swa: int
    n_ctx_train: int
    long_rope: bool
    has_template: bool = False


def read(path: Path) -> Facts:
    """The facts in the header of the GGUF file at `path`: the first one of a model in shards.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no GGUF file of version 2 or 3, or a torn one.
    """
    with path.open("rb") as stream:
        if stream.read(4) != MAGIC or _number(stream, "I") not in (2, 3):
            raise ValueError(f"{path.name} is no GGUF file of a version that is known")
        n_tensors, n_pairs = _number(stream, "Q"), _number(stream, "Q")
        found: dict[str, Any] = {}
        for _ in range(n_pairs):
            key = _text(stream)
            found[key] = _value(stream, _number(stream, "I"), 0)
        long_rope = any(_tensor_name(stream).startswith("rope_factors_long") for _ in range(n_tensors))
    family = str(found.get("general.architecture", ""))
    return Facts(
        family,
        _whole(found.get(f"{family}.attention.sliding_window")),
        _whole(found.get(f"{family}.context_length")),
        long_rope,
        "tokenizer.chat_template" in found,
    )


_GEMMA = (
    "{{ bos_token }}{% set first = '' %}{% set rest = messages %}"
    "{% if messages[0]['role'] == 'system' %}"
    "{% set first = messages[0]['content'] + '\n\n' %}{% set rest = messages[1:] %}{% endif %}"
    "{% for m in rest %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else 'user' }}\n"
    "{{ first if loop.first else '' }}{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_TEMPLATES = {"gemma": _GEMMA, "gemma2": _GEMMA, "gemma3": _GEMMA}
"""Templates (Jinja) of families whose files are about without one. llama-server would take ChatML for them."""


def template_flags(path: Path) -> list[str]:
    """Flags that give a model without a chat template its family's, where that is known; else none.

    Raises:
        OSError, ValueError: as `read`.
    """
    facts = read(path)
    template = "" if facts.has_template else _TEMPLATES.get(facts.architecture, "")
    return ["--chat-template", template] if template else []


def _value(stream: BinaryIO, kind: int, depth: int) -> Any:
    if kind in _SCALARS:
        return _number(stream, _SCALARS[kind])
    if kind == _STRING:
        return _text(stream)
    if kind != _ARRAY or depth > _MAX_NESTING:
        raise ValueError(f"a value of unknown type {kind}")
    inner, n = _number(stream, "I"), _number(stream, "Q")
    if inner in _SCALARS:
        stream.seek(n * struct.calcsize("<" + _SCALARS[inner]), 1)
    elif inner == _STRING:
        for _ in range(n):
            stream.seek(_number(stream, "Q"), 1)
    else:
        for _ in range(n):
            _value(stream, inner, depth + 1)
    return None


def _tensor_name(stream: BinaryIO) -> str:
    name = _text(stream)
    n_dimensions = _number(stream, "I")
    stream.seek(8 * n_dimensions + 4 + 8, 1)
    return name


def _text(stream: BinaryIO) -> str:
    n = _number(stream, "Q")
    if n > _MAX_STRING_NBYTES:
        raise ValueError(f"a string of {n} bytes")
    raw = stream.read(n)
    if len(raw) != n:
        raise ValueError("the file ends in its header")
    return raw.decode("utf-8", "replace")


def _number(stream: BinaryIO, code: str) -> Any:
    raw = stream.read(struct.calcsize("<" + code))
    try:
        return struct.unpack("<" + code, raw)[0]
    except struct.error:
        raise ValueError("the file ends in its header") from None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
