"""How the gateway starts: arguments, else `REWARM_*` in the environment, else the configuration file, else defaults.

Where things are and how they start; limits live in the cache folder, and one given here changes them there. A new
field of `Settings` can be given in all four ways at once; `docs/configuration.md` must name it.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from rewarm.cache.config_file import config_path, from_file, read_config
from rewarm.cache.prefix_cache import default_root
from rewarm.errors import ConfigurationError, GatewayError
from rewarm.units import parse_bytes

DEFAULT_PORT = 8420

FOLDER = "cache_dir"
"""The field that the environment and the file call `dir`: whoever opens a cache reads that, not the gateway alone."""

ORDERS = ("max_bytes", "max_files")
"""Fields that change the cache folder at every start; the file, which stays, may not give such an order."""


class Settings(BaseSettings):
    """Settings of one gateway process.

    Attributes:
        host: the address to listen at; another than a loopback one needs an API key.
        port: 0 takes a free one.
        cache_dir: the cache folder; `REWARM_DIR` in the environment names it too.
        models: folders of models to offer; in the environment separated as in PATH.
        discover: whose models are offered too: `huggingface`, `lm-studio`, `ollama`; in the environment with commas.
        bundled: whether the bundled model is offered.
        api_keys: `KEY`, `KEY:share`, `KEY:admin` (see `keys`); one is needed where `host` is no loopback address.
        engine: what runs it: `mlx`, `llama`, or `auto`: llama.cpp where there is no Apple silicon.
        max_bytes, max_files: set in the cache folder at the start, when given.
        data_dir: where the chat page keeps its conversation.
        worker_command: what starts every worker instead of `python -m rewarm mlx-lm`; takes its flags.
        idle_unload_s: a model that was not asked for so long is unloaded; None keeps it.
        start_timeout_s: how long a worker may take until it can answer.
        stop_timeout_s: how long a worker may take to write what it holds and end, before it is killed.
        max_body_bytes: the largest request body.
    """

    model_config = SettingsConfigDict(env_prefix="REWARM_", extra="ignore", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(DEFAULT_PORT, ge=0, le=65535)
    cache_dir: Path = Field(default_factory=default_root)
    models: Annotated[list[Path], NoDecode] = []
    discover: Annotated[list[Literal["huggingface", "lm-studio", "ollama"]], NoDecode] = [
        *("huggingface", "lm-studio", "ollama"),
    ]
    bundled: bool = True
    api_keys: Annotated[list[SecretStr], NoDecode] = Field([], validate_default=True)
    engine: Literal["auto", "mlx", "llama"] = "auto"
    max_bytes: int | None = Field(None, gt=0, lt=2**63)
    max_files: int | None = Field(None, gt=0, lt=2**63)
    data_dir: Path = Field(default_factory=lambda: platformdirs.user_data_path("rewarm"))
    worker_command: tuple[str, ...] | None = Field(None, min_length=1)
    idle_unload_s: float | None = Field(None, gt=0, lt=2**31)
    start_timeout_s: float = Field(600.0, gt=0, le=86_400)
    stop_timeout_s: float = Field(15.0, gt=0, le=86_400)
    max_body_bytes: int = Field(32 * 2**20, gt=0, lt=2**40)

    def __init__(self, **values: Any) -> None:
        """Read the file, then the environment, which wins, then `values`, which win over both.

        Raises:
            ConfigurationError: the file cannot be read, or has a name that is none of a setting.
            GatewayError: a value makes no sense; says which, why, and where it stands.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            wrong = "; ".join(_told(one["loc"], one["msg"], values) for one in error.errors())
            raise GatewayError(f"These settings of the gateway make no sense: {wrong}. Nothing was started.") from None
        except SettingsError as error:  # text of the environment that is no JSON, where a list is wanted
            raise GatewayError(f"These settings of the gateway make no sense: {error}. Nothing was started.") from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, the environment, the file: the first one that names a setting gives it."""
        return init_settings, _Environment(settings_cls), _File(settings_cls)

    def keys(self) -> list[str]:
        """The API keys, with what each may."""
        return [key.get_secret_value() for key in self.api_keys]

    @field_validator("api_keys", "discover", mode="before")
    @classmethod
    def _split_list(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("api_keys")
    @classmethod
    def _needed_elsewhere(cls, keys: list[SecretStr], info: ValidationInfo) -> list[SecretStr]:
        host = info.data.get("host", "")
        if not keys and host and not is_loopback(host):
            raise ValueError(
                f"the host {host!r} is not an address of this machine alone, so an API key is needed there: set "
                "REWARM_API_KEYS, or api_keys in the configuration file; or listen at 127.0.0.1"
            )
        return keys

    @field_validator("models", mode="before")
    @classmethod
    def _split_paths(cls, value: Any) -> Any:
        return [part for part in value.split(os.pathsep) if part] if isinstance(value, str) else value

    @field_validator("max_bytes", mode="before")
    @classmethod
    def _read_size(cls, value: Any) -> Any:
        return parse_bytes(value) if isinstance(value, str) else value

    @field_validator("worker_command")
    @classmethod
    def _is_a_program(cls, command: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if command is not None and not command[0].strip():
            raise ValueError("it names no program")
        return command

    @field_validator("cache_dir", "data_dir")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()


class _Environment(EnvSettingsSource):
    """`REWARM_*`; the cache folder is `REWARM_DIR`, which is read where caches are opened."""

    def __call__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__call__().items() if name != FOLDER}


class _File(TomlConfigSettingsSource):
    """The configuration file, its paths made whole."""

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls, toml_file=None)
        given = read_config()
        check_names(given)
        for name in ("data_dir", "models"):
            if name in given:
                given[name] = _whole(given[name])
        self.init_kwargs = {name: value for name, value in given.items() if name != "dir"}
        self.toml_data = self.init_kwargs

    def __call__(self) -> dict[str, Any]:
        return dict(self.init_kwargs)


def names_in_file() -> list[str]:
    """The names that may stand in the configuration file."""
    return ["dir" if name == FOLDER else name for name in Settings.model_fields if name not in ORDERS]


def check_names(given: Iterable[str]) -> None:
    """Refuse names in the file that are none of a setting.

    Raises:
        ConfigurationError: there is one; says which, and what could be meant.
    """
    known = names_in_file()
    limits = (*ORDERS, "min_free_bytes")
    wrong = []
    for name in given:
        if name in limits:
            wrong.append(f"{name}: limits live in the cache folder, set it with `rewarm config set {name} VALUE`")
        elif name not in known:
            near = difflib.get_close_matches(name, known, 1)
            wrong.append(f"{name}: there is no such setting{f'; {near[0]} perhaps' if near else ''}")
    if wrong:
        raise ConfigurationError(f"{config_path()} has what does not belong there. {'. '.join(wrong)}.")


def origin(name: str) -> str:
    """What gives a setting its value where no argument does: a variable, the file, or `default`."""
    variable = f"REWARM_{'dir' if name == FOLDER else name}".upper()
    if any(each.upper() == variable and value for each, value in os.environ.items()):
        return f"{variable} in the environment"
    return str(config_path()) if ("dir" if name == FOLDER else name) in read_config() else "default"


def _told(loc: tuple[int | str, ...], why: str, values: Mapping[str, Any]) -> str:
    name = str(loc[0]) if loc else ""
    where = "" if name in values or not name else f" ({origin(name)})"
    return f"{'.'.join(map(str, loc))}{where}: {why}"


def _whole(value: Any) -> Any:
    """A path in the file, or each path of a list; what is neither is left for the check of its type."""
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return from_file(value) if isinstance(value, str) and value and "\0" not in value else value


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address without a port, can only mean this machine."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
