"""The test kit that is shipped: what an adapter needs to prove itself, and what proves the core.

An engine without a model (`FakeEngine`), the perfect model of a cache (`PerfectCache`), a disk with faults
(`FaultyDisk`), and the suite that every codec must pass (`rewarm.testing.conformance`).
"""

from __future__ import annotations

from rewarm.testing.fake_engine import FakeEngine, StateMismatch
from rewarm.testing.faults import Fault, FaultyDisk
from rewarm.testing.perfect import PerfectCache

__all__ = ["FakeEngine", "Fault", "FaultyDisk", "PerfectCache", "StateMismatch"]
