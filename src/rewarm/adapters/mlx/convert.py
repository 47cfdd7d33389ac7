"""Makes a folder that mlx-lm loads out of the GGUF file of SmolLM2: weights in bf16, tokenizer, config.

Run as a program, `python -m rewarm.adapters.mlx.convert GGUF FOLDER`; prints one line per step, the
part that is done and what is being done. Knows llama-like models with a byte-level BPE tokenizer only,
and nothing of where the file comes from or the folder goes to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

_GROUP_SIZE = 32
_SPECIAL = 3
"""The GGUF token type of control tokens."""

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Metadata = Mapping[str, Any]
Arrays = Mapping[str, mx.array]
Report = Callable[[float, str], None]


def convert(source: Path, folder: Path, report: Report) -> None:
    """Write `config.json`, `generation_config.json`, weights and tokenizer files into `folder`."""
    report(0.0, "reading the weights")
    # The CPU on every platform: the same bytes everywhere, so a converted model has one identity.
    with mx.stream(mx.cpu):
        loaded: Any = mx.load(str(source), return_metadata=True)
        arrays, raw = loaded
        metadata = {key: _plain(value) for key, value in raw.items()}
        config = model_config(metadata)
        weights = _weights(arrays, config, report)
        report(0.85, "writing the weights")
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    report(0.95, "writing the tokenizer")
    _write_json(folder / "config.json", config)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ends)
    tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    report(1.0, "done")


def model_config(metadata: Metadata) -> dict[str, Any]:
    """The model's `config.json`, as transformers and mlx-lm read it."""
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": metadata["llama.embedding_length"],
        "head_dim": metadata["llama.embedding_length"] // heads,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "max_position_embeddings": metadata["llama.context_length"],
        "vocab_size": metadata["llama.vocab_size"],
        "tie_word_embeddings": True,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def tokenizer(metadata: Metadata) -> Tokenizer:
    """BPE over tokens and merges; single digits, then byte level, without a space in front."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])]
    made = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    made.decoder = ByteLevelDecoder()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return made


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """`tokenizer_config.json`, with the chat template; a reply ends at `<|im_end|>`."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _weights(arrays: Mapping[str, mx.array], config: Mapping[str, Any], report: Report) -> dict[str, mx.array]:
    names = sorted(name.removesuffix(".weight") for name in arrays if name.endswith(".weight"))
    made = {}
    for i, name in enumerate(names):
        weight = _unpack(arrays, name)
        kind = name.rsplit(".", 1)[-1]
        if kind in ("attn_q", "attn_k"):
            weight = _unpermute(weight, config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"])
        made[_mlx_name(name)] = weight.astype(mx.bfloat16)
        mx.eval(made[_mlx_name(name)])
        report(0.05 + 0.8 * (i + 1) / len(names), "converting the weights")
    return made


def _unpack(arrays: Arrays, name: str) -> mx.array:
    """The tensor in fp32: rounding to bf16 then happens once."""
    weight = arrays[f"{name}.weight"]
    if f"{name}.scales" not in arrays:
        return weight.astype(mx.float32)
    scales, biases = (arrays[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    bits = 32 * weight.shape[-1] // (scales.shape[-1] * _GROUP_SIZE)
    return mx.dequantize(weight, scales, biases, group_size=_GROUP_SIZE, bits=bits)


def _unpermute(weight: mx.array, heads: int) -> mx.array:
    """GGUF interleaves each head's rotary rows as (d / 2, 2); mlx-lm's llama wants (2, d / 2)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _mlx_name(name: str) -> str:
    first, _, rest = name.partition(".")
    if first != "blk":
        return f"{_NAMES[first]}.weight"
    layer, _, kind = rest.partition(".")
    return f"model.layers.{layer}.{_NAMES[kind]}.weight"


def _plain(value: Any) -> Any:
    """A metadata value in Python's own types; a float32 in its shortest form (1e-05, not 9.9999997e-06)."""
    if not isinstance(value, mx.array):
        return value
    plain: Any = value.tolist()
    return float(str(np.float32(plain))) if value.dtype == mx.float32 and value.ndim == 0 else plain


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    """Convert argv[1] into the folder argv[2], telling progress on standard output."""

    def report(part: float, what: str) -> None:
        print(f"{part:.3f} {what}", flush=True)  # noqa: T201

    convert(Path(sys.argv[1]), Path(sys.argv[2]), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
