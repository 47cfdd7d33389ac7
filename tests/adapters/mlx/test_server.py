"""The worker as a process: what a client and an operator see of the cache, and what must never reach them."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import Server, messages, reply

import rewarm
from rewarm.cache.epochs import PROBE_LABEL
from waiting import until

Serve = Callable[..., Server]

pytestmark = pytest.mark.engine

SYSTEM = "You answer in one short sentence. " + "Never repeat the question and never add a note to the answer. " * 24
"""Longer than a block of 256 tokens."""


def cached(answer: dict[str, Any]) -> int:
    n = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    told = answer["rewarm"]
    assert told["cached_tokens"] == n == told["disk_tokens"] + told["memory_tokens"]
    assert told["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert isinstance(told["reason"], str)
    assert isinstance(told["detail"], str)
    assert told["restore_s"] >= 0
    return int(n)


def test_a_conversation_goes_on_after_a_restart(bundled_model: Path, serve: Serve) -> None:
    first = "What is the capital of France?"
    with serve(bundled_model) as server:
        cold = server.chat(first, max_tokens=24)
        assert reply(cold) == "The capital of France is Paris."
        assert cached(cold) == 0
        live = server.chat(first, reply(cold), "And of Italy?", max_tokens=24)
        assert live["rewarm"]["memory_tokens"] == cold["usage"]["total_tokens"]
        assert server.terminate() == 0
    with serve(bundled_model) as server:
        again = server.chat(first, reply(cold), "And of Italy?", max_tokens=24)
    # The uninterrupted run's own second turn is stored by now: all of the prompt but the token to evaluate.
    assert cached(again) == again["rewarm"]["disk_tokens"] == again["usage"]["prompt_tokens"] - 1
    assert again["rewarm"]["reason"] == "hit"
    assert reply(again) == reply(live)


def test_restored_and_uninterrupted_turns_are_the_same(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    texts = ["Tell me of rivers. " * 30, "Rivers run.", "And of mountains?"]
    where = [("--rewarm-dir", str(tmp_path / name), "--rewarm-min-free", "1MB") for name in ("one", "two")]
    with serve(tiny_model, *where[0]) as server:
        first = server.chat(*texts[:1], max_tokens=12)
        live = server.chat(*texts, max_tokens=12, logprobs=True)
    with serve(tiny_model, *where[1]) as server:
        server.chat(*texts[:1], max_tokens=12)
        server.terminate()
    with serve(tiny_model, *where[1]) as server:
        restored = server.chat(*texts, max_tokens=12, logprobs=True)
    assert live["rewarm"]["memory_tokens"] == restored["rewarm"]["disk_tokens"] >= first["usage"]["prompt_tokens"]
    # The same rows and the same chunks: the same numbers, not only the same words.
    assert restored["choices"] == live["choices"]


def test_a_second_conversation_shares_the_system_prompt(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    with serve(tiny_model) as server:
        server.chat("What is a river?", system=SYSTEM)
        server.terminate()
    blocks = sorted((tmp_path / "kv").rglob("*.block"))
    assert blocks
    with serve(tiny_model) as server:
        other = server.chat("Why is the sky blue?", system=SYSTEM)
        server.terminate()
    assert cached(other) > 256
    assert other["rewarm"]["reason"] == "diverged"
    assert sorted((tmp_path / "kv").rglob("*.block")) == blocks


def test_what_is_forgotten_leaves_the_engines_memory_too(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    """Another process forgets the conversation while the worker still holds it."""
    with serve(tiny_model) as server:
        first = server.chat("Tell me a secret. " * 20)
        assert cached(server.chat("Tell me a secret. " * 20)) == first["usage"]["prompt_tokens"] - 1
        with rewarm.open(tmp_path / "kv") as cache:
            until(lambda: bool(cache.entries()))
            cache.clear()
            assert cache.entries() == []
        again = server.chat("Tell me a secret. " * 20)
        assert (cached(again), again["rewarm"]["reason"]) == (0, "nothing_stored")


def points(root: Path) -> list[Path]:
    """The restore points of conversations: all but the probe of the engine's version."""
    return [path for path in root.rglob("*.point") if PROBE_LABEL.encode() not in path.read_bytes()]


