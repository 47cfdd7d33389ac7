"""Where models are found: folders laid out as other programs lay them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gateway_server import FAKE_WORKER, Running, model_folder

from rewarm.errors import EngineError
from rewarm.gateway import discovery, models
from rewarm.gateway.discovery import discover, nbytes_of
from rewarm.gateway.settings import Settings

COMMIT, OLDER = "a" * 40, "b" * 40
GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)


def mlx_files(folder: Path, n_shards: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for number in range(n_shards):
        (folder / f"model-{number}.safetensors").write_bytes(bytes(100))
    return folder


def gguf(path: Path, content: bytes = GGUF) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def manifest(root: Path, name: str, digest: str, *more: dict[str, Any]) -> None:
    layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": digest}, *more]
    path = root / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))


def found(source: str, home: Path, **env: str) -> list[tuple[str, str, Path]]:
    return [(one.name, one.format, one.path) for one in discover([source], env, home)]


def test_the_hub_cache(tmp_path: Path) -> None:
    hub = tmp_path / ".cache" / "huggingface" / "hub"
    qwen = hub / "models--org--Qwen3-4B-4bit"
    blob = gguf(qwen / "blobs" / ("f" * 64), b"weights")
    for commit in (OLDER, COMMIT):
        mlx_files(qwen / "snapshots" / commit)
        (qwen / "snapshots" / commit / "link.safetensors").symlink_to(blob)
    (qwen / "refs").mkdir()
    (qwen / "refs" / "main").write_text(COMMIT)
    files = hub / "models--org--files" / "snapshots" / COMMIT
    for name in ("m-Q4.gguf", "mmproj-m.gguf", "m-Q8-00001-of-00002.gguf", "m-Q8-00002-of-00002.gguf"):
        gguf(files / name)
    mlx_files(hub / "datasets--org--x" / "snapshots" / COMMIT)
    mlx_files(hub / "models--..--..--etc" / "snapshots" / COMMIT)
    (hub / "models--org--no-weights" / "snapshots" / COMMIT).mkdir(parents=True)
    assert found("huggingface", tmp_path) == [
        ("org/Qwen3-4B-4bit", "safetensors", qwen / "snapshots" / COMMIT),
        ("org/files/m-Q4", "gguf", files / "m-Q4.gguf"),
        ("org/files/m-Q8", "gguf", files / "m-Q8-00001-of-00002.gguf"),
    ]
    assert nbytes_of(files / "m-Q8-00001-of-00002.gguf") == 2 * len(GGUF)
    assert nbytes_of(qwen / "snapshots" / COMMIT) == 100 + len(b"weights")


def test_where_the_hub_cache_is(tmp_path: Path) -> None:
    for variable, folder in (
        ("HF_HOME", "one/hub"),
        ("HF_HUB_CACHE", "two"),
        ("XDG_CACHE_HOME", "three/huggingface/hub"),
    ):
        mlx_files(tmp_path / folder / "models--o--m" / "snapshots" / COMMIT)
        where = tmp_path / folder.removesuffix("/huggingface/hub").removesuffix("/hub")
        assert [name for name, *_ in found("huggingface", tmp_path / "home", **{variable: str(where)})] == ["o/m"]


def test_a_branch_that_points_elsewhere_is_not_followed(tmp_path: Path) -> None:
    repository = tmp_path / ".cache/huggingface/hub/models--o--m"
    mlx_files(tmp_path / "elsewhere")
    here = mlx_files(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("../../../../../elsewhere")
    assert found("huggingface", tmp_path) == [("o/m", "safetensors", here)]


def test_lm_studios_folders(tmp_path: Path) -> None:
    old, new = tmp_path / ".cache/lm-studio/models", tmp_path / ".lmstudio/models"
    folder = mlx_files(new / "mlx-community" / "Llama-4bit")
    file = gguf(old / "bartowski" / "Llama-GGUF" / "Llama-Q4_K_M.gguf")
    gguf(old / "bartowski" / "Llama-GGUF" / "torn.gguf", b"GG")
    assert found("lm-studio", tmp_path) == [
        ("bartowski/Llama-GGUF/Llama-Q4_K_M", "gguf", file),
        ("mlx-community/Llama-4bit", "safetensors", folder),
    ]


def test_ollamas_folder(tmp_path: Path) -> None:
    root = tmp_path / ".ollama" / "models"
    blob = gguf(root / "blobs" / f"sha256-{'1' * 64}")
    other = gguf(root / "blobs" / f"sha256-{'2' * 64}")
    gguf(root / "secret")
    library = "registry.ollama.ai/library"
    manifest(root, f"{library}/llama3.2/latest", f"sha256:{'1' * 64}")
    manifest(root, "registry.ollama.ai/someone/tiny/q4", f"sha256:{'2' * 64}")
    manifest(root, "hf.co/org/thing/Q8_0", f"sha256:{'2' * 64}")
    manifest(root, f"{library}/gone/latest", f"sha256:{'3' * 64}")
    manifest(root, f"{library}/evil/latest", "sha256:../secret")
    adapter = {"mediaType": "application/vnd.ollama.image.adapter", "digest": f"sha256:{'2' * 64}"}
    manifest(root, f"{library}/adapted/latest", f"sha256:{'1' * 64}", adapter)
    (root / "manifests" / library / "llama3.2" / "broken").write_text("{")
    assert found("ollama", tmp_path) == [("hf.co/org/thing:Q8_0", "gguf", other), ("llama3.2:latest", "gguf", blob)]
    assert [one.name for one in discovery.ollama(root)] == [
        "hf.co/org/thing:Q8_0", "llama3.2:latest", "someone/tiny:q4"
    ]  # fmt: skip
    assert found("ollama", tmp_path / "x", OLLAMA_MODELS=str(root))[1][0] == "llama3.2:latest"


def test_sources_are_switched_off_and_names_are_unique(home: Path, tmp_path: Path) -> None:
    mlx_files(home / ".lmstudio/models/o/m")
    mlx_files(home / ".cache/huggingface/hub/models--o--m/snapshots" / COMMIT)
    given = mlx_files(tmp_path / "m")

    def names(**values: Any) -> list[tuple[str, str]]:
        settings = Settings(models=[given], bundled=False, **values)
        return [(one.name, one.source) for one in models.find_models(settings)]

    assert names() == [("m", "given"), ("o/m", "huggingface"), ("o/m-2", "lm-studio")]
    assert names(discover=["lm-studio"]) == [("m", "given"), ("o/m", "lm-studio")]
    assert names(discover=[]) == [("m", "given")]


def test_the_environment_switches_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARM_DISCOVER", "ollama, huggingface")
    assert Settings().discover == ["ollama", "huggingface"]
    monkeypatch.setenv("REWARM_DISCOVER", "")
    assert Settings().discover == []


def test_a_given_folder_of_gguf_files_is_each_of_them(tmp_path: Path) -> None:
    gguf(tmp_path / "many" / "a.gguf")
    gguf(tmp_path / "many" / "b-00001-of-00003.gguf")
    found = models.find_models(Settings(models=[tmp_path / "many"], bundled=False))
    assert [(one.name, one.format, one.engine) for one in found] == [
        ("many/a", "gguf", "llama.cpp"), ("many/b", "gguf", "llama.cpp")
    ]  # fmt: skip


def test_a_model_without_its_engine_is_listed_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "missing_engine", lambda kind: f"the engine for {kind} is not installed")
    (model,) = models.find_models(Settings(models=[mlx_files(tmp_path / "m")], bundled=False))
    assert model.why_not == "the engine for safetensors is not installed"
    with pytest.raises(EngineError, match="is not installed"):
        model.prepare(lambda _part, _what: None)


def test_a_scan_finds_what_came_and_stops_what_went(home: Path, settings: Settings) -> None:
    running = Running(settings)
    try:
        running.chat("x", "beta")
        before = running.state("beta")["pid"]
        mlx_files(home / ".lmstudio/models/org/new")
        scanned = running.client.post("/api/models/scan").json()["models"]
        assert [one["name"] for one in scanned] == ["alpha", "beta", "org/new"]
        assert scanned[2]["source"] == "lm-studio"
        assert running.state("beta")["pid"] == before
        assert running.chat("one two", "org/new").json()["model"] == "org/new"
        assert running.client.get("/v1/models/org/new").json()["id"] == "org/new"
        assert running.client.post("/api/models/org/new/unload").json()["state"] == "stopped"
        (home / ".lmstudio").rename(home / "gone")
        assert [one["name"] for one in running.client.post("/api/models/scan").json()["models"]] == ["alpha", "beta"]
        assert running.chat("x", "org/new").status_code == 404
    finally:
        running.close()


def test_a_name_is_never_a_path(home: Path, settings: Settings) -> None:
    assert settings.worker_command == FAKE_WORKER
    model_folder(home / "outside")
    running = Running(settings)
    try:
        for name in (
            "../outside",
            str(home / "outside"),
            "alpha/../../outside",
            "alpha\0",
            "%2e%2e/outside",
            "-",
            "a" * 5000,
        ):
            assert running.chat("x", name).status_code == 404
            for path in (f"/v1/models/{name}", f"/api/models/{name}"):
                if "\0" not in name:
                    assert running.client.get(path).status_code in (404, 414)
        assert running.asked() == []
    finally:
        running.close()
