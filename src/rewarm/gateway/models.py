"""Which models are offered, under which names, and which worker runs each. Knows files; starts nothing.

A name is looked up, never joined into a path.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rewarm.adapters.llama import bundled as gguf
from rewarm.adapters.llama import gguf_facts
from rewarm.adapters.mlx import bundled
from rewarm.errors import EngineError
from rewarm.gateway import discovery
from rewarm.gateway.discovery import Found
from rewarm.gateway.settings import Settings

Progress = Callable[[float, str], None]
"""Called with the part that is done, 0 to 1, and what is being done."""

MLX_LM = ("mlx-lm",)
LLAMA_SERVER = ("llama-server",)
"""The commands of rewarm that run a worker: for folders, and for GGUF files."""


_COMPLETIONS = frozenset({"/v1/chat/completions", "/v1/completions"})
_MORE_OF_LLAMA = frozenset({"/v1/responses", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens"})


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the gateway offers.

    Attributes:
        name: on the API and the page; unique.
        prepare: gives the model's folder or GGUF file, made or checked now, on the calling thread;
            raises EngineError or OSError where there is none.
        is_bundled: whether it comes with rewarm.
        worker: the command of rewarm that runs it, with flags that belong to the model.
        path: its folder or file, where that is known before it is prepared.
        source: where it was found: `given`, `bundled`, `huggingface`, `lm-studio` or `ollama`.
        why_not: why it cannot be loaded here, such as an engine that is not installed; "" when it can.
    """

    name: str
    prepare: Callable[[Progress], Path]
    is_bundled: bool = False
    worker: tuple[str, ...] = MLX_LM
    path: Path | None = None
    source: str = discovery.GIVEN
    why_not: str = ""

    @property
    def format(self) -> str:
        """`gguf` or `safetensors`."""
        return discovery.GGUF if self.worker[0] == LLAMA_SERVER[0] else discovery.SAFETENSORS

    @property
    def engine(self) -> str:
        """What runs it: `llama.cpp` or `mlx-lm`."""
        return "llama.cpp" if self.format == discovery.GGUF else "mlx-lm"

    @property
    def apis(self) -> frozenset[str]:
        """Paths of the API that its engine answers."""
        return _COMPLETIONS | _MORE_OF_LLAMA if self.format == discovery.GGUF else _COMPLETIONS

    @property
    def nbytes(self) -> int:
        """Bytes of its weights, about what it takes in memory; 0 where that is not known."""
        return discovery.nbytes_of(self.path) if self.path is not None else 0


def find_models(settings: Settings) -> list[Model]:
    """The models that `settings` ask for; whether they can be loaded is seen when they are.

    Those that are given come first, so that nothing that is found later takes a name of theirs.
    """
    found: list[Model] = []
    if settings.bundled:
        found.append(_bundled(settings.engine, is_checked=settings.worker_command is None))
    given = [one for path in dict.fromkeys(_plain(path) for path in settings.models) for one in _given(path)]
    elsewhere = discovery.discover(settings.discover)
    seen = {one.path.resolve() for one in given}
    names = {model.name for model in found}
    for one in (*given, *(one for one in elsewhere if one.path.resolve() not in seen)):
        name = _unused(one.name, names)
        names.add(name)
        found.append(_model(name, one, settings))
    return found


def _given(path: Path) -> list[Found]:
    """What a path means that was given: a GGUF file, a model's folder, or a folder of GGUF files."""
    if path.suffix.lower() == ".gguf":
        return [Found(discovery.gguf_name(path) or "model", path, discovery.GGUF, discovery.GIVEN)]
    inside = [] if (path / "config.json").exists() else discovery.in_folder(path, path.name, discovery.GIVEN)
    # A folder that is not there, or holds nothing, is offered: it may come, and says why when it is loaded.
    return inside or [Found(path.name or "model", path, discovery.SAFETENSORS, discovery.GIVEN)]


def _model(name: str, one: Found, settings: Settings) -> Model:
    is_gguf = one.format == discovery.GGUF
    worker, check = (LLAMA_SERVER, check_gguf) if is_gguf else (MLX_LM, check_folder)
    why_not = "" if settings.worker_command else missing_engine(one.format)
    prepare = _checked(one.path, check) if not why_not else _refusing(why_not)
    return Model(name, prepare, worker=worker, path=one.path, source=one.source, why_not=why_not)


def missing_engine(format: str) -> str:  # noqa: A002 - as the field is called
    """Why a model of that format cannot be loaded here; "" when it can."""
    if format == discovery.GGUF:
        is_there = gguf.has_engine()
        return "" if is_there else "llama.cpp is not installed: pip install 'rewarm[llama]', then load it again."
    return "" if _is_installed("mlx_lm") else "mlx-lm is not installed: pip install 'rewarm[mlx]', then load it again."


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def _refusing(why_not: str) -> Callable[[Progress], Path]:
    def refuse(_progress: Progress) -> Path:
        raise EngineError(why_not)

    return refuse


def _bundled(engine: str, *, is_checked: bool) -> Model:
    """The model that comes with rewarm. llama.cpp reads its file as it is, and is several times quicker on a CPU.

    Args:
        engine: what runs it: `mlx`, `llama`, `auto`.
        is_checked: whether rewarm's own engines run it: what they lack is said before it is loaded.
    """
    if engine == "llama" or (engine == "auto" and gguf.is_preferred()):
        path, why_not = _bundled_file()
        why_not = (why_not or missing_engine(discovery.GGUF)) if is_checked else ""
        return Model(
            gguf.NAME,
            _refusing(why_not) if why_not else lambda _progress: gguf.path(),
            is_bundled=True,
            worker=(*LLAMA_SERVER, *gguf.FLAGS),
            path=path,
            source=discovery.BUNDLED,
            why_not=why_not,
        )
    return Model(bundled.NAME, bundled.ensure, is_bundled=True, path=bundled.place(), source=discovery.BUNDLED)


def _bundled_file() -> tuple[Path | None, str]:
    """The bundled model's GGUF file, or why there is none."""
    try:
        return gguf.path(), ""
    except EngineError as error:
        return None, str(error)


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
