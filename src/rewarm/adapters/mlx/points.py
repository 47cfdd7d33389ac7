"""Where a prompt is stopped at, so that its state can be kept: where its parts end, and where the engine's chunks do.

mlx-lm finds the parts of prompts that end in a user's message. Prompts that end in a tool's result are those of
every agent loop, and have the same ones. Runs on the generation thread; knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx_lm.server as engine

_TAIL_TOKENS = 11
"""As far from its end mlx-lm looks for a thinking tail."""

OnChunk = Callable[[list[int], list[Any]], None]
"""Told tokens, and the caches that hold them, in the middle of a prompt."""


class BatchGenerator(engine.BatchGenerator):
    """mlx-lm's, and whoever wants to know is told where a long prompt's chunks end.

    Args:
        on_chunk: called between two chunks of one part of a prompt.
    """

    def __init__(self, on_chunk: OnChunk, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_chunk = on_chunk

    def next(self) -> Any:
        """One step of the engine."""
        prompts, generated = super().next()
        within = [each.uid for each in prompts if not each.end_of_segment and not each.end_of_prompt]
        for caches, tokens in self.extract_cache(within).values():
            self._on_chunk(tokens, caches)
        return prompts, generated


def parts(tokenizer: Any, request: Any, template_arguments: dict[str, Any], prompt: list[int]) -> tuple[Any, Any]:
    """The prompt in parts, and what each is: its system prompt, what follows, its thinking tail.

    As mlx-lm's `_tokenize` has them of a prompt that ends in a user's message.
    """
    n_system, tail = _system_end(tokenizer, request, template_arguments, prompt), len(prompt)
    if tokenizer.has_thinking:
        found = tokenizer.rfind_think_start(prompt, start=tail - _TAIL_TOKENS)
        tail = found if found >= 0 else tail
    cuts = [(0, n_system, "system"), (n_system, tail, "user"), (max(n_system, tail), len(prompt), "assistant")]
    there = [(first, end, kind) for first, end, kind in cuts if first < end]
    return [prompt[first:end] for first, end, _ in there], [kind for _, _, kind in there]


def _system_end(tokenizer: Any, request: Any, template_arguments: dict[str, Any], prompt: list[int]) -> int:
    """How many tokens the system messages at the prompt's beginning are; 0 where there are none."""
    system = []
    for message in request.messages:
        if message["role"] != "system":
            break
        system.append(message)
    if not system:
        return 0
    alone = tokenizer.apply_chat_template(
        [*system, {"role": "user", "content": ""}],
        add_generation_prompt=False,
        tools=request.tools,
        tokenize=True,
        **template_arguments,
    )
    differs = next((i for i, (a, b) in enumerate(zip(alone, prompt, strict=False)) if a != b), 0)
    return differs if differs < len(prompt) else 0
