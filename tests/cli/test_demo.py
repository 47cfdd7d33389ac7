"""`rewarm demo` as a person runs it: real workers, the bundled model, a restart in the middle."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest
from tokenizers import Tokenizer


@pytest.mark.engine
@pytest.mark.long
def test_a_conversation_survives_a_restart(bundled_model: Path, home: Path) -> None:
    """The speedup itself is no business of a test, since machines differ; what is evaluated is."""
    models = platformdirs.user_cache_path("rewarm") / "models"
    assert home in models.parents
    models.parent.mkdir(parents=True)
    models.symlink_to(bundled_model.parent, target_is_directory=True)
    line = [sys.executable, "-m", "rewarm", "demo", "--engine", "mlx", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)

    cold, restored, uninterrupted, reference = (told[run] for run in ("cold", "restored", "uninterrupted", "reference"))
    reply = Tokenizer.from_file(str(bundled_model / "tokenizer.json")).encode(cold["text"]).ids
    n_first_turn = cold["prompt_tokens"] + len(reply)
    assert cold["cached_tokens"] == reference["cached_tokens"] == 0
    assert n_first_turn - 2 <= restored["cached_tokens"] < restored["prompt_tokens"]
    assert restored["prompt_tokens"] == uninterrupted["prompt_tokens"] == reference["prompt_tokens"]
    n_evaluated = restored["prompt_tokens"] - restored["cached_tokens"]
    assert n_evaluated * 8 <= reference["prompt_tokens"]

    assert "Paris" in cold["text"]
    assert "Rome" in restored["text"]
    assert told["identical"] is True
    assert restored["text"] == uninterrupted["text"]
    assert told["speedup"] == reference["ttft_s"] / restored["ttft_s"]


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp, which is not installed")
def test_llama_cpp_tells_the_same_story() -> None:
    line = [sys.executable, "-m", "rewarm", "demo", "--engine", "llama", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)

    cold, restored, uninterrupted, reference = (told[run] for run in ("cold", "restored", "uninterrupted", "reference"))
    assert cold["cached_tokens"] == reference["cached_tokens"] == 0
    assert cold["prompt_tokens"] <= restored["cached_tokens"] == uninterrupted["cached_tokens"]
    n_evaluated = restored["prompt_tokens"] - restored["cached_tokens"]
    assert n_evaluated * 8 <= reference["prompt_tokens"]
    assert "Paris" in cold["text"]
    assert "Rome" in restored["text"]
    assert told["identical"] is True
    assert restored["text"] == uninterrupted["text"]
