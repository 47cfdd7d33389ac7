"""How each model is run, as people set it: kept in one file, turned into flags of its worker. Starts nothing.

A change takes effect when the model is loaded the next time.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rewarm.adapters.llama import flags as llama_flags
from rewarm.gateway.models import Model

log = logging.getLogger(__name__)

FILE = "models.json"

_MLX_KV = {"4-bit": "4", "8-bit": "8"}
_LLAMA_KV = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
_FLAG = re.compile(r"--?[A-Za-z][A-Za-z0-9-]*")

_NOT_YOURS = frozenset(
    {
        *("--host", "--port", "--model", "-m", "--api-key", "--api-key-file", "--api-prefix", "--slot-save-path"),
        *("--ssl-key-file", "--ssl-cert-file", "--llama-server", "--trust-remote-code", "--log-file", "--path"),
        *("--hf-repo", "-hf", "-hfr", "--hf-file", "-hff", "--model-url", "-mu", "--allowed-origins", "--help", "-h"),
        *("--version", "--media-path", "--tools", "--models-dir", "--models-preset"),
    }
)
"""Flags that are the gateway's, fetch something, or run other people's code."""

_HARMLESS_OF_MLX = frozenset(
    {
        *("--temp", "--top-p", "--top-k", "--min-p", "--max-tokens", "--log-level", "--decode-concurrency"),
        *("--prompt-concurrency", "--prompt-cache-size", "--prompt-cache-bytes", "--num-draft-tokens"),
        *("--chat-template", "--use-default-chat-template", "--chat-template-args", "--prefill-step-size"),
    }
)


class Options(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How one model is run; what is not set is the engine's own.

    Attributes:
        context_length: tokens; llama.cpp only, since mlx-lm takes as many as fit.
        kv_type: of the KV cache: `f16`, `q8_0` and so on with llama.cpp; `4-bit` or `8-bit` with mlx-lm.
        adapter: a folder (mlx-lm) or a GGUF file (llama.cpp) of a LoRA adapter.
        adapter_scale: how strongly it counts; llama.cpp only, since mlx-lm reads it from the adapter.
        draft_model: a smaller model of the same kind, for speculative decoding.
        flags: further ones of the engine's server, each word by itself.
        caching: whether the disk is used.
    """

    context_length: int | None = None
    kv_type: str | None = None
    adapter: str | None = None
    adapter_scale: float = 1.0
    draft_model: str | None = None
    flags: tuple[str, ...] = ()
    caching: bool = True


def changed(options: Options, changes: Mapping[str, Any], model: Model) -> Options:
    """`options` with `changes`, checked for `model`.

    Raises:
        ValueError: they make no sense; says which and why.
    """
    wanted = msgspec.convert({**msgspec.to_builtins(options), **changes}, Options)
    is_llama = model.engine == "llama.cpp"
    if wanted.context_length is not None and not (is_llama and 16 <= wanted.context_length < 2**31):
        raise ValueError("context_length is at least 16" if is_llama else "mlx-lm has no context_length to set")
    if wanted.kv_type is not None and wanted.kv_type not in (_LLAMA_KV if is_llama else _MLX_KV):
        raise ValueError(f"kv_type is one of {', '.join(_LLAMA_KV if is_llama else _MLX_KV)}")
    if not 0 < wanted.adapter_scale <= 100:
        raise ValueError("adapter_scale is more than 0 and at most 100")
    if wanted.adapter_scale != 1.0 and not is_llama:
        raise ValueError("mlx-lm reads an adapter's scale from its adapter_config.json")
    for name in ("adapter", "draft_model"):
        _check_path(name, getattr(wanted, name), is_llama=is_llama)
    _check_flags(wanted.flags)
    return wanted


def worker_flags(options: Options, model: Model) -> list[str]:
    """Flags for the model's worker."""
    is_llama = model.engine == "llama.cpp"
    found: list[str] = []
    if options.context_length is not None:
        found += ["--ctx-size", str(options.context_length)]
    if options.kv_type is not None and is_llama:
        found += ["--cache-type-k", options.kv_type, "--cache-type-v", options.kv_type]
    elif options.kv_type is not None:
        found += ["--kv-bits", _MLX_KV[options.kv_type]]
    if options.adapter is not None and not is_llama:
        found += ["--adapter-path", options.adapter]
    elif options.adapter is not None and options.adapter_scale == 1.0:
        found += ["--lora", options.adapter]
    elif options.adapter is not None:
        found += ["--lora-scaled", f"{options.adapter}:{options.adapter_scale:g}"]
    if options.draft_model is not None:
        found += ["--model-draft" if is_llama else "--draft-model", options.draft_model]
    return [*found, *options.flags]


