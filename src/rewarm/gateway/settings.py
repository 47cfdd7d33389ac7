"""How the gateway starts: from arguments, else from `REWARM_*` in the environment, else by default.

Where things are and how they start; limits live in the cache folder, and one given here changes them there.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from rewarm.cache.prefix_cache import default_root
from rewarm.errors import GatewayError
from rewarm.units import parse_bytes

DEFAULT_PORT = 8420


class Settings(BaseSettings):
    """Settings of one gateway process.

    Attributes:
        host: a loopback address or `localhost`; others are refused.
        port: 0 takes a free one.
        cache_dir: the cache folder; `REWARM_DIR` in the environment names it too.
        models: folders of models to offer; in the environment separated as in PATH.
        bundled: whether the bundled model is offered.
        engine: what runs it: `mlx`, `llama`, or `auto`: llama.cpp where there is no Apple silicon.
        max_bytes, max_files: set in the cache folder at the start, when given.
        data_dir: where the chat page keeps its conversation.
        worker_command: what starts every worker instead of `python -m rewarm mlx-lm`; takes its flags.
        start_timeout_s: how long a worker may take until it can answer.
        stop_timeout_s: how long a worker may take to write what it holds and end, before it is killed.
        max_body_bytes: the largest request body.
    """

    model_config = SettingsConfigDict(env_prefix="REWARM_", extra="ignore", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(DEFAULT_PORT, ge=0, le=65535)
    cache_dir: Path = Field(default_factory=default_root)
    models: Annotated[list[Path], NoDecode] = []
    bundled: bool = True
    engine: Literal["auto", "mlx", "llama"] = "auto"
    max_bytes: int | None = Field(None, gt=0)
    max_files: int | None = Field(None, gt=0)
    data_dir: Path = Field(default_factory=lambda: platformdirs.user_data_path("rewarm"))
    worker_command: tuple[str, ...] | None = None
    start_timeout_s: float = Field(600.0, gt=0)
    stop_timeout_s: float = Field(15.0, gt=0)
    max_body_bytes: int = Field(32 * 2**20, gt=0)

    def __init__(self, **values: Any) -> None:
        """Read the environment, then `values`, which win.

        Raises:
            GatewayError: a value makes no sense; says which and why.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise GatewayError(f"These settings of the gateway make no sense: {wrong}") from None

    @field_validator("host")
    @classmethod
    def _only_loopback(cls, host: str) -> str:
        if not is_loopback(host):
            raise ValueError(
                f"{host!r} is not an address of this machine alone. This version answers at loopback addresses "
                "only, such as 127.0.0.1 or ::1, since it asks nobody for a key"
            )
        return host

    @field_validator("models", mode="before")
    @classmethod
    def _split_paths(cls, value: Any) -> Any:
        return [part for part in value.split(os.pathsep) if part] if isinstance(value, str) else value

    @field_validator("max_bytes", mode="before")
    @classmethod
    def _read_size(cls, value: Any) -> Any:
        return parse_bytes(value) if isinstance(value, str) else value

    @field_validator("cache_dir", "data_dir")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return path.expanduser().absolute()


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address without a port, can only mean this machine."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
