"""How each model is run: what may be set, what that costs, and when models go."""

from __future__ import annotations

import json
import stat
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_server import Running, model_folder

from rewarm.gateway.model_options import Options, begins_new_cache, changed, worker_flags
from rewarm.gateway.models import LLAMA_SERVER, Model
from rewarm.gateway.settings import Settings
from waiting import until

MLX = Model("m", lambda _: Path("/m"))
LLAMA = Model("g", lambda _: Path("/g.gguf"), worker=LLAMA_SERVER)


def test_options_are_flags_of_the_engine(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "draft.gguf").touch()
    (tmp_path / "lora").mkdir()
    lora = str(tmp_path / "a.gguf")
    options = changed(
        Options(),
        {"context_length": 8192, "kv_type": "q8_0", "adapter": lora, "adapter_scale": 0.5, "flags": ["-ngl", "99"]},
        LLAMA,
    )
    assert worker_flags(options, LLAMA) == [
        *("--ctx-size", "8192", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0"),
        *("--lora-scaled", f"{lora}:0.5", "-ngl", "99"),
    ]
    draft = changed(Options(), {"draft_model": str(tmp_path / "draft.gguf"), "adapter": lora}, LLAMA)
    assert worker_flags(draft, LLAMA) == ["--lora", lora, "--model-draft", str(tmp_path / "draft.gguf")]
    mlx = changed(Options(), {"kv_type": "8-bit", "adapter": str(tmp_path / "lora")}, MLX)
    assert worker_flags(mlx, MLX) == ["--kv-bits", "8", "--adapter-path", str(tmp_path / "lora")]


@pytest.mark.parametrize(
    ("model", "changes", "why"),
    [
        (MLX, {"context_length": 8192}, "no context_length"),
        (LLAMA, {"context_length": 1}, "at least 16"),
        (MLX, {"kv_type": "q8_0"}, "one of 4-bit, 8-bit"),
        (LLAMA, {"kv_type": "8-bit"}, "one of f32"),
        (MLX, {"adapter_scale": 2}, "adapter_config"),
        (LLAMA, {"adapter_scale": 0}, "more than 0"),
        (LLAMA, {"adapter": "relative.gguf"}, "whole path"),
        (LLAMA, {"adapter": "/nowhere/x.gguf"}, "no such file"),
        (MLX, {"draft_model": "/nowhere"}, "no such folder"),
        (MLX, {"flags": ["--trust-remote-code"]}, "gateway's to set"),
        (MLX, {"flags": ["--rewarm-dir", "/x"]}, "gateway's to set"),
        (LLAMA, {"flags": ["--host=0.0.0.0"]}, "gateway's to set"),
        (LLAMA, {"flags": ["--llama-server", "/bin/sh"]}, "gateway's to set"),
        (LLAMA, {"flags": ["a\0b"]}, "zero byte"),
        (MLX, {"caching": "perhaps"}, "Expected `bool`"),
        (MLX, {"weights": 1}, "unknown field"),
    ],
)
def test_options_that_make_no_sense_are_refused(model: Model, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        changed(Options(), changes, model)


@pytest.mark.parametrize(
    ("model", "before", "after", "is_new"),
    [
        (LLAMA, Options(), Options(context_length=8192), False),
        (LLAMA, Options(), Options(caching=False), False),
        (LLAMA, Options(), Options(kv_type="q8_0"), True),
        (LLAMA, Options(), Options(adapter="/a"), True),
        (LLAMA, Options(adapter="/a"), Options(adapter="/a", adapter_scale=0.5), True),
        (LLAMA, Options(), Options(flags=("-t", "4", "--parallel", "2")), False),
        (LLAMA, Options(), Options(flags=("--rope-scale", "2")), True),
        (LLAMA, Options(flags=("--rope-scale", "2")), Options(flags=("-t", "4", "--rope-scale=2")), False),
        (MLX, Options(), Options(kv_type="8-bit"), True),
        (MLX, Options(), Options(flags=("--temp", "0.5")), False),
        (MLX, Options(), Options(flags=("--kv-group-size", "32")), True),
        (MLX, Options(), Options(draft_model="/d"), True),
    ],
)
def test_what_begins_a_new_cache(model: Model, before: Options, after: Options, is_new: bool) -> None:
    assert begins_new_cache(before, after, model) is is_new
    assert begins_new_cache(after, before, model) is is_new


def worker_with_a_cache(settings: Settings) -> Settings:
    return settings.model_copy(
        update={"worker_command": (sys.executable, str(Path(__file__).with_name("cache_worker.py")))}
    )


def test_a_change_says_what_it_leaves_before_and_takes_effect_at_the_next_load(settings: Settings) -> None:
    running = Running(settings)
    try:
        assert running.client.get("/api/models/alpha").json()["options"]["kv_type"] is None
        pid = running.client.post("/api/models/alpha/load").json()["pid"]
        dry = running.client.patch("/api/models/alpha?dry_run=true", json={"kv_type": "8-bit"}).json()
        assert (dry["dry_run"], dry["new_cache"], dry["left_bytes"]) == (True, True, 0)
        assert not (settings.data_dir / "models.json").exists()
        done = running.client.patch("/api/models/alpha", json={"kv_type": "8-bit", "flags": ["--temp", "1"]}).json()
        assert done["new_cache"] and done["model"]["reload_needed"] and done["model"]["pid"] == pid
        kept = settings.data_dir / "models.json"
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert json.loads(kept.read_bytes())["models"]["alpha"] == {"kv_type": "8-bit", "flags": ["--temp", "1"]}
        # What is not named stays.
        running.client.patch("/api/models/alpha", json={"flags": []})
        assert running.client.get("/api/models/alpha").json()["options"]["kv_type"] == "8-bit"
        bad = running.client.patch("/api/models/alpha", json={"kv_type": "q8_0"})
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_options")
        assert running.client.patch("/api/models/alpha", json={"x": 1}).status_code == 400
        assert running.client.patch("/api/models/gamma", json={}).status_code == 404
    finally:
        running.close()
    again = Running(settings)
    try:
        assert again.client.get("/api/models/alpha").json()["options"]["kv_type"] == "8-bit"
        assert again.client.get("/api/models/beta").json()["options"]["kv_type"] is None
    finally:
        again.close()


def test_the_bytes_that_a_change_leaves_behind(settings: Settings) -> None:
    """Those of the model at this path, as it was run last."""
    from rewarm import Identity, Limits
    from rewarm import open as open_cache
    from rewarm.testing import FakeEngine

    engine, alpha = FakeEngine(), settings.models[0]
    (alpha / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    running = Running(settings)
    try:
        running.client.get("/api/stats")
        with open_cache(settings.cache_dir, limits=Limits()) as cache:
            identity = Identity.from_model(alpha, adapter="fake", engine="fake", engine_version="1")
            identity.wait(10)
            cache.namespace(identity).save(range(600), engine.state(range(600)))
            cache.flush()
        dry = running.client.patch("/api/models/alpha?dry_run=true", json={"kv_type": "4-bit"}).json()
        assert dry["new_cache"] and dry["left_bytes"] > 1000
        assert (
            running.client.patch("/api/models/beta?dry_run=true", json={"kv_type": "4-bit"}).json()["left_bytes"] == 0
        )
        same = running.client.patch("/api/models/alpha?dry_run=true", json={"flags": ["--temp", "1"]}).json()
        assert not same["new_cache"] and same["left_bytes"] == 0
    finally:
        running.close()


def test_caching_is_switched_off_for_one_model(settings: Settings) -> None:
    running = Running(worker_with_a_cache(settings))
    try:
        running.client.patch("/api/models/alpha", json={"caching": False})
        for model, reason in (("alpha", "disabled"), ("beta", "nothing_stored")):
            text = running.chat("one two three", model, stream=True, stream_options={"include_usage": True}).text
            assert f'"reason":"{reason}"' in text
    finally:
        running.close()


def test_a_models_file_that_cannot_be_read_stops_nothing(settings: Settings) -> None:
    settings.data_dir.mkdir()
    (settings.data_dir / "models.json").write_text('{"models": {"alpha": {"kv_type": 7}}}')
    running = Running(settings)
    try:
        assert running.chat("x").status_code == 200
    finally:
        running.close()


# When models go.


def test_an_idle_model_is_unloaded_and_comes_back(settings: Settings) -> None:
    running = Running(settings.model_copy(update={"idle_unload_s": 0.4}))
    try:
        running.chat("x")
        until(lambda: running.state()["state"] == "stopped")
        assert running.chat("x").status_code == 200
        assert running.client.put("/api/loading", json={"idle_unload_s": None}).json() == {"idle_unload_s": None}
        assert running.client.put("/api/loading", json={"idle_unload_s": -1}).status_code == 400
        running.chat("x")
        time.sleep(1.2)
        assert running.state()["state"] == "ready"
    finally:
        running.close()
    again = Running(settings.model_copy(update={"idle_unload_s": 0.4}))
    try:
        assert again.client.get("/api/loading").json() == {"idle_unload_s": None}
    finally:
        again.close()


def test_a_model_that_answers_is_not_idle(settings: Settings) -> None:
    running = Running(settings.model_copy(update={"idle_unload_s": 0.2}))
    try:
        body = {"model": "alpha", "messages": [{"role": "user", "content": "SLOW"}], "stream": True}
        with running.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(30):
                next(lines)
            assert running.gateway.workers.get("alpha").n_asked == 1
        until(lambda: running.state()["state"] == "stopped")
        assert running.gateway.workers.get("alpha").n_asked == 0
    finally:
        running.close()


def test_whoever_leaves_or_is_refused_leaves_no_request_behind(running: Running) -> None:
    for text in ("REFUSE", "DIE", "x"):
        running.chat(text)
    with pytest.raises(httpx.ReadTimeout):
        running.client.post(
            "/v1/chat/completions", json={"model": "alpha", "messages": [{"content": "HANG"}]}, timeout=0.5
        )
    until(lambda: running.gateway.workers.get("alpha").n_asked == 0)


def test_the_one_not_used_for_longest_makes_room(settings: Settings, tmp_path: Path) -> None:
    third = model_folder(tmp_path / "models" / "third")
    running = Running(settings.model_copy(update={"models": [*settings.models, third]}))
    for folder in (*settings.models, third):
        (folder / "model.safetensors").write_bytes(bytes(1000))
    workers = running.gateway.workers
    try:
        for name in ("alpha", "beta", "alpha"):
            running.chat("x", name)
        # Room for two of the three.
        workers._available_nbytes = lambda: 5000 - 2000 * sum(worker.pid is not None for worker in workers)  # type: ignore[method-assign]
        body = {"model": "beta", "messages": [{"role": "user", "content": "SLOW"}], "stream": True}
        assert running.chat("x", "third").status_code == 200
        assert [running.state(name)["state"] for name in ("alpha", "beta", "third")] == ["ready", "stopped", "ready"]
        # Never one that answers.
        with running.client.stream("POST", "/v1/chat/completions", json={**body, "model": "alpha"}) as answer:
            next(answer.iter_lines())
            assert running.chat("x", "beta").status_code == 200
            states = [running.state(name)["state"] for name in ("alpha", "beta", "third")]
            assert states == ["ready", "ready", "stopped"]
    finally:
        running.close()
