"""Which models are offered, under which names, and which worker runs each. Knows files; starts nothing.

A name is looked up, never joined into a path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rewarm.adapters.llama import bundled as gguf
from rewarm.adapters.llama import gguf_facts
from rewarm.adapters.mlx import bundled
from rewarm.errors import EngineError
from rewarm.gateway.settings import Settings

Progress = Callable[[float, str], None]
"""Called with the part that is done, 0 to 1, and what is being done."""

MLX_LM = ("mlx-lm",)
LLAMA_SERVER = ("llama-server",)
"""The commands of rewarm that run a worker: for folders, and for GGUF files."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the gateway offers.

    Attributes:
        name: on the API and the page; unique.
        prepare: gives the model's folder or GGUF file, made or checked now, on the calling thread;
            raises EngineError or OSError where there is none.
        is_bundled: whether it comes with rewarm.
        worker: the command of rewarm that runs it, with flags that belong to the model.
    """

    name: str
    prepare: Callable[[Progress], Path]
    is_bundled: bool = False
    worker: tuple[str, ...] = MLX_LM


def find_models(settings: Settings) -> list[Model]:
    """The models that `settings` ask for; whether they can be loaded is seen when they are."""
    found: list[Model] = []
    if settings.bundled:
        found.append(_bundled(settings.engine))
    for path in dict.fromkeys(_plain(path) for path in settings.models):
        is_gguf = path.suffix.lower() == ".gguf"
        name = _unused((path.stem if is_gguf else path.name) or "model", (model.name for model in found))
        if is_gguf:
            found.append(Model(name, _checked(path, check_gguf), worker=LLAMA_SERVER))
        else:
            found.append(Model(name, _checked(path, check_folder)))
    return found


def _bundled(engine: str) -> Model:
    """The model that comes with rewarm. llama.cpp reads its file as it is, and is several times quicker on a CPU."""
    if engine == "llama" or (engine == "auto" and gguf.is_preferred()):
        return Model(gguf.NAME, lambda _progress: gguf.path(), is_bundled=True, worker=(*LLAMA_SERVER, *gguf.FLAGS))
    return Model(bundled.NAME, bundled.ensure, is_bundled=True)


def check_gguf(path: Path) -> Path:
    """`path`, when it is a GGUF file, as far as its header tells.

    Raises:
        EngineError: it is not; says why.
    """
    try:
        gguf_facts.read(path)
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be loaded: {error}. A GGUF file is wanted here.") from None
    return path


def check_folder(path: Path) -> Path:
    """`path`, when it is a model folder that mlx-lm can load, as far as its files tell.

    Raises:
        EngineError: it is not; says why and what is wanted.
    """
    if path.suffix == ".gguf" or path.is_file():
        raise _unfit(path, "it is a file")
    if not path.is_dir():
        raise _unfit(path, "there is no such folder")
    try:
        config = json.loads((path / "config.json").read_bytes())
    except FileNotFoundError:
        raise _unfit(path, "it has no config.json") from None
    except (OSError, ValueError) as error:
        raise _unfit(path, f"its config.json cannot be read ({error})") from None
    if not isinstance(config, dict) or not any(path.glob("*.safetensors")):
        raise _unfit(
            path, "it has no weights (*.safetensors)" if isinstance(config, dict) else "its config is no object"
        )
    return path


def _checked(path: Path, check: Callable[[Path], Path]) -> Callable[[Progress], Path]:
    return lambda _progress: check(path)


def _unfit(path: Path, why: str) -> EngineError:
    return EngineError(
        f"{path} cannot be loaded: {why}. A model is a folder with config.json, a tokenizer and *.safetensors, "
        "or a GGUF file (*.gguf)."
    )


def _plain(path: Path) -> Path:
    whole = path.expanduser().absolute()
    # The last part names the model, so a symlink keeps its own name and `..` does not become one.
    return whole.resolve() if ".." in whole.parts else whole


def _unused(wanted: str, taken: Iterable[str]) -> str:
    names = set(taken)
    number, name = 1, wanted
    while name in names:
        number += 1
        name = f"{wanted}-{number}"
    return name
