"""A prompt cache for programs that call `stream_generate` themselves.

    import rewarm
    from mlx_lm import load, stream_generate
    from rewarm.adapters.mlx import PromptCache

    model, tokenizer = load(path)
    prompts = PromptCache(model, tokenizer, rewarm.open())
    prompt_cache, rest = prompts.fetch(tokens)
    for response in stream_generate(model, tokenizer, rest, prompt_cache=prompt_cache):
        tokens.append(response.token)
    prompts.insert(tokens, prompt_cache)

Call it on the thread that generates. Knows nothing of servers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from rewarm.adapters.mlx import codec
from rewarm.adapters.mlx.disk_tier import DiskTier, Restored
from rewarm.adapters.mlx.identity import from_live_model
from rewarm.cache.identity import Identity
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.state.reason import Boundary, Reason

log = logging.getLogger(__name__)


class PromptCache:
    """Fetches and inserts mlx-lm's prompt caches in a prefix cache on disk.

    Args:
        model: as `mlx_lm.load` gives it.
        tokenizer: kept for callers; tokens alone decide what matches.
        cache: from `rewarm.open`.
        identity: of the model; without it the bytes of all its parameters are hashed now, on this thread.
            A model that was loaded from files has a cheaper one in `rewarm.adapters.mlx.identity.from_files`.

    Attributes:
        last: what the last `fetch` restored, and why not more.
        reason: why this model is served uncached, or "".
    """

    def __init__(self, model: nn.Module, tokenizer: Any, cache: PrefixCache, identity: Identity | None = None) -> None:
        self.tokenizer = tokenizer
        self.reason = ""
        self.last = Restored(None, 0, Reason.NOTHING_STORED, "", 0.0)
        self._model = model
        self._tier: DiskTier | None = None
        try:
            codec.check(make_prompt_cache(model))
            self._tier = DiskTier(cache, identity or from_live_model(model), model)
        except codec.UnsupportedCache as error:
            self.reason = f"this model is served uncached: {error}"
            self.last = Restored(None, 0, Reason.DISABLED, self.reason, 0.0)
            log.warning("rewarm: %s", self.reason)

    def fetch(self, tokens: Sequence[int]) -> tuple[list[Any], list[int]]:
        """The caches of the longest stored prefix, and the tokens that are left to evaluate, at least one.

        At a miss the caches are fresh ones and all tokens are left.

        Raises:
            ValueError: `tokens` is empty.
        """
        prompt = list(tokens)
        if not prompt:
            raise ValueError("fetch of no tokens")
        if self._tier is not None:
            self.last = self._tier.restore(prompt, at_most=len(prompt) - 1, always=True)
            if self.last.caches is not None:
                return self.last.caches, prompt[self.last.n_tokens :]
        return make_prompt_cache(self._model), prompt

    def insert(self, tokens: Sequence[int], prompt_cache: Sequence[Any], boundary: str = "assistant") -> None:
        """Keep the state of `prompt_cache`, which holds `tokens`. The caches stay the caller's.

        Args:
            tokens: prompt and reply. When list and caches differ in length, the shorter one counts.
            prompt_cache: the caches that `stream_generate` has filled.
            boundary: what ends here: "system", "user", "assistant" or "prefill".

        Raises:
            ValueError: `boundary` is none of these.
        """
        if self._tier is not None:
            self._tier.save(list(tokens), prompt_cache, Boundary(boundary))
