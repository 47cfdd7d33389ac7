"""Tiny random models of mlx-lm's own classes: quick on any machine, and sensitive to every row."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from families import config_of
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import llama

TOKENS = [(i * i * 31 + 7 * i + 3) % 500 for i in range(600)]
"""Token ids without a short period."""


def llama_config(layers: int = 2, vocab: int = 512) -> dict[str, Any]:
    """A llama of width 64 with two KV heads of dimension 32."""
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }


def gemma_config(vocab: int = 512) -> dict[str, Any]:
    """A Gemma 3 with a sliding window of 32 on every second layer."""
    return {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": vocab,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
    }


def tiny_llama(layers: int = 2, vocab: int = 512, seed: int = 0, dtype: mx.Dtype = mx.bfloat16) -> Any:
    """A llama with random weights; the same seed gives the same ones."""
    return _random(llama.Model(llama.ModelArgs.from_dict(llama_config(layers, vocab))), seed, dtype)


def tiny(family: str, dtype: mx.Dtype = mx.float32, seed: int = 0, **changes: Any) -> Any:
    """A model of `families.FAMILIES` with random weights; the same seed gives the same ones.

    In bfloat16 the experts of a mixture stay in float32: MLX's CPU backend gathers no other. What follows the
    first of them is then float32 too, so such a state holds elements of both types.
    """
    return _random(_made(config_of(family) | changes), seed, dtype)


def write_model(folder: Path, config: dict[str, Any], tokenizer_from: Path, seed: int = 0) -> Path:
    """A folder that mlx-lm loads: random fp32 weights for `config`, with the tokenizer of another model folder.

    In fp32 another chunk plan changes no word of a reply, so texts can be compared.
    """
    model = _random(_made(config), seed, mx.float32)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 2, "bos_token_id": 1}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer_from / name).read_bytes())
    return folder


def write_unknown_model(folder: Path, config: dict[str, Any], tokenizer_from: Path) -> Path:
    """A llama whose layers use a cache class of their own; it needs `--trust-remote-code`."""
    write_model(folder, {**config, "model_file": "model.py"}, tokenizer_from)
    (folder / "model.py").write_text(UNKNOWN)
    return folder


UNKNOWN = """
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
from mlx_lm.models.llama import ModelArgs

class NovelCache(KVCache):
    pass

class Model(llama.Model):
    def make_cache(self):
        return [NovelCache() for _ in self.layers]
"""


def _made(config: dict[str, Any]) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    return module.Model(module.ModelArgs.from_dict(config))


def _random(model: Any, seed: int, dtype: mx.Dtype) -> Any:
    parameters = model.parameters()
    keys = iter(mx.random.split(mx.random.key(seed), len(tree_flatten(parameters))))

    def filled(path: str, old: mx.array) -> mx.array:
        key = next(keys)
        if not mx.issubdtype(old.dtype, mx.floating):
            return old
        expert = "switch_mlp" in path or "experts" in path
        return (mx.random.normal(old.shape, key=key) * 0.2).astype(mx.float32 if expert else dtype)

    model.update(tree_map_with_path(filled, parameters))
    mx.eval(model.parameters())
    return model