def begins_new_cache(before: Options, after: Options, model: Model) -> bool:
    """Whether what was kept of the model with `before` cannot be used with `after`: its KV is another."""
    if (before.kv_type, before.adapter, before.draft_model) != (after.kv_type, after.adapter, after.draft_model):
        return True
    if after.adapter is not None and before.adapter_scale != after.adapter_scale:
        return True
    return _that_count(before.flags, model) != _that_count(after.flags, model)


class OptionStore:
    """The options of all models, in one file. Safe to use from several threads.

    Args:
        folder: the gateway's data folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._lock = threading.Lock()
        self._kept = self._read()

    def get(self, name: str) -> Options:
        """How the model of that name is run."""
        return self._kept.models.get(name, Options())

    @property
    def idle_unload_s(self) -> float | msgspec.UnsetType | None:
        """After how many seconds without a request a model is unloaded; unset: as the gateway was started."""
        return self._kept.idle_unload_s

    def put(self, name: str, options: Options) -> None:
        """Run the model of that name so.

        Raises:
            OSError: it cannot be written; all is as it was.
        """
        with self._lock:
            others = {other: kept for other, kept in self._kept.models.items() if other != name}
            models = others if options == Options() else {**others, name: options}
            self._write(msgspec.structs.replace(self._kept, models=models))

    def put_idle_unload(self, seconds: float | None) -> None:
        """Unload models that were not asked for so long; None keeps them.

        Raises:
            OSError: it cannot be written; all is as it was.
        """
        with self._lock:
            self._write(msgspec.structs.replace(self._kept, idle_unload_s=seconds))

    def _read(self) -> _Kept:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return _Kept()
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("%s cannot be read, so models are run with the engines' defaults: %s", self._file, error)
            return _Kept()

    def _write(self, kept: _Kept) -> None:
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self._file.with_name(f".{FILE}.part")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._file)
        self._kept = kept


class _Kept(msgspec.Struct, frozen=True, omit_defaults=True):
    models: dict[str, Options] = {}
    idle_unload_s: float | msgspec.UnsetType | None = msgspec.UNSET


def _check_path(name: str, given: str | None, *, is_llama: bool) -> None:
    if given is None:
        return
    path = Path(given)
    if not path.is_absolute() or "\0" in given:
        raise ValueError(f"{name} is a whole path")
    if name == "adapter" and is_llama and ("," in given or ":" in given):
        raise ValueError("llama.cpp takes no adapter whose path has a comma or a colon")
    is_there = path.is_file() if is_llama else path.is_dir()
    if not is_there:
        raise ValueError(f"{name}: there is no such {'file' if is_llama else 'folder'}: {given}")


def _check_flags(flags: tuple[str, ...]) -> None:
    for flag in flags:
        name = flag.partition("=")[0]
        if "\0" in flag or len(flag) > 4096:
            raise ValueError("a flag is too long, or holds a zero byte")
        if _FLAG.fullmatch(name) and (name in _NOT_YOURS or name.startswith("--rewarm")):
            raise ValueError(f"the flag {name} is the gateway's to set")


def _that_count(flags: tuple[str, ...], model: Model) -> list[tuple[str, ...]]:
    """The flags that may change the KV, each with its values; those that are not known count."""
    harmless = llama_flags.IRRELEVANT if model.engine == "llama.cpp" else _HARMLESS_OF_MLX
    groups: list[list[str]] = []
    for word in flags:
        if _FLAG.fullmatch(word.partition("=")[0]) or not groups:
            name, equals, value = word.partition("=")
            groups.append([llama_flags.ALIASES.get(name, name), *([value] if equals else [])])
        else:
            groups[-1].append(word)
    return sorted(tuple(group) for group in groups if group[0] not in harmless)
