"""Which models are offered, under which names. Knows folders and no engine; starts nothing.

A name is looked up, never joined into a path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rewarm.adapters.mlx import bundled
from rewarm.errors import EngineError
from rewarm.gateway.settings import Settings

Progress = Callable[[float, str], None]
"""Called with the part that is done, 0 to 1, and what is being done."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the gateway offers.

    Attributes:
        name: on the API and the page; unique.
        prepare: gives the model's folder, made or checked now, on the calling thread;
            raises EngineError or OSError where there is none.
        is_bundled: whether it comes with rewarm.
    """

    name: str
    prepare: Callable[[Progress], Path]
    is_bundled: bool = False


def find_models(settings: Settings) -> list[Model]:
    """The models that `settings` ask for; whether they can be loaded is seen when they are."""
    found: list[Model] = []
    if settings.bundled:
        found.append(Model(bundled.NAME, bundled.ensure, is_bundled=True))
    for path in dict.fromkeys(_plain(path) for path in settings.models):
        name = _unused(path.name or "model", (model.name for model in found))
        found.append(Model(name, _checked(path)))
    return found


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


def _checked(path: Path) -> Callable[[Progress], Path]:
    return lambda _progress: check_folder(path)


def _unfit(path: Path, why: str) -> EngineError:
    return EngineError(
        f"{path} cannot be loaded: {why}. A model is a folder with config.json, a tokenizer and *.safetensors."
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
