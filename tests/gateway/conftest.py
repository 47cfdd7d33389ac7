"""A gateway on a real port, with fake workers beneath it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the gateway's packages")

from gateway_server import FAKE_WORKER, Running, model_folder

from rewarm.gateway.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Two models, fake workers, folders of the test's own."""
    return Settings(
        cache_dir=tmp_path / "kv",
        data_dir=tmp_path / "data",
        models=[model_folder(tmp_path / "models" / name) for name in ("alpha", "beta")],
        bundled=False,
        worker_command=FAKE_WORKER,
        stop_timeout_s=5,
    )


@pytest.fixture
def running(settings: Settings) -> Iterator[Running]:
    """A gateway with the models `alpha` and `beta`."""
    gateway = Running(settings)
    yield gateway
    gateway.close()
