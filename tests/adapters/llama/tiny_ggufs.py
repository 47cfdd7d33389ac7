"""Tiny models with random weights, as GGUF files: one for each way in which llama.cpp keeps a sequence's state.

llama   full attention                     keys and values of every layer
qwen2vl full attention, positions of several axes
gemma3  sliding window on 5 of 6 layers    base and window sections
lfm2    attention and short convolutions   attention and recurrent sections
mamba   state space                        recurrent section only
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

N_VOCAB = 3 + 256
WINDOW = 24
"""The sliding window of `gemma3`, in tokens."""

_D, _HEADS, _HEADS_KV, _HEAD_DIM, _FF = 64, 2, 1, 32, 96


class _Writer:
    def __init__(self, path: Path, arch: str, n_layers: int, seed: int) -> None:
        self.out = gguf.GGUFWriter(path, arch)
        self.rng = np.random.default_rng(seed)
        self.n_layers = n_layers
        self.out.add_context_length(4096)
        self.out.add_embedding_length(_D)
        self.out.add_block_count(n_layers)
        self.out.add_layer_norm_rms_eps(1e-5)
        self._vocabulary()
        self.tensor("token_embd.weight", N_VOCAB, _D)

    def _vocabulary(self) -> None:
        # No byte above 127: the server holds back text that ends inside a character, and its probabilities.
        ascii_bytes, words = [f"<0x{i:02X}>" for i in range(128)], [f"w{i}" for i in range(128)]
        tokens = ["<unk>", "<s>", "</s>", *ascii_bytes, *words]
        kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
        self.out.add_tokenizer_model("llama")
        self.out.add_token_list(tokens)
        self.out.add_token_scores([0.0] * N_VOCAB)
        self.out.add_token_types([*kinds, *[gguf.TokenType.BYTE] * 128, *[gguf.TokenType.NORMAL] * 128])
        self.out.add_bos_token_id(1)
        self.out.add_eos_token_id(2)

    def tensor(self, name: str, *shape: int, scale: float | None = None) -> None:
        std = scale if scale is not None else (shape[-1] ** -0.5)
        self.out.add_tensor(name, self.rng.normal(0.0, std, shape).astype(np.float32))

    def norm(self, name: str, n: int = _D) -> None:
        self.out.add_tensor(name, (1 + self.rng.normal(0.0, 0.1, n)).astype(np.float32))

    def attention_sizes(self, heads_kv: int | list[int] = _HEADS_KV) -> None:
        self.out.add_feed_forward_length(_FF)
        self.out.add_head_count(_HEADS)
        self.out.add_head_count_kv(heads_kv)
        self.out.add_key_length(_HEAD_DIM)
        self.out.add_value_length(_HEAD_DIM)
        self.out.add_rope_dimension_count(_HEAD_DIM)
        self.out.add_rope_freq_base(10000.0)

    def attention(self, i: int, *, bias: bool = False, norms: bool = False) -> None:
        width, width_kv = _HEADS * _HEAD_DIM, _HEADS_KV * _HEAD_DIM
        for part, n in (("q", width), ("k", width_kv), ("v", width_kv)):
            self.tensor(f"blk.{i}.attn_{part}.weight", n, _D)
            if bias:
                self.tensor(f"blk.{i}.attn_{part}.bias", n, scale=0.1)
        self.tensor(f"blk.{i}.attn_output.weight", _D, width)
        if norms:
            self.norm(f"blk.{i}.attn_q_norm.weight", _HEAD_DIM)
            self.norm(f"blk.{i}.attn_k_norm.weight", _HEAD_DIM)

    def feed_forward(self, i: int) -> None:
        self.norm(f"blk.{i}.ffn_norm.weight")
        self.tensor(f"blk.{i}.ffn_gate.weight", _FF, _D)
        self.tensor(f"blk.{i}.ffn_up.weight", _FF, _D)
        self.tensor(f"blk.{i}.ffn_down.weight", _D, _FF)

    def close(self) -> None:
        self.out.write_header_to_file()
        self.out.write_kv_data_to_file()
        self.out.write_tensors_to_file()
        self.out.close()


def llama(path: Path, seed: int = 1) -> Path:
    """Two layers of full attention."""
    out = _Writer(path, "llama", 2, seed)
    out.attention_sizes()
    out.norm("output_norm.weight")
    for i in range(2):
        out.norm(f"blk.{i}.attn_norm.weight")
        out.attention(i)
        out.feed_forward(i)
    out.close()
    return path


def qwen2vl(path: Path, seed: int = 2) -> Path:
    """Two layers of full attention whose cells have positions of several axes."""
    out = _Writer(path, "qwen2vl", 2, seed)
    out.attention_sizes()
    out.out.add_rope_dimension_sections([4, 6, 6, 0])
    out.norm("output_norm.weight")
    for i in range(2):
        out.norm(f"blk.{i}.attn_norm.weight")
        out.attention(i, bias=True)
        out.feed_forward(i)
    out.close()
    return path


def gemma3(path: Path, seed: int = 3) -> Path:
    """Six layers; all but the last look back over `WINDOW` tokens only."""
    out = _Writer(path, "gemma3", 6, seed)
    out.attention_sizes()
    out.out.add_sliding_window(WINDOW)
    out.norm("output_norm.weight")
    for i in range(6):
        out.norm(f"blk.{i}.attn_norm.weight")
        out.attention(i, norms=True)
        out.norm(f"blk.{i}.post_attention_norm.weight")
        out.feed_forward(i)
        out.norm(f"blk.{i}.post_ffw_norm.weight")
    out.close()
    return path


def lfm2(path: Path, seed: int = 4) -> Path:
    """Four layers, of which the second and the last attend and the others convolve."""
    heads_kv = [0, _HEADS_KV, 0, _HEADS_KV]
    out = _Writer(path, "lfm2", len(heads_kv), seed)
    out.attention_sizes(heads_kv)
    out.out.add_vocab_size(N_VOCAB)
    out.out.add_shortconv_l_cache(3)
    out.norm("token_embd_norm.weight")
    for i, attends in enumerate(heads_kv):
        out.norm(f"blk.{i}.attn_norm.weight")
        if attends:
            out.attention(i, norms=True)
        else:
            out.tensor(f"blk.{i}.shortconv.conv.weight", _D, 3)
            out.tensor(f"blk.{i}.shortconv.in_proj.weight", 3 * _D, _D)
            out.tensor(f"blk.{i}.shortconv.out_proj.weight", _D, _D)
        out.feed_forward(i)
    out.close()
    return path


def mamba(path: Path, seed: int = 5) -> Path:
    """Two layers of Mamba."""
    inner, state, rank, kernel = 2 * _D, 8, 4, 4
    out = _Writer(path, "mamba", 2, seed)
    out.out.add_feed_forward_length(0)
    out.out.add_head_count(0)
    out.out.add_ssm_conv_kernel(kernel)
    out.out.add_ssm_inner_size(inner)
    out.out.add_ssm_state_size(state)
    out.out.add_ssm_time_step_rank(rank)
    out.norm("output_norm.weight")
    for i in range(2):
        out.norm(f"blk.{i}.attn_norm.weight")
        out.tensor(f"blk.{i}.ssm_in.weight", 2 * inner, _D)
        out.tensor(f"blk.{i}.ssm_conv1d.weight", inner, kernel)
        out.tensor(f"blk.{i}.ssm_conv1d.bias", inner, scale=0.1)
        out.tensor(f"blk.{i}.ssm_x.weight", rank + 2 * state, inner)
        out.tensor(f"blk.{i}.ssm_dt.weight", inner, rank)
        out.tensor(f"blk.{i}.ssm_dt.bias", inner, scale=0.1)
        out.out.add_tensor(f"blk.{i}.ssm_a", -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1)))
        out.norm(f"blk.{i}.ssm_d", inner)
        out.tensor(f"blk.{i}.ssm_out.weight", _D, inner)
    out.close()
    return path


def deepseek2(path: Path, seed: int = 6) -> Path:
    """Two layers of latent attention, which keep one compressed row for keys and values."""
    rope, latent, latent_q, plain, value = 16, 32, 24, 16, 16
    out = _Writer(path, "deepseek2", 2, seed)
    out.out.add_vocab_size(N_VOCAB)
    out.out.add_feed_forward_length(_FF)
    out.out.add_leading_dense_block_count(2)
    out.out.add_expert_feed_forward_length(32)
    out.out.add_expert_shared_count(1)
    out.out.add_expert_count(0)
    out.out.add_expert_used_count(0)
    out.out.add_expert_weights_scale(1.0)
    out.out.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    out.out.add_head_count(_HEADS)
    out.out.add_head_count_kv(1)
    out.out.add_key_length(latent + rope)
    out.out.add_value_length(latent)
    out.out.add_key_length_mla(plain + rope)
    out.out.add_value_length_mla(value)
    out.out.add_kv_lora_rank(latent)
    out.out.add_q_lora_rank(latent_q)
    out.out.add_rope_dimension_count(rope)
    out.out.add_rope_freq_base(10000.0)
    out.norm("output_norm.weight")
    out.tensor("output.weight", N_VOCAB, _D)
    for i in range(2):
        out.norm(f"blk.{i}.attn_norm.weight")
        out.tensor(f"blk.{i}.attn_q_a.weight", latent_q, _D)
        out.norm(f"blk.{i}.attn_q_a_norm.weight", latent_q)
        out.tensor(f"blk.{i}.attn_q_b.weight", _HEADS * (plain + rope), latent_q)
        out.tensor(f"blk.{i}.attn_kv_a_mqa.weight", latent + rope, _D)
        out.norm(f"blk.{i}.attn_kv_a_norm.weight", latent)
        out.tensor(f"blk.{i}.attn_k_b.weight", _HEADS, latent, plain)
        out.tensor(f"blk.{i}.attn_v_b.weight", _HEADS, value, latent)
        out.tensor(f"blk.{i}.attn_output.weight", _D, _HEADS * value)
        out.feed_forward(i)
    out.close()
    return path


MODELS: dict[str, Callable[[Path], Path]] = {f.__name__: f for f in (llama, qwen2vl, gemma3, lfm2, mamba, deepseek2)}


def lora(path: Path, seed: int = 7, rank: int = 4) -> Path:
    """A LoRA adapter for `llama`: on the keys and values of both layers."""
    rng = np.random.default_rng(seed)
    out = gguf.GGUFWriter(path, "llama")
    out.add_type("adapter")
    out.add_string("adapter.type", "lora")
    out.add_float32("adapter.lora.alpha", float(rank))
    for i in range(2):
        for part in "kv":
            name = f"blk.{i}.attn_{part}.weight"
            out.add_tensor(f"{name}.lora_a", rng.normal(0.0, 0.5, (rank, _D)).astype(np.float32))
            out.add_tensor(f"{name}.lora_b", rng.normal(0.0, 0.5, (_HEADS_KV * _HEAD_DIM, rank)).astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
