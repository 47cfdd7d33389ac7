"""Where models lie on this machine: the hub cache, LM Studio's and Ollama's folders, and paths that are given.

Looks at names, at small JSON files and at the first bytes of GGUF files; reads no weights and loads nothing. A
name is looked up by whoever uses it, never joined into a path.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GGUF, SAFETENSORS = "gguf", "safetensors"
GIVEN, BUNDLED, HUGGING_FACE, LM_STUDIO, OLLAMA = "given", "bundled", "huggingface", "lm-studio", "ollama"

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MODEL_LAYER, _ADAPTER_LAYER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"
_MAX_JSON_NBYTES = 1 << 22
_MAX_LOOKED_AT = 5000
"""Folders of one source that are looked at: a source that is larger is none that its program made."""


@dataclass(frozen=True, slots=True)
class Found:
    """A model that lies on this machine.

    Attributes:
        name: its own, not yet made unique.
        path: the folder, or the GGUF file (of several, the first).
        format: `safetensors` or `gguf`.
        source: where it was found.
    """

    name: str
    path: Path
    format: str
    source: str


def discover(sources: Iterable[str], env: Mapping[str, str] | None = None, home: Path | None = None) -> list[Found]:
    """The models that other programs keep, in the order of `sources`, then by name; what cannot be read is left out.

    Args:
        sources: of `huggingface`, `lm-studio`, `ollama`.
        env: variables that move these folders; the process' own when None.
        home: the user's folder.
    """
    where, base = os.environ if env is None else env, home or Path.home()
    readers = {
        HUGGING_FACE: lambda: _each(hugging_face, hub_folders(where, base)),
        LM_STUDIO: lambda: _each(lm_studio, [base / ".lmstudio" / "models", base / ".cache" / "lm-studio" / "models"]),
        OLLAMA: lambda: _each(ollama, ollama_folders(where, base)),
    }
    found: list[Found] = []
    seen: set[Path] = set()
    for source in sources:
        for model in sorted(readers[source](), key=lambda one: one.name):
            real = model.path.resolve()
            if real not in seen:
                seen.add(real)
                found.append(model)
    return found


def hub_folders(env: Mapping[str, str], home: Path) -> list[Path]:
    """Where huggingface_hub keeps what it fetched."""
    if named := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return [Path(named).expanduser()]
    if named := env.get("HF_HOME"):
        return [Path(named).expanduser() / "hub"]
    caches = env.get("XDG_CACHE_HOME")
    return [(Path(caches).expanduser() if caches else home / ".cache") / "huggingface" / "hub"]


def ollama_folders(env: Mapping[str, str], home: Path) -> list[Path]:
    """Where Ollama keeps its models: the user's own, or those of its service."""
    if named := env.get("OLLAMA_MODELS"):
        return [Path(named).expanduser()]
    return [home / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


def hugging_face(folder: Path) -> Iterator[Found]:
    """The models of a hub cache: `models--ORG--NAME/snapshots/COMMIT`."""
    for repository in _folders(folder):
        kind, *parts = repository.name.split("--")
        if kind != "models" or not parts or any(part in ("", ".", "..") for part in parts):
            continue
        snapshot = _snapshot(repository)
        if snapshot is not None:
            yield from in_folder(snapshot, "/".join(parts), HUGGING_FACE)


def lm_studio(folder: Path) -> Iterator[Found]:
    """The models of LM Studio: `PUBLISHER/NAME/files`."""
    for publisher in _folders(folder):
        for model in _folders(publisher):
            yield from in_folder(model, f"{publisher.name}/{model.name}", LM_STUDIO)


def ollama(folder: Path) -> Iterator[Found]:
    """The models of Ollama: `manifests/HOST/NAMESPACE/NAME/TAG` names blobs, `blobs/sha256-...`."""
    for host in _folders(folder / "manifests"):
        for namespace in _folders(host):
            for model in _folders(namespace):
                for tag in _files(model):
                    blob = _ollama_blob(folder / "blobs", tag)
                    if blob is not None:
                        yield Found(_ollama_name(tag), blob, GGUF, OLLAMA)


def in_folder(folder: Path, name: str, source: str) -> list[Found]:
    """The models in one folder: itself, if it holds safetensors and a config; and each GGUF file."""
    files = [file for file in _files(folder) if not file.name.startswith(".")]
    found: list[Found] = []
    if any(file.suffix == ".safetensors" for file in files) and "model_type" in _read_json(folder / "config.json"):
        found.append(Found(name, folder, SAFETENSORS, source))
    found += [Found(f"{name}/{gguf_name(file)}", file, GGUF, source) for file in files if is_gguf_model(file)]
    return found


def is_gguf_model(file: Path) -> bool:
    """Whether a file is a model, or the first of one in several: no projector, no later part."""
    shard = _SHARD.search(file.stem)
    is_one = file.suffix.lower() == ".gguf" and "mmproj" not in file.name.lower() and (not shard or int(shard[1]) == 1)
    return is_one and _is_gguf(file)


def gguf_name(file: Path) -> str:
    """A GGUF file's name, without the parts' count."""
    return _SHARD.sub("", file.stem)


def nbytes_of(path: Path) -> int:
    """Bytes of a model's weights: about what it takes in memory. 0 when it cannot be read."""
    if path.is_dir():
        files = [file for file in _files(path) if file.suffix == ".safetensors"]
    elif shard := _SHARD.search(path.stem):
        prefix = path.stem[: shard.start()]
        files = [file for file in _files(path.parent) if file.name.startswith(f"{prefix}-")]
    else:
        files = [path]
    total = 0
    for file in files:
        try:
            total += file.stat().st_size
        except OSError:
            continue
    return total


def _each(read: Any, folders: Iterable[Path]) -> Iterator[Found]:
    for folder in folders:
        yield from read(folder)


def _snapshot(repository: Path) -> Path | None:
    """The snapshot that the branch `main` means, else the newest."""
    try:
        commit = (repository / "refs" / "main").read_text()[:80].strip()
    except (OSError, UnicodeDecodeError):
        commit = ""
    snapshots = _folders(repository / "snapshots")
    if _COMMIT.fullmatch(commit) and any(one.name == commit for one in snapshots):
        return repository / "snapshots" / commit
    dated = [(one.stat().st_mtime, one) for one in snapshots]
    return max(dated)[1] if dated else None


def _ollama_blob(blobs: Path, manifest: Path) -> Path | None:
    layers = _read_json(manifest).get("layers")
    parts = [one for one in layers if isinstance(one, dict)] if isinstance(layers, list) else []
    models = [one for one in parts if one.get("mediaType") == _MODEL_LAYER]
    # An adapter beneath the model is another model; one in several layers is none that llama.cpp opens.
    if len(models) != 1 or any(one.get("mediaType") == _ADAPTER_LAYER for one in parts):
        return None
    digest = _DIGEST.fullmatch(str(models[0].get("digest")))
    blob = blobs / f"sha256-{digest[1]}" if digest else None
    return blob if blob is not None and _is_gguf(blob) else None


def _ollama_name(tag: Path) -> str:
    model, namespace, host = tag.parent, tag.parent.parent, tag.parent.parent.parent
    parts = [f"{model.name}:{tag.name}"]
    if namespace.name != "library" or host.name != "registry.ollama.ai":
        parts.insert(0, namespace.name)
    if host.name != "registry.ollama.ai":
        parts.insert(0, host.name)
    return "/".join(parts)


def _is_gguf(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def _read_json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MAX_JSON_NBYTES:
            return {}
        read = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _folders(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(folder) if _is(entry.is_dir)]


def _files(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in _entries(folder) if _is(entry.is_file)]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            found = [entry for _, entry in zip(range(_MAX_LOOKED_AT), entries, strict=False)]
    except OSError:
        return []
    return sorted(found, key=lambda entry: entry.name)


def _is(question: Any) -> bool:
    try:
        return bool(question())
    except OSError:
        return False
