"""rewarm for mlx-lm: a codec for its caches, a prompt cache for programs, and the server's seam.

This package itself imports no engine: a gateway asks it for the bundled model without loading MLX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewarm.adapters.mlx.prompt_cache import PromptCache

__all__ = ["PromptCache"]


def __getattr__(name: str) -> Any:
    if name == "PromptCache":
        return importlib.import_module("rewarm.adapters.mlx.prompt_cache").PromptCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
