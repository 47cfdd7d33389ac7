"""Models and workers for the tests of mlx-lm's adapter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from serving import Server

# Without the engine there is nothing to test here; the header of the run says which engines were found.
collect_ignore_glob = [] if importlib.util.find_spec("mlx_lm") else ["test_*.py"]

VOCAB = 49152
"""Of the bundled model, whose tokenizer the tiny models borrow."""


@pytest.fixture(scope="session")
def tiny_model(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random llama of width 64."""
    from tiny_models import llama_config, write_model

    return write_model(tmp_path_factory.mktemp("models") / "tiny-llama", llama_config(vocab=VOCAB), bundled_model)


@pytest.fixture(scope="session")
def windowed_model(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Gemma 3, with a sliding window of 32 tokens on every second layer."""
    from tiny_models import gemma_config, write_model

    return write_model(tmp_path_factory.mktemp("models") / "tiny-gemma", gemma_config(vocab=VOCAB), bundled_model)


@pytest.fixture(scope="session")
def unknown_model(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose cache class has no codec; it needs `--trust-remote-code`."""
    from tiny_models import llama_config, write_unknown_model

    folder = tmp_path_factory.mktemp("models") / "novel"
    return write_unknown_model(folder, llama_config(vocab=VOCAB), bundled_model)


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., Server]:
    """Describes workers, which live in a `with`; they keep the cache in `tmp_path/kv` unless told otherwise."""
    from serving import Server

    def describe(model: Path, *flags: str, secret: str | None = None) -> Server:
        own = any(flag.startswith("--rewarm-") for flag in flags)
        where = () if own else ("--rewarm-dir", str(tmp_path / "kv"), "--rewarm-min-free", "1MB")
        return Server(model, (*where, *flags), tmp_path / "worker.log", secret)

    return describe
