"""Whether a model's caches can be saved and restored, tried out at load: new architectures arrive monthly.

A codec knows classes, not models. A model may keep state outside its caches, or use a class in a way of its
own; then what is restored would not be what a cold run holds. So each model is asked before anything of it is
saved: a probe of two chunks, the first one saved and restored in memory, the second one evaluated on both.
Between the two, another prompt is evaluated, so that state elsewhere would be seen.

It evaluates twelve tokens in six steps, whatever the model, and compiles the engine's kernels on the way, which
the first request would have paid for otherwise. Runs on the thread that generates. Knows nothing of identities
or of the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from rewarm.adapters.mlx import codec
from rewarm.state.sequence import SequenceState

log = logging.getLogger(__name__)

_FIRST = (3, 5, 7, 2)
_SECOND = ((6, 8), (1,))
"""A chunk, then a single token, as a reply begins."""

_OTHER = (9, 4)


def run(model: nn.Module) -> None:
    """Save, restore and extend a probe.

    Raises:
        UnsupportedCache: a cache has no codec, or the restored probe differs in a bit from the live one.
    """
    started = time.perf_counter()
    codec.check(make_prompt_cache(model))
    try:
        _probe(model)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # Whatever is wrong with a model, or with a codec, costs the cache and not the request.
        if isinstance(error, codec.UnsupportedCache):
            raise
        raise codec.UnsupportedCache(f"the self-test failed: {type(error).__name__}: {error}") from error
    log.debug("rewarm: self-test passed in %.2f s", time.perf_counter() - started)


def _probe(model: nn.Module) -> None:
    live = make_prompt_cache(model)
    _evaluate(model, live, [_FIRST])
    state = _copied(codec.encode(live, len(_FIRST)))
    wanted = _evaluate(model, live, _SECOND)
    _evaluate(model, make_prompt_cache(model), [_OTHER])
    restored = codec.decode(state, make_prompt_cache(model))
    _compare(state, codec.encode(restored, len(_FIRST)), "what was restored is not what was saved")
    found = _evaluate(model, restored, _SECOND)
    if not all(np.array_equal(one, two, equal_nan=True) for one, two in zip(found, wanted, strict=True)):
        raise codec.UnsupportedCache("the self-test failed: a restored probe gave other logits than the live one")
    n = len(_FIRST) + sum(map(len, _SECOND))
    _compare(codec.encode(live, n), codec.encode(restored, n), "a restored probe went on to another state")


def _evaluate(model: nn.Module, caches: list[Any], chunks: Sequence[Sequence[int]]) -> list[Any]:
    found = []
    for chunk in chunks:
        logits = model(mx.array([list(chunk)]), cache=caches)
        found.append(np.array(logits.astype(mx.float32)))
    return found


def _copied(state: SequenceState) -> SequenceState:
    tensors = {name: replace(tensor, array=np.array(tensor.array)) for name, tensor in state.tensors.items()}
    return replace(state, tensors=tensors, meta=dict(state.meta))


def _compare(one: SequenceState, two: SequenceState, what: str) -> None:
    equal = one.tensors.keys() == two.tensors.keys() and one.layout() == two.layout()
    if not equal or any(_bits(one, name) != _bits(two, name) for name in one.tensors):
        raise codec.UnsupportedCache(f"the self-test failed: {what}")


def _bits(state: SequenceState, name: str) -> bytes:
    return np.ascontiguousarray(state.tensors[name].array).tobytes()
