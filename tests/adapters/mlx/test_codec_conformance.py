"""The suite for adapters, for every codec: one way of keeping state each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from matrix import Runner, one_by_one, runner
from mlx_lm.models.cache import KVCache

from rewarm.adapters.mlx import codec
from rewarm.state.sequence import SequenceState
from rewarm.testing.conformance import CodecConformance, CodecEngine

NAMES = (
    "llama", "concatenated", "quantised", "gemma3_text", "kept ring", "llama4", "mamba2", "falcon_h1", "deepseek_v41",
)  # fmt: skip


class Novel(KVCache):  # type: ignore[misc]
    """A class that no codec knows."""


class MlxEngine(CodecEngine):
    """A tiny model. It evaluates a token at a time, so that bits do not depend on how the suite cuts its runs."""

    refusal = codec.UnsupportedCache

    def __init__(self, it: Runner) -> None:
        self._it = it

    def run(self, tokens: Sequence[int], live: Any = None) -> Any:
        n, caches = live if live is not None else (0, self._it.fresh())
        self._it.run(caches, tokens, one_by_one(len(tokens), 0))
        return n + len(tokens), caches

    def encode(self, live: Any) -> SequenceState:
        n, caches = live
        return self._it.encode(caches, n)

    def decode(self, state: SequenceState) -> Any:
        return state.n_tokens, codec.decode(state, self._it.fresh())

    def unknown(self) -> Any:
        return 1, [Novel()]


class TestMlxCodecs(CodecConformance):
    @pytest.fixture(autouse=True, params=NAMES)
    def _named(self, request: pytest.FixtureRequest) -> None:
        self._name = request.param

    def engine(self) -> CodecEngine:
        return MlxEngine(runner(self._name))
