"""Every shape of slot file passes the suite that every codec must pass."""

from __future__ import annotations

import pytest
from fake_slots import SHAPES, FakeLlama

from rewarm.testing.conformance import CodecConformance


class TestSlotFiles(CodecConformance):
    @pytest.fixture(autouse=True, params=SHAPES)
    def shape(self, request: pytest.FixtureRequest) -> None:
        self.name = request.param

    def engine(self) -> FakeLlama:
        return FakeLlama(SHAPES[self.name])
