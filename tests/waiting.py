"""Waiting for what comes true a moment later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Wait until `condition()` holds. The time allowed is no measurement: it is for machines that do other things."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true in {timeout_s:.0f} s"
        time.sleep(0.02)
