"""What the KV of a model in mlx-lm depends on: its files, its settings and the engine.

Two ways: from the model's files, which must be asked *before* the engine loads them (the files are
stat'ed at that moment), or from a live model whose files are not known, by the bytes of its parameters.
Knows nothing of caches and tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import blake3
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from rewarm.adapters.mlx import codec
from rewarm.cache.identity import Identity

ENGINE = "mlx-lm"

Stamp = tuple[tuple[str, int, int, int, int], ...]
"""Of each file: name, size, mtime and ctime in ns, inode."""


def engine_settings() -> dict[str, Any]:
    """The fields that the engine gives. Until a probe exists, another version is another engine."""
    mlx_minor = ".".join(importlib.metadata.version("mlx").split(".")[:2])
    return {
        "engine": ENGINE,
        "engine_epoch": f"mlx-lm {importlib.metadata.version('mlx-lm')}, mlx {mlx_minor}",
        "codec": codec.VERSION,
    }


def from_files(model: Path, adapter: Path | None = None, settings: Mapping[str, Any] | None = None) -> Identity:
    """The identity of the model in the folder `model`; call it before the engine reads the files.

    Args:
        model: the folder with the weights and `config.json`.
        adapter: the folder of a trained adapter (LoRA and such); its scale stands in its own config.
        settings: whatever else changes the KV, such as its quantisation.

    Raises:
        OSError: the source that the model brings cannot be read.
    """
    # A model may bring its own class (`model_file` in its config): its source decides as weights do.
    code = {path.name: blake3.blake3(path.read_bytes()).hexdigest() for path in sorted(model.glob("*.py"))}
    extra = {**engine_settings(), **({"model_code": code} if code else {}), **(settings or {})}
    return Identity.from_model(model, adapters=[(adapter, 1.0)] if adapter is not None else [], **extra)


def from_live_model(model: nn.Module) -> Identity:
    """The identity of a model in memory: parameters, arguments, and the source of its class.

    Reads every parameter, on the calling thread, which must be the one that generates.
    """
    return Identity.from_parameters(
        _parameters(model),
        type(model).__module__.rsplit(".", 1)[-1],
        **engine_settings(),
        model_class=f"{type(model).__module__}.{type(model).__qualname__}",
        model_args=repr(_arguments(model)),
        model_source=_source(type(model)),
        modules=_modules(model),
    )


def _parameters(model: nn.Module) -> Iterator[tuple[str, str, tuple[int, ...], np.ndarray[Any, Any]]]:
    for name, array in tree_flatten(model.parameters()):
        bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        data = np.ascontiguousarray(np.array(bits, copy=False)).reshape(-1).view(np.uint8)
        yield name, str(array.dtype), tuple(array.shape), data


def stamp(folders: Iterable[Path]) -> Stamp:
    """What tells, without reading, that no file of `folders` has changed. What is not there is left out."""
    found = []
    for path in sorted(path for folder in folders for path in folder.glob("*")):
        with contextlib.suppress(OSError):
            s = path.stat()
            found.append((str(path), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino))
    return tuple(found)


def _arguments(model: nn.Module) -> Any:
    args = getattr(model, "args", None)
    if dataclasses.is_dataclass(args) and not isinstance(args, type):
        return sorted(dataclasses.asdict(args).items())
    return args


def _modules(model: nn.Module) -> str:
    """The digest of every module's class and plain attributes: a LoRA layer's scale is no parameter."""
    hasher = blake3.blake3()
    for name, module in sorted(model.named_modules(), key=lambda pair: pair[0]):
        plain = {k: v for k, v in vars(module).items() if k[0] != "_" and isinstance(v, int | float | str)}
        hasher.update(f"{name}\0{type(module).__qualname__}\0{sorted(plain.items())}\0".encode())
    return str(hasher.hexdigest())


def _source(cls: type) -> str:
    """The digest of the module that defines `cls`; of its name only where there is no source to read."""
    try:
        text = inspect.getsource(inspect.getmodule(cls) or cls)
    except (OSError, TypeError):
        text = f"{cls.__module__}.{cls.__qualname__}"
    return str(blake3.blake3(text.encode()).hexdigest())
