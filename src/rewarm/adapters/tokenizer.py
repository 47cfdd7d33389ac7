"""A model's tokenizer, for showing tokens as text. Of the engines' packages it needs `tokenizers` only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from rewarm.errors import EngineError


def load(path: Path) -> Any:
    """The tokenizer in a model folder or `tokenizer.json`, with `encode(text).ids` and `decode(ids)`.

    Raises:
        EngineError: there is none.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the package raises plain Exception
        raise EngineError(f"{file} is no tokenizer: {error}") from None
