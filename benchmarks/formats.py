"""Restoring, against other ways of keeping the same arrays: each as its own users use it, none with checksums.

- mlx-lm's own files: `save_prompt_cache`, then `load_prompt_cache` and an evaluation of every array
- safetensors to numpy: `save_file`, then `load_file`
- llama-cpp-python's disk cache: an object with a state's bytes, pickled by diskcache (`LlamaDiskCache` keeps a
  `LlamaState`: token ids, logits and the bytes of `llama_state_get_data`)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import diskcache
import mlx.core as mx
import numpy as np
import safetensors.numpy
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

import rewarm
from benchmarks.restoring import UNBOUNDED, restore, save_whole
from benchmarks.rounds import Result, alternate, cold, ratios
from benchmarks.states import SHAPES, nbytes_of, state_of, tokens_of
from rewarm.adapters.mlx import codec


@dataclass
class LlamaState:
    """What llama-cpp-python pickles; the bytes are those of the KV cache."""

    input_ids: Any
    scores: Any
    n_tokens: int
    llama_state: bytes
    llama_state_size: int
    seed: int


def into_mlx(space: rewarm.Namespace, n_tokens: int, n_layers: int) -> list[Any]:
    """Restore into MLX's own memory, as the mlx-lm adapter does."""
    match = space.find(tokens_of(n_tokens + 1))
    assert match.layout is not None
    buffers = codec.Buffers(match.layout, match.n_tokens)
    state = space.restore(match, into=buffers.into)
    if state.n_tokens != n_tokens:
        raise RuntimeError(f"{state.n_tokens} of {n_tokens} tokens were restored: {state.reason}")
    return codec.decode(state, [KVCache() for _ in range(n_layers)], buffers)


def load_mlx(path: Path) -> list[Any]:
    """mlx-lm's own way, and every array in memory."""
    caches = load_prompt_cache(str(path))
    mx.eval([array for cache in caches for array in (cache.keys, cache.values)])
    return caches


def load_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Every array of the file."""
    return safetensors.numpy.load_file(path)


def load_pickled(folder: Path) -> Any:
    """The state, unpickled, in a cache that is opened for it as after a restart."""
    with diskcache.Cache(str(folder)) as cache:
        return cache["state"]


def against_formats(folder: Path, rounds: int, name: str, n_tokens: int) -> list[Result]:
    """Each, cold and warm."""
    root = folder / f"formats-{name}-{n_tokens}"
    shape = SHAPES[name]
    state = state_of(shape, n_tokens)
    results = []
    with rewarm.open(root, limits=UNBOUNDED) as cache:
        space = cache.namespace(rewarm.Identity({"weights": name}))
        save_whole(cache, space, tokens_of(n_tokens), state)
        peers = _written(root, state, n_tokens)
        nbytes = nbytes_of(state)
        del state
        for what, (ours_is_mlx, load) in peers.items():
            ours = (
                partial(into_mlx, space, n_tokens, shape.layers) if ours_is_mlx else partial(restore, space, n_tokens)
            )
            for is_cold in (True, False):
                took, theirs = alternate(ours, load, rounds, cold if is_cold else None)
                results.append(
                    Result(
                        f"restore{' into MLX' if ours_is_mlx else ''}, {name}, {n_tokens:,} tokens, "
                        f"{nbytes / 2**20:,.0f} MiB, {'cold' if is_cold else 'warm'} page cache",
                        what,
                        ratios(took, theirs),
                        at_least=1.0,
                        shown={"ours_s": took, "theirs_s": theirs, "nbytes": nbytes},
                    )
                )
    shutil.rmtree(root)
    return results


def _written(root: Path, state: rewarm.SequenceState, n_tokens: int) -> dict[str, tuple[bool, Callable[[], object]]]:
    """The same arrays in the peers' files; whether each gives MLX's arrays, and how it is read."""
    arrays = {key: tensor.array for key, tensor in state.tensors.items()}
    caches = codec.decode(state, [KVCache() for _ in range(len(arrays) // 2)])
    save_prompt_cache(str(root / "mlx.safetensors"), caches)
    del caches
    safetensors.numpy.save_file(arrays, root / "numpy.safetensors")
    payload = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    with diskcache.Cache(str(root / "diskcache"), size_limit=2**50) as peer:
        ids = np.array(tokens_of(n_tokens), np.intc)
        peer["state"] = LlamaState(ids, np.zeros((1, 32000), np.single), n_tokens, payload, len(payload), 0)
    return {
        "mlx-lm's load_prompt_cache, evaluated": (True, partial(load_mlx, root / "mlx.safetensors")),
        "safetensors to numpy": (False, partial(load_safetensors, root / "numpy.safetensors")),
        "llama-cpp-python's disk cache": (False, partial(load_pickled, root / "diskcache")),
    }
