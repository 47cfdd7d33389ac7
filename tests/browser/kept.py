"""A cache folder with conversations in it, for the tests of the Cache and Settings pages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rewarm
from rewarm.state.layout import Kind
from rewarm.testing.driver import ROOMY, Driver
from rewarm.testing.fake_engine import FakeEngine, Part

WORKER = [sys.executable, str(Path(__file__).parents[1] / "gateway" / "cache_worker.py")]
"""A worker with a real cache and no model."""

TITLES = ("Plan a week in Lisbon", "Why is the sky blue?", "Grandmother's apple cake", "Regex for dates")
SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]
SMALL = FakeEngine(layers=((Part("k", Kind.ROWS, "uint8", (1,)),),))


def fill(folder: Path, n: int = len(TITLES), engine: FakeEngine | None = None) -> None:
    """Conversations behind one system prompt, latest last; 4 tokens to a block. The first ones have titles."""
    driver = Driver(folder / "kv", engine or FakeEngine(), limits=ROOMY)
    driver.save(SYSTEM, "system")
    for number in range(n):
        driver.save([*SYSTEM, *range(100 * number + 100, 100 * number + 107)], label=f"{number:032x}")
        if number % 500 == 499:
            driver.flush()
    driver.close()
    chats = folder / "data" / "chats"
    chats.mkdir(parents=True)
    for number, title in enumerate(TITLES[:n]):
        said = {"id": f"{number:032x}", "updated_s": number, "messages": [{"role": "user", "content": title}]}
        (chats / f"{number:032x}.json").write_text(json.dumps(said))


def serve_filled(
    serve: Callable[..., Any], folder: Path, n: int = len(TITLES), engine: FakeEngine | None = None
) -> Any:
    """A gateway over such a folder, with one model."""
    fill(folder, n, engine)
    return serve([model(folder)], WORKER)


def model(folder: Path) -> Path:
    """A folder that passes for a model's."""
    made = folder / "models" / "alpha"
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").touch()
    return made


def entries(root: Path) -> list[rewarm.Entry]:
    """What a folder holds, as another program sees it."""
    with rewarm.open(root) as cache:
        return cache.entries()
