"""llama-server's flags for the engine inside the `xllamacpp` wheel, which takes parameters and no command line.

Knows the names of both sides. A flag that is not in these tables is refused by name: it may matter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xllamacpp

from rewarm.adapters.llama.flags import Flag, Flags, UnusableFlags, adapters

_INT = {
    "--batch-size": "n_batch",
    "--cache-ram": "cache_ram_mib",
    "--cache-reuse": "n_cache_reuse",
    "--checkpoint-min-step": "checkpoint_min_step",
    "--ctx-checkpoints": "n_ctx_checkpoints",
    "--ctx-size": "n_ctx",
    "--keep": "n_keep",
    "--kv-unified-per-slot": "kv_unified_per_slot",
    "--main-gpu": "main_gpu",
    "--parallel": "n_parallel",
    "--port": "port",
    "--predict": "n_predict",
    "--sleep-idle-seconds": "sleep_idle_seconds",
    "--sse-ping-interval": "sse_ping_interval",
    "--threads-http": "n_threads_http",
    "--ubatch-size": "n_ubatch",
    "--verbosity": "verbosity",
    "--yarn-orig-ctx": "yarn_orig_ctx",
}
_FLOAT = {
    "--rope-freq-base": "rope_freq_base",
    "--rope-freq-scale": "rope_freq_scale",
    "--slot-prompt-similarity": "slot_prompt_similarity",
    "--yarn-attn-factor": "yarn_attn_factor",
    "--yarn-beta-fast": "yarn_beta_fast",
    "--yarn-beta-slow": "yarn_beta_slow",
    "--yarn-ext-factor": "yarn_ext_factor",
}
_TEXT = {
    "--api-prefix": "api_prefix",
    "--chat-template": "chat_template",
    "--slot-save-path": "slot_save_path",
}
_SWITCH = {
    "cache-idle-slots": ("cache_idle_slots", True),
    "cache-prompt": ("cache_prompt", True),
    "check-tensors": ("check_tensors", True),
    "context-shift": ("ctx_shift", True),
    "cont-batching": ("cont_batching", True),
    "embedding": ("embedding", True),
    "jinja": ("use_jinja", True),
    "kv-offload": ("no_kv_offload", False),
    "kv-unified": ("kv_unified", True),
    "metrics": ("endpoint_metrics", True),
    "mmproj-offload": ("mmproj_use_gpu", True),
    "perf": ("no_perf", False),
    "prefill-assistant": ("prefill_assistant", True),
    "props": ("endpoint_props", True),
    "repack": ("no_extra_bufts", False),
    "slots": ("endpoint_slots", True),
    "special": ("special", True),
    "swa-full": ("swa_full", True),
    "ui": ("ui", True),
    "warmup": ("warmup", True),
    "webui": ("ui", True),
}
_SAMPLING_INT = {
    "--dry-allowed-length": "dry_allowed_length",
    "--dry-penalty-last-n": "dry_penalty_last_n",
    "--mirostat": "mirostat",
    "--repeat-last-n": "penalty_last_n",
    "--seed": "seed",
    "--top-k": "top_k",
}
_SAMPLING_FLOAT = {
    "--dry-base": "dry_base",
    "--dry-multiplier": "dry_multiplier",
    "--dynatemp-exp": "dynatemp_exponent",
    "--dynatemp-range": "dynatemp_range",
    "--frequency-penalty": "penalty_freq",
    "--min-p": "min_p",
    "--mirostat-ent": "mirostat_tau",
    "--mirostat-lr": "mirostat_eta",
    "--presence-penalty": "penalty_present",
    "--repeat-penalty": "penalty_repeat",
    "--temp": "temp",
    "--top-p": "top_p",
    "--typical": "typ_p",
    "--xtc-probability": "xtc_probability",
    "--xtc-threshold": "xtc_threshold",
}

Params = Any
"""`xllamacpp.CommonParams`, which has no types."""


def params(flags: Flags) -> Params:
    """The engine's parameters for `flags`, with llama-server's own defaults for the rest.

    Raises:
        UnusableFlags: a flag is not known, or its value makes no sense.
    """
    made = xllamacpp.CommonParams()
    # llama-server's default where the wheel's is 1: four slots over one shared cache.
    made.n_parallel = -1
    for flag in flags.given:
        try:
            _set(made, flag)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise UnusableFlags(f"{flag.name} {' '.join(flag.values)}: {error}") from None
    return made


KNOWN = frozenset(
    {*_INT, *_FLOAT, *_TEXT, *_SAMPLING_INT, *_SAMPLING_FLOAT}
    | {f"--{prefix}{name}" for name in _SWITCH for prefix in ("", "no-")}
)
"""Flags of the tables, as `--help` lists them. `_OWN_WAY` has the rest."""


def _set(made: Params, flag: Flag) -> None:
    name = flag.name
    for table, target, cast in (
        (_INT, made, int),
        (_FLOAT, made, float),
        (_TEXT, made, str),
        (_SAMPLING_INT, made.sampling, int),
        (_SAMPLING_FLOAT, made.sampling, float),
    ):
        if name in table:
            setattr(target, table[name], cast(_one(flag)))
            return
    off = name.startswith("--no-")
    switch = _SWITCH.get(name.removeprefix("--no-" if off else "--"))
    if switch is not None:
        setattr(made, switch[0], switch[1] != off)
    elif name in _OWN_WAY:
        _OWN_WAY[name](made, flag)
    else:
        raise UnusableFlags(
            "not known to the engine inside the xllamacpp wheel; name your own binary with --llama-server PATH"
        )


def _one(flag: Flag) -> str:
    if len(flag.values) != 1:
        raise ValueError(f"takes one value, not {len(flag.values)}")
    return flag.values[0]


def _enum(prefix: str, cls: Any) -> Callable[[str], Any]:
    def find(text: str) -> Any:
        return cls[f"{prefix}{text.upper()}"]

    return find


_ggml_type = _enum("GGML_TYPE_", xllamacpp.ggml_type)
_rope_type = _enum("LLAMA_ROPE_SCALING_TYPE_", xllamacpp.llama_rope_scaling_type)
_pooling = _enum("LLAMA_POOLING_TYPE_", xllamacpp.llama_pooling_type)
_split_mode = _enum("LLAMA_SPLIT_MODE_", xllamacpp.llama_split_mode)
_load_mode = _enum("LLAMA_LOAD_MODE_", xllamacpp.llama_load_mode)
_reasoning = _enum("COMMON_REASONING_FORMAT_", xllamacpp.common_reasoning_format)


def _flash_attention(made: Params, flag: Flag) -> None:
    word = (flag.value or "on").lower()
    names = {"on": "ENABLED", "1": "ENABLED", "off": "DISABLED", "0": "DISABLED", "auto": "AUTO", "-1": "AUTO"}
    made.flash_attn_type = xllamacpp.llama_flash_attn_type[f"LLAMA_FLASH_ATTN_TYPE_{names[word]}"]


def _gpu_layers(made: Params, flag: Flag) -> None:
    word = _one(flag)
    made.n_gpu_layers = {"auto": -1, "all": -2}.get(word) if word in ("auto", "all") else int(word)


def _lora(made: Params, flag: Flag) -> None:
    scaled = flag.name == "--lora-scaled"
    made.lora_adapters = [
        *made.lora_adapters,
        *(xllamacpp.CommonAdapterLoraInfo(str(path), scale) for path, scale in adapters(flag, scaled=scaled)),
    ]


def _threads(made: Params, flag: Flag) -> None:
    (made.cpuparams if flag.name == "--threads" else made.cpuparams_batch).n_threads = int(_one(flag))


def _template_file(made: Params, flag: Flag) -> None:
    made.chat_template = Path(_one(flag)).read_text(encoding="utf-8")


def _attribute(name: str, cast: Callable[[str], Any]) -> Callable[[Params, Flag], None]:
    return lambda made, flag: setattr(made, name, cast(_one(flag)))


def _model_path(made: Params, flag: Flag) -> None:
    (made.model if flag.name == "--model" else made.mmproj).path = _one(flag)


def _rank(made: Params, _flag: Flag) -> None:
    made.embedding, made.pooling_type = True, _pooling("rank")


_OWN_WAY: dict[str, Callable[[Params, Flag], None]] = {
    "--alias": _attribute("model_alias", lambda text: set(text.split(","))),
    "--cache-type-k": _attribute("cache_type_k", _ggml_type),
    "--cache-type-v": _attribute("cache_type_v", _ggml_type),
    "--chat-template-file": _template_file,
    "--chat-template-kwargs": _attribute(
        "default_template_kwargs", lambda text: {k: json.dumps(v) for k, v in json.loads(text).items()}
    ),
    "--flash-attn": _flash_attention,
    "--host": _attribute("hostnames", lambda text: [text]),
    "--load-mode": _attribute("load_mode", _load_mode),
    "--lora": _lora,
    "--lora-scaled": _lora,
    "--mlock": lambda made, _flag: setattr(made, "load_mode", _load_mode("mmap_mlock")),
    "--mmap": lambda made, _flag: setattr(made, "load_mode", _load_mode("mmap")),
    "--mmproj": _model_path,
    "--model": _model_path,
    "--n-gpu-layers": _gpu_layers,
    "--no-mmap": lambda made, _flag: setattr(made, "load_mode", _load_mode("none")),
    "--poll": lambda made, flag: setattr(made.cpuparams, "poll", int(_one(flag))),
    "--pooling": _attribute("pooling_type", _pooling),
    "--reasoning-format": _attribute("reasoning_format", lambda text: _reasoning(text.replace("-", "_"))),
    "--rerank": _rank,
    "--rope-scale": _attribute("rope_freq_scale", lambda text: 1.0 / float(text)),
    "--rope-scaling": _attribute("rope_scaling_type", _rope_type),
    "--split-mode": _attribute("split_mode", _split_mode),
    "--threads": _threads,
    "--threads-batch": _threads,
    "--verbose": lambda made, _flag: setattr(made, "verbosity", 4),
}
HELP = sorted(KNOWN | _OWN_WAY.keys())
"""Every flag that is understood."""