def test_one_tail_a_turn(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    with serve(tiny_model) as server:
        body = {"prompt": "Once upon a time there was a river.", "max_tokens": 4, "temperature": 0.0}
        status, _, answer = server.request("POST", "/v1/completions", body)
        assert (status, cached(json.loads(answer))) == (200, 0)
        server.terminate()
    # The engine hands over the prompt's end too, which is no place of its own: rows can be cut anywhere.
    assert len(points(tmp_path / "kv")) == 1
    with serve(tiny_model) as server:
        server.chat("Hello.", system="Be brief.")
        server.terminate()
    assert len(points(tmp_path / "kv")) == 3


def test_kill_one_second_after_the_reply_loses_nothing(tiny_model: Path, serve: Serve) -> None:
    with serve(tiny_model) as server:
        first = server.chat("Count to ten. " * 40)
        time.sleep(1.0)
        server.kill()
    with serve(tiny_model) as server:
        again = server.chat("Count to ten. " * 40, "One, two.", "Go on.")
    assert again["rewarm"]["disk_tokens"] >= first["usage"]["prompt_tokens"]


def test_replies_decoded_together_are_kept_apart(tiny_model: Path, serve: Serve) -> None:
    # Prompts of different lengths share one batch, padded on the left: each one's own rows must reach the disk.
    texts = ["Short.", "A somewhat longer question about rivers. " * 6, "And the longest of all of them. " * 20]
    follow = "Go on, please."
    with serve(tiny_model, "--rewarm-off") as server:
        cold = [server.chat(text, "Yes.", follow, max_tokens=12) for text in texts]
    with serve(tiny_model) as server:
        with ThreadPoolExecutor(3) as pool:
            first = list(pool.map(lambda text: server.chat(text, max_tokens=40), texts))
        server.terminate()
    with serve(tiny_model) as server:
        again = [server.chat(text, "Yes.", follow, max_tokens=12) for text in texts]
    for i in range(3):
        assert again[i]["rewarm"]["disk_tokens"] >= first[i]["usage"]["prompt_tokens"]
        assert reply(again[i]) == reply(cold[i])


@pytest.mark.parametrize("damage", ["flip", "noise"])
def test_damaged_records_are_a_miss_and_the_answer_is_right(
    tiny_model: Path, serve: Serve, tmp_path: Path, damage: str
) -> None:
    texts = ("Tell me of rivers and of lakes. " * 60, "Yes.", "Go on.")
    with serve(tiny_model) as server:
        server.chat(*texts[:1])
        live = server.chat(*texts, max_tokens=12)
        server.terminate()
    for record in (tmp_path / "kv").rglob("*.block"):
        raw = bytearray(record.read_bytes())
        if damage == "flip":
            raw[len(raw) // 2] ^= 1
        else:
            raw[4096 : 4096 + 65536] = os.urandom(len(raw[4096 : 4096 + 65536]))
        record.write_bytes(raw)
    with serve(tiny_model) as server:
        again = server.chat(*texts, max_tokens=12)
        assert (cached(again), again["rewarm"]["reason"]) == (0, "corrupt")
        assert reply(again) == reply(live)
        assert "quarantine" in server.text()


def test_other_weights_under_the_same_path_size_and_time_are_another_model(
    bundled_model: Path, serve: Serve, tmp_path: Path
) -> None:
    from tiny_models import llama_config, write_model

    folder = write_model(tmp_path / "model", llama_config(vocab=49152), bundled_model, seed=1)
    before = (folder / "model.safetensors").stat()
    with serve(folder) as server:
        first = server.chat("The same words.")
        server.terminate()
    write_model(folder, llama_config(vocab=49152), bundled_model, seed=2)
    os.utime(folder / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    after = (folder / "model.safetensors").stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with serve(folder) as server:
        other = server.chat("The same words.")
        assert (cached(other), other["rewarm"]["reason"]) == (0, "identity_changed")
        server.terminate()
    write_model(tmp_path / "elsewhere", llama_config(vocab=49152), bundled_model, seed=1)
    with serve(tmp_path / "elsewhere") as server:
        assert cached(server.chat("The same words.")) == first["usage"]["prompt_tokens"] - 1


def test_a_full_disk_is_no_error(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    with serve(tiny_model, "--rewarm-dir", str(tmp_path / "kv"), "--rewarm-min-free", "1000TiB") as server:
        for _ in range(2):
            assert server.chat("Hello there. " * 100)["usage"]["completion_tokens"] > 0
        assert server.terminate() == 0
    assert not [path for path in (tmp_path / "kv").rglob("*") if path.suffix in (".block", ".point")]


def test_streams_report_the_cache_in_the_usage_chunk(tiny_model: Path, serve: Serve) -> None:
    with serve(tiny_model) as server:
        server.stream("Hello there, how are you today?")
        *_, last = server.stream("Hello there, how are you today?")
    assert last["choices"] == []
    assert cached(last) == last["rewarm"]["memory_tokens"] == last["usage"]["prompt_tokens"] - 1


def test_requests_served_one_at_a_time_are_restored_too(tiny_model: Path, serve: Serve) -> None:
    with serve(tiny_model) as server:
        server.chat("Name three colours of the rainbow.", seed=3)
        server.terminate()
    with serve(tiny_model) as server:
        again = server.chat("Name three colours of the rainbow.", seed=3)
    assert cached(again) == again["rewarm"]["disk_tokens"] == again["usage"]["prompt_tokens"] - 1


def test_penalties_see_the_tokens_that_they_would_see_cold(tiny_model: Path, serve: Serve) -> None:
    contexts = (7, 20, 0)  # 0 stands for all tokens

    def text(context: int) -> str:
        # Each its own, from the first word on: no request finds more than the template's own system prompt.
        return f"{context} colours: " + "red green blue " * 12

    def ask(server: Server, context: int) -> dict[str, Any]:
        penalty = {"repetition_penalty": 1.8, "repetition_context_size": context}
        return server.chat(text(context), seed=3, max_tokens=12, **penalty)

    with serve(tiny_model, "--rewarm-off") as server:
        cold = [ask(server, context) for context in contexts]
    with serve(tiny_model) as server:
        for context in contexts:
            server.chat(text(context))
        server.terminate()
    with serve(tiny_model) as server:
        disk = [ask(server, context) for context in contexts]
        memory = [ask(server, context) for context in contexts]
    for i, context in enumerate(contexts):
        n = cold[i]["usage"]["prompt_tokens"]
        assert n - cached(cold[i]) > 20
        assert cached(memory[i]) == cached(disk[i]) == (n - context if context else 0)
        assert disk[i]["rewarm"]["disk_tokens"] == cached(disk[i])
        assert memory[i]["rewarm"]["memory_tokens"] == cached(memory[i])
        assert reply(memory[i]) == reply(disk[i]) == reply(cold[i])


def test_a_cache_class_without_a_codec_is_served_uncached(unknown_model: Path, serve: Serve, tmp_path: Path) -> None:
    with serve(unknown_model, "--trust-remote-code", "--rewarm-dir", str(tmp_path / "kv")) as server:
        for _ in range(2):
            answer = server.chat("What is a river? " * 10, "A stream.", "And a lake?")
        assert answer["rewarm"]["disk_tokens"] == 0
        assert answer["rewarm"]["reason"] == "disabled"
        assert "NovelCache" in answer["rewarm"]["detail"]
        assert server.text().count("NovelCache") == 1


def test_a_draft_model_is_served_uncached(tiny_model: Path, serve: Serve) -> None:
    with serve(tiny_model, "--draft-model", str(tiny_model)) as server:
        answer = server.chat("Hello.")
        assert answer["rewarm"]["reason"] == "disabled"
        assert "draft" in answer["rewarm"]["detail"]


@pytest.mark.parametrize(("bits", "start"), [(8, 0), (4, 20)])
def test_a_quantised_cache_comes_back(tiny_model: Path, serve: Serve, tmp_path: Path, bits: int, start: int) -> None:
    flags = ("--kv-bits", str(bits), "--kv-group-size", "32", "--quantized-kv-start", str(start))
    text = "Hello, hello, hello. How are you today, and where do you come from?"
    with serve(tiny_model, "--rewarm-dir", str(tmp_path / "other"), *flags) as server:
        turns = (text, reply(server.chat(text)), "And now?")
        wanted = reply(server.chat(*turns, max_tokens=8))
    with serve(tiny_model, "--rewarm-dir", str(tmp_path / "kv"), *flags) as server:
        assert reply(server.chat(text)) == turns[1]
        server.terminate()
    with serve(tiny_model, "--rewarm-dir", str(tmp_path / "kv"), *flags) as server:
        answer = server.chat(*turns, max_tokens=8)
        assert answer["rewarm"]["disk_tokens"] > start
        assert reply(answer) == wanted
    with serve(tiny_model, "--rewarm-dir", str(tmp_path / "kv")) as server:
        # Not quantised: another model, as far as its KV goes.
        assert server.chat(*turns)["rewarm"]["reason"] == "identity_changed"


def test_a_failure_of_the_engine_in_mid_reply_is_told(tiny_model: Path, serve: Serve) -> None:
    # The heads have dimension 32: the engine finds that it cannot quantise them in groups of 64.
    with serve(tiny_model, "--kv-bits", "8", "--kv-group-size", "64", "--quantized-kv-start", "0") as server:
        asked = {"messages": messages("Hello."), "max_tokens": 4}
        status, _, answer = server.request("POST", "/v1/chat/completions", asked)
        assert status == 500
        assert json.loads(answer)["error"]["type"] == "server_error"
        status, _, answer = server.request("POST", "/v1/chat/completions", {**asked, "stream": True})
        assert json.loads(answer.decode().strip().splitlines()[-1].removeprefix("data: "))["error"]["message"]


def test_the_secret_is_demanded_on_every_path(tiny_model: Path, serve: Serve) -> None:
    with serve(tiny_model, secret="s3cret") as server:
        assert server.chat("Hello.")["usage"]["completion_tokens"] > 0
        paths = [("GET", "/health"), ("GET", "/v1/models"), ("OPTIONS", "/v1/chat/completions"), ("PUT", "/x")]
        paths += [("POST", path) for path in ("/v1/chat/completions", "/v1/completions", "/nowhere")]
        for wrong in ("", "Bearer ", "Bearer wrong", "s3cret"):
            for method, path in paths:
                body = {"messages": messages("Hi")} if method == "POST" else None
                status, headers, answer = server.request(method, path, body, Authorization=wrong)
                assert status == 401, (method, path)
                assert json.loads(answer)["error"]["type"] == "authentication_error"
                assert not [name for name in headers if name.lower().startswith("access-control")]
        _, headers, _ = server.request("GET", "/v1/models", Origin="http://elsewhere.example")
        assert not [name for name in headers if name.lower().startswith("access-control")]


def test_no_text_of_a_person_reaches_the_log(tiny_model: Path, serve: Serve) -> None:
    with serve(tiny_model, "--log-level", "DEBUG") as server:
        server.chat("my pin is xyzzy")
        server.stream("my pin is xyzzy")
        for body in (b'{"prompt": "xyzzy"', b'["xyzzy"]', b"\xff xyzzy"):
            status, _, answer = server.request("POST", "/v1/completions", body)
            assert status == 400, answer
        assert server.chat("still there?")["usage"]["completion_tokens"] > 0
        assert "Starting completion" in server.text()
        assert "xyzzy" not in server.text()


def test_a_folder_that_cannot_be_used_serves_uncached(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with serve(tiny_model, "--rewarm-dir", str(tmp_path / "file")) as server:
        answer = server.chat("Hello.")
        assert (answer["rewarm"]["reason"], answer["rewarm"]["disk_tokens"]) == ("unavailable", 0)
        assert str(tmp_path / "file") in answer["rewarm"]["detail"]
        assert server.terminate() == 0
        assert server.text().count("requests are served uncached") == 1


def test_limits_of_the_command_line_hold_for_a_folder_that_is_there(
    tiny_model: Path, serve: Serve, tmp_path: Path
) -> None:
    with serve(tiny_model) as server:
        server.chat("Hello there. " * 100)
        server.terminate()
    assert list((tmp_path / "kv").rglob("*.block"))
    with serve(tiny_model, "--rewarm-dir", str(tmp_path / "kv"), "--rewarm-max-files", "1") as server:
        answer = server.chat("Hello there. " * 100)
        assert answer["usage"]["completion_tokens"] > 0
        server.terminate()
    left = [path for path in (tmp_path / "kv").rglob("*") if path.suffix in (".block", ".point")]
    assert len(left) <= 1


def test_a_model_swapped_by_request_keeps_its_own_namespace(
    tiny_model: Path, bundled_model: Path, serve: Serve, tmp_path: Path
) -> None:
    from tiny_models import llama_config, write_model

    other = write_model(tmp_path / "other", llama_config(vocab=49152), bundled_model, seed=1)
    text = "The same words for both models. " * 12
    with serve(tiny_model) as server:
        mine = server.chat(text)
        assert cached(server.chat(text, model=str(other))) == 0
        assert cached(server.chat(text)) == mine["usage"]["prompt_tokens"] - 1
        # Other weights under the same name are another model, in the engine's own memory too.
        write_model(other, llama_config(vocab=49152), bundled_model, seed=2)
        assert cached(server.chat(text, model=str(other))) == 0
        server.terminate()
    copied = tmp_path / "elsewhere"
    tiny_model.rename(copied)
    try:
        with serve(copied) as server:
            moved = server.chat(text)
            assert moved["rewarm"]["disk_tokens"] == moved["usage"]["prompt_tokens"] - 1
            server.chat(text, model="elsewhere")
            status, _, _ = server.request(
                "POST", "/v1/chat/completions", {"messages": messages("hi"), "model": "no/such"}
            )
            assert status == 404
            assert cached(server.chat(text)) > 0
    finally:
        copied.rename(tiny_model)


def test_a_broken_connection_leaves_the_worker_in_step(tiny_model: Path, serve: Serve) -> None:
    text = "Write a long story about a ship. " * 8
    with serve(tiny_model, "--rewarm-off") as server:
        cold = server.chat(text, "Once", "Go on.", max_tokens=12)
    for more in ({}, {"seed": 1}):
        with serve(tiny_model) as server:
            body = {"messages": messages(text), "max_tokens": 400, "stream": True, "temperature": 0.0, **more}
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            connection.getresponse().read(200)
            connection.close()
            again = server.chat(text, "Once", "Go on.", max_tokens=12)
            assert reply(again) == reply(cold)
            server.terminate()
        with serve(tiny_model) as server:
            assert reply(server.chat(text, "Once", "Go on.", max_tokens=12)) == reply(cold)


def test_a_shutdown_in_mid_reply_is_quick_and_clean(tiny_model: Path, serve: Serve) -> None:
    with serve(tiny_model) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"messages": messages("Go on for ever."), "max_tokens": 100_000, "stream": True, "temperature": 1.0}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        connection.getresponse().read(100)
        assert server.terminate() == 0
        connection.close()


def test_a_model_that_cannot_be_loaded_ends_the_process_with_a_message(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(AssertionError, match="the engine ended"), serve(tmp_path / "empty"):
        pass


def test_help_shows_both_groups_of_flags(tiny_model: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "rewarm.adapters.mlx.server", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0
    for flag in ("--prefill-step-size", "--draft-model", "--rewarm-dir", "--rewarm-max-bytes", "--rewarm-max-files"):
        assert flag in done.stdout
    wrong = subprocess.run([*command[:-1], "--rewarm-max-bytes", "much"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "64 GiB" in wrong.stderr
