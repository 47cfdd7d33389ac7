"""Serving as a whole: batches whose members come and go, adapters, the README's example, a stop in mid-reply."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from serving import Server, messages, reply

Serve = Callable[..., Server]

pytestmark = pytest.mark.engine

SYSTEM = "You are a guide to rivers and lakes. " * 12
README = Path(__file__).parents[3] / "README.md"


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def begun(server: Server, text: str) -> http.client.HTTPConnection:
    """A long streamed reply whose first words have come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"messages": messages(text), "max_tokens": 100_000, "stream": True, "temperature": 1.0}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    connection.getresponse().read(100)
    return connection


def test_the_readmes_example_restores_in_its_second_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code.count('"/path/to/a-model-folder"') == 1
    code = code.replace('"/path/to/a-model-folder"', repr(str(tiny_model)))
    monkeypatch.setenv("REWARM_DIR", str(tmp_path / "kv"))
    runs: list[dict[str, Any]] = [{}, {}]
    for run in runs:
        exec(compile(code, "README.md", "exec"), run)
        run["printed"] = capsys.readouterr().out
    n_prompt = len(runs[0]["rest"])
    assert n_prompt > 1
    assert len(runs[1]["rest"]) == 1
    assert runs[1]["tokens"] == runs[0]["tokens"]
    assert len(runs[0]["tokens"]) > n_prompt
    assert runs[1]["printed"] == runs[0]["printed"] != ""


def test_a_stop_in_mid_reply_keeps_what_was_finished(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    where = ("--rewarm-dir", str(tmp_path / "kv"), "--rewarm-min-free", "1MB")
    text = "Name the lakes of Finland. " * 12
    with serve(tiny_model, *where, "--rewarm-stop-timeout", "3") as server:
        done = server.chat(text)
        connection = begun(server, "Go on for ever.")
        assert server.process.poll() is None
        server.process.terminate()
        # A deadline of the worker's own, and not a measurement: what is missed is a process that hangs.
        assert server.process.wait(3 + 10) == 0
        connection.close()
    with serve(tiny_model) as server:
        again = server.chat(text, "Many.", "Go on.")
    assert again["rewarm"]["disk_tokens"] >= done["usage"]["prompt_tokens"]


def test_a_kill_in_mid_reply_loses_only_that_reply(tiny_model: Path, serve: Serve) -> None:
    text = "Name the lakes of Finland. " * 12
    with serve(tiny_model) as server:
        done = server.chat(text)
        connection = begun(server, "Go on for ever.")
        time.sleep(1)  # what is finished is written behind the reply
        server.kill()
        connection.close()
    with serve(tiny_model) as server:
        again = server.chat(text, "Many.", "Go on.", max_tokens=8)
        assert again["rewarm"]["disk_tokens"] >= done["usage"]["prompt_tokens"]
        assert server.terminate() == 0
    with serve(tiny_model, "--rewarm-off") as server:
        assert reply(server.chat(text, "Many.", "Go on.", max_tokens=8)) == reply(again)


@pytest.mark.parametrize("kind", ["tiny_model", "windowed_model"])
def test_four_at_a_time_with_one_that_leaves_answer_as_one_at_a_time(
    kind: str, serve: Serve, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    shared = [f"Tell me about the lake with number {i}. " * (1 + i) for i in range(3)]
    asked: list[tuple[str, str | None, int]] = [(text, SYSTEM, 8 + 8 * i) for i, text in enumerate(shared)]
    asked += [("Something else altogether. " * (2 + 5 * i), None, 20 - 6 * i) for i in range(3)]

    def ask(server: Server, one: tuple[str, str | None, int]) -> dict[str, Any]:
        return server.chat(one[0], system=one[1], max_tokens=one[2])

    with serve(model, "--rewarm-off") as server:
        alone = [reply(ask(server, one)) for one in asked]
    assert len(set(alone)) == len(asked), "no answer can be taken for another"
    for restored in (False, True):
        with serve(model) as server:
            leaver = begun(server, "Go on for ever.")
            with ThreadPoolExecutor(4) as pool:  # two of the six join when others have ended
                waiting = [pool.submit(ask, server, one) for one in asked]
                waiting[0].result()
                leaver.close()
                together = [one.result() for one in waiting]
            assert [reply(one) for one in together] == alone
            if restored:
                assert [cached(one) for one in together] == [one["usage"]["prompt_tokens"] - 1 for one in together]
                assert all(one["rewarm"]["disk_tokens"] for one in together)
            assert server.terminate() == 0


def write_adapter(folder: Path, scale: float) -> Path:
    """A LoRA adapter for the queries and values of the tiny llama, in mlx-lm's format."""
    folder.mkdir()
    parameters = {"rank": 2, "scale": scale, "dropout": 0.0, "keys": ["self_attn.q_proj", "self_attn.v_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for i in range(2):
        for j, (name, n_out) in enumerate((("q_proj", 128), ("v_proj", 64))):
            key = f"model.layers.{i}.self_attn.{name}.lora_"
            weights[key + "a"] = mx.random.normal((64, 2), key=mx.random.key(4 * i + j))
            weights[key + "b"] = mx.random.normal((2, n_out), key=mx.random.key(4 * i + j + 2))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder


def test_an_adapter_and_each_scale_of_it_is_a_namespace(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    text = "Which river is the longest? " * 12
    adapters = [write_adapter(tmp_path / f"adapter-{scale}", scale) for scale in (1.0, 4.0)]
    answers = []
    for flags in (("--adapter-path", str(adapters[0])), ("--adapter-path", str(adapters[1])), ()):
        with serve(tiny_model, *flags) as server:
            answers.append(server.chat(text, max_tokens=12))
            assert cached(answers[-1]) == 0
            assert server.terminate() == 0
    assert len({reply(one) for one in answers}) == 3, "the adapter changes what is said"
    with serve(tiny_model, "--adapter-path", str(adapters[0])) as server:
        again = server.chat(text, max_tokens=12)
    assert again["rewarm"]["disk_tokens"] == again["usage"]["prompt_tokens"] - 1
    assert reply(again) == reply(answers[0])


def test_a_seed_draws_the_same_words_restored_as_cold(tiny_model: Path, serve: Serve) -> None:
    text = "Name three colours of the rainbow. " * 12

    def ask(server: Server, seed: int) -> dict[str, Any]:
        return server.chat(text, max_tokens=12, seed=seed, temperature=1.0)

    with serve(tiny_model, "--rewarm-off") as server:
        cold = [reply(ask(server, seed)) for seed in (3, 4)]
    assert cold[0] != cold[1]
    with serve(tiny_model) as server:
        ask(server, 5)
        assert server.terminate() == 0
    with serve(tiny_model) as server:
        for seed in (3, 4):
            restored = ask(server, seed)
            assert cached(restored) == restored["usage"]["prompt_tokens"] - 1
            assert reply(restored) == cold[seed - 3]
