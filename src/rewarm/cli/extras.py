"""What a command needs beyond the core, imported when the command runs and no sooner.

So `rewarm --help`, `ls` and `clear` work where no engine and no gateway is installed. Knows which extra
brings which package, and nothing of what they do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rewarm.cache.config_file import config_path, read_config
from rewarm.cache.prefix_cache import default_root
from rewarm.errors import EngineError, GatewayError

EXTRAS = {
    "cli": ("rich", "typer"),
    "mlx": ("mlx", "mlx_lm", "tokenizers", "transformers"),
    "llama": ("xllamacpp",),
    "gateway": ("fastapi", "httpx", "nicegui", "prometheus_client", "pydantic_settings", "uvicorn"),
}
"""The packages that each optional extra of rewarm brings, by the names they are imported under."""


def mlx_lm_main() -> Callable[[list[str]], int]:
    """The worker's main function: takes its arguments, gives its exit code.

    Raises:
        EngineError: mlx-lm is not installed.
    """
    with needs("mlx"):
        from rewarm.adapters.mlx.server import main
    return main


def llama_server_main() -> Callable[[list[str]], int]:
    """The worker's main function: takes its arguments, gives its exit code. Needs no package but an engine's."""
    from rewarm.adapters.llama.server import main

    return main


def bundled_model(progress: Callable[[float, str], None]) -> Path:
    """The folder of the bundled model, converted now if it is not there yet.

    Raises:
        EngineError: mlx-lm or the package with the weights is not installed, or the conversion failed.
    """
    with needs("mlx"):
        # Asked now, so that no model is converted and no worker started in vain.
        if importlib.util.find_spec("mlx_lm") is None:
            raise ModuleNotFoundError(name="mlx_lm")
        from rewarm.adapters.mlx import bundled
    return bundled.ensure(progress)


def bundled_gguf() -> Path:
    """The GGUF file of the bundled model, as it is.

    Raises:
        EngineError: xllamacpp or the package with the weights is not installed.
    """
    with needs("llama"):
        if importlib.util.find_spec("xllamacpp") is None:
            raise ModuleNotFoundError(name="xllamacpp")
    from rewarm.adapters.llama import bundled

    return bundled.path()


def prefers_llama() -> bool:
    """Whether the bundled model runs on llama.cpp here: off Apple silicon, where that engine is installed."""
    from rewarm.adapters.llama import bundled

    return bundled.is_preferred()


def template_flags(model: Path) -> list[str]:
    """Flags for llama-server that give a GGUF file without a chat template its family's.

    Raises:
        EngineError: the file cannot be read as one.
    """
    from rewarm.adapters.llama import gguf_facts

    try:
        return gguf_facts.template_flags(model)
    except (OSError, ValueError) as error:
        raise EngineError(f"{model} is no GGUF file: {error}") from None


def tokenizer_of(path: Path) -> Any:
    """The tokenizer in a model folder or `tokenizer.json`, with `encode(text).ids` and `decode(ids)`.

    Raises:
        EngineError: the package `tokenizers` is not installed, or there is no tokenizer.
    """
    with needs("mlx"):
        from rewarm.adapters.tokenizer import load
    return load(path)


def serve_gateway(given: Mapping[str, Any]) -> None:
    """Open the gateway and stay until it ends.

    Args:
        given: the settings that the command line names; the others keep their defaults.

    Raises:
        EngineError: a package of the gateway is not installed.
    """
    with needs("gateway"):
        from rewarm.gateway.serve import run
        from rewarm.gateway.settings import Settings
    run(Settings(**given))


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Turn the import error of a package that `extra` brings into advice.

    Raises:
        EngineError: such a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS[extra]:
            raise
        raise EngineError(
            f"This command needs the Python package {error.name}, which is not installed. "
            f"Install it with: pip install 'rewarm[{extra}]'"
        ) from None


def gateway_settings() -> dict[str, tuple[Any, str]]:
    """Every setting of the gateway's start: its value and where it came from; of `dir` alone where it is not installed.

    Raises:
        ConfigurationError, GatewayError: a setting makes no sense.
    """
    try:
        from rewarm.gateway import settings
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS["gateway"]:
            raise
        return {"dir": (str(default_root()), _origin_of_folder())}
    values = settings.Settings().model_dump(mode="json")
    return {
        "dir" if name == settings.FOLDER else name: (value, settings.origin(name))
        for name, value in values.items()
        if name not in settings.ORDERS or value is not None
    }


def _origin_of_folder() -> str:
    if os.environ.get("REWARM_DIR"):
        return "REWARM_DIR in the environment"
    return str(config_path()) if "dir" in read_config() else "default"


def names_in_file() -> list[str]:
    """The names that may stand in the configuration file, as far as they are known here."""
    try:
        from rewarm.gateway.settings import names_in_file as names
    except ModuleNotFoundError:
        return ["dir"]
    return names()


def check_setting(name: str, value: Any) -> None:
    """Refuse a value for the configuration file that makes no sense; checks `dir` alone without the gateway.

    Raises:
        GatewayError: it makes none.
    """
    if name == "dir":
        if not value.strip() or "\0" in value:
            raise GatewayError(f"dir cannot be {value!r}.")
        return
    with needs("gateway"):
        from rewarm.gateway.settings import Settings
    Settings(**{name: value})


def found_models() -> list[dict[str, Any]] | None:
    """The models that the gateway would offer, as plain values; None where the gateway is not installed.

    Raises:
        ConfigurationError, GatewayError: a setting makes no sense.
    """
    if not has_gateway():
        return None
    from rewarm.gateway.models import find_models
    from rewarm.gateway.settings import Settings

    return [
        {
            "name": model.name,
            "source": model.source,
            "engine": model.engine,
            "format": model.format,
            "path": None if model.path is None else str(model.path),
            "nbytes": model.nbytes,
            "why_not": model.why_not,
            "file_name": "" if model.path is None else model.path.stem if model.format == "gguf" else model.path.name,
        }
        for model in find_models(Settings())
    ]


def has_gateway() -> bool:
    """Whether the packages are installed that its settings and models need."""
    try:
        return importlib.util.find_spec("pydantic_settings") is not None
    except ModuleNotFoundError:
        return False


def gateway_address() -> tuple[str, int, str | None] | None:
    """Host, port and key of the gateway, as it is configured; None where it is not installed.

    Raises:
        ConfigurationError, GatewayError: a setting makes no sense.
    """
    if not has_gateway():
        return None
    from rewarm.gateway.settings import Settings

    settings = Settings()
    keys = settings.keys()
    return settings.host.strip("[]"), settings.port, keys[0].partition(":")[0] if keys else None


def worker_command(model: str, progress: Callable[[float, str], None]) -> list[str]:
    """The arguments of `rewarm` that run a worker for a model: one that is found under that name, or a path.

    Raises:
        EngineError: there is no such model, or it cannot be loaded.
    """
    path = Path(model)
    if path.exists():
        return [*_LLAMA, str(path)] if path.suffix.lower() == ".gguf" else [*_MLX, str(path)]
    if not has_gateway():
        raise EngineError(f"There is no model at {model}. To name one that is found: pip install 'rewarm[gateway]'.")
    from rewarm.gateway.models import find_models
    from rewarm.gateway.settings import Settings

    found = {each.name: each for each in find_models(Settings())}
    if model not in found:
        raise EngineError(f"No model is called {model!r}, and there is none at that path; `rewarm models` lists them.")
    command, *flags = found[model].worker
    return [command, "--model", str(found[model].prepare(progress)), *flags]


_MLX, _LLAMA = ("mlx-lm", "--model"), ("llama-server", "--ctx-size", "8192", "--parallel", "1", "--model")
