"""The probe that tells whether another version of mlx-lm computes the same KV: see `rewarm.cache.epochs`.

Runs on the thread that generates. It knows a model and its caches, not identities and not the store.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from rewarm.adapters.mlx import codec
from rewarm.cache.epochs import PROBE_TOKENS
from rewarm.state.sequence import SequenceState

PIECES = (len(PROBE_TOKENS), 24)
"""Tokens that each of the two chunk plans evaluates at once."""


def states(model: nn.Module) -> list[SequenceState]:
    """The model's states after the probe's tokens, one for each chunk plan, in arrays of their own."""
    return [_state(model, piece) for piece in PIECES]


def _state(model: nn.Module, piece: int) -> SequenceState:
    caches = make_prompt_cache(model)
    for start in range(0, len(PROBE_TOKENS), piece):
        mx.eval(model(mx.array([PROBE_TOKENS[start : start + piece]]), cache=caches))
    state = codec.encode(caches, len(PROBE_TOKENS))
    tensors = {name: replace(tensor, array=np.array(tensor.array)) for name, tensor in state.tensors.items()}
    return replace(state, tensors=tensors)
