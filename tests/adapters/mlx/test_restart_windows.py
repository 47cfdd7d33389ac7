"""Models whose states cannot be cut survive a restart of the real server: sliding windows, hybrids, states alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import config_of
from serving import Server, reply
from tiny_models import write_model

pytestmark = pytest.mark.engine

SYSTEM = "You are a guide to rivers and lakes. " * 9
WORD = "There"
VOCAB = 49152
FAMILIES = [
    "gemma3_text",
    "qwen3_next",
    pytest.param("mamba2", marks=pytest.mark.long),
    pytest.param("falcon_h1", marks=pytest.mark.long),
    pytest.param("llama4", marks=pytest.mark.long),
]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, bundled_model: Path, tmp_path: Path) -> Path:
    """A folder with a tiny model of the family; its windows are shorter than every prompt here."""
    config = config_of(request.param)
    for one in (config, config.get("text_config", {})):
        if "vocab_size" in one:
            one["vocab_size"] = VOCAB
    return write_model(tmp_path / request.param, config, bundled_model)


def test_a_conversation_and_a_system_prompt_survive_a_restart(
    model: Path, serve: Callable[..., Server], bundled_model: Path, tmp_path: Path
) -> None:
    first = "Where does the Danube begin?"
    # A random model answers with anything, half a character too; this is a token that comes back as it went.
    answer = {"max_tokens": 1, "logit_bias": {str(token_of(bundled_model, WORD)): 1000.0}}
    with serve(model) as server:
        cold = server.chat(first, system=SYSTEM, **answer)
        assert reply(cold) == WORD
        assert server.terminate() == 0
        assert "uncached" not in server.text()
    with serve(model, "--rewarm-dir", str(tmp_path / "uninterrupted"), "--rewarm-min-free", "1MB") as server:
        server.chat(first, system=SYSTEM, **answer)
        live = server.chat(first, WORD, "And where does it end?", system=SYSTEM, max_tokens=8)
    with serve(model) as server:
        again = server.chat(first, WORD, "And where does it end?", system=SYSTEM, max_tokens=8)
        assert again["rewarm"]["disk_tokens"] == cached(again) == cold["usage"]["total_tokens"]
        assert reply(again) == reply(live)
        other = server.chat("What is a lake?", system=SYSTEM, max_tokens=4)
        assert cached(other) == n_system_tokens(bundled_model)
        assert server.terminate() == 0


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def token_of(folder: Path, word: str) -> int:
    """The one token of a word."""
    from mlx_lm.utils import load_tokenizer

    (token,) = load_tokenizer(folder).encode(word, add_special_tokens=False)
    return int(token)


def n_system_tokens(folder: Path) -> int:
    """Tokens up to where two conversations with this system prompt part."""
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(folder)
    head = {"role": "system", "content": SYSTEM}
    one, two = (
        tokenizer.apply_chat_template([head, {"role": "user", "content": text}], add_generation_prompt=True)
        for text in ("ab", "yz")
    )
    return next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
