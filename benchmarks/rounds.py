"""How things are measured: alternating rounds, ratios, a cold page cache, the machine in words."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Action = Callable[[], object]

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table.

    Attributes:
        measure: what was measured.
        against: what it was held against.
        ratios: one a round; of speeds: theirs over ours in seconds, so that more is better.
        at_least, at_most: what the median must reach, if anything.
        unit: what the ratio is of.
        shown: further figures, by name.
    """

    measure: str
    against: str
    ratios: list[float]
    at_least: float | None = None
    at_most: float | None = None
    unit: str = "x"
    shown: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The figure that counts."""
        return statistics.median(self.ratios)

    @property
    def holds(self) -> bool | None:
        """Whether the median reaches what it must; None where nothing is asked."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or self.median >= self.at_least) and (
            self.at_most is None or self.median <= self.at_most
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "median": self.median, "holds": self.holds}


def alternate(
    ours: Action, theirs: Action, rounds: int, before: Action | None = None
) -> tuple[list[float], list[float]]:
    """Seconds of `rounds` runs of each, alternating, which one first changing; one more run of each goes before.

    Args:
        ours, theirs: what is timed; what they return is let go of after the clock has stopped.
        rounds: how many count.
        before: run before each, untimed.
    """
    took: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 1):
        order = (0, 1) if i % 2 else (1, 0)
        for which in order:
            if before is not None:
                before()
            seconds = timed((ours, theirs)[which])
            # The first run of each touches memory that the machine has not backed yet, and imports.
            if i:
                took[which].append(seconds)
    return took


def timed(action: Action) -> float:
    """Seconds that `action` takes."""
    gc.collect()
    gc.disable()
    try:
        began = time.perf_counter()
        kept = action()
        took = time.perf_counter() - began
    finally:
        gc.enable()
    del kept
    return took


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Theirs over ours, round by round: 1.0 is as fast, 2.0 is twice as fast."""
    return [b / a for a, b in zip(ours, theirs, strict=True)]


def cold() -> None:
    """Empty the page cache.

    Raises:
        PermissionError: only root may, and only Linux can.
    """
    os.sync()
    if not DROP_CACHES.exists():
        raise PermissionError("the page cache can be emptied on Linux only")
    DROP_CACHES.write_text("3\n", encoding="ascii")


def can_be_cold() -> bool:
    """Whether this process may empty the page cache."""
    return DROP_CACHES.exists() and os.access(DROP_CACHES, os.W_OK)


def machine() -> dict[str, Any]:
    """The machine in words, without any name of it."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30) if memory else None,
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
    }
