"""The quiet line, the states and the stages: what a person reads."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("nicegui", reason="needs the gateway's packages")

from rewarm.gateway.page.engine import ModelView, State
from rewarm.gateway.page.words import model_state, progress, quiet_line, share, starting
from rewarm.state.reason import Reason


def report(disk: int = 0, memory: int = 0, prompt: int = 372, reason: str = "nothing_stored", detail: str = "") -> Any:
    return {
        "cached_tokens": disk + memory,
        "disk_tokens": disk,
        "memory_tokens": memory,
        "prompt_tokens": prompt,
        "reason": reason,
        "detail": detail,
    }


@pytest.mark.parametrize(
    ("said", "ttft_s", "line"),
    [
        (report(disk=354), 1.1, "Restored 354 of 372 tokens from disk · first token after 1.1 s"),
        (report(memory=354), 0.2, "354 of 372 tokens still in memory · first token after 200 ms"),
        (report(disk=256, memory=98), 1.0,
         "Reused 354 of 372 tokens: 256 from disk, 98 still in memory · first token after 1.0 s"),
        (report(), 3.0, "Nothing stored for this prompt yet · first token after 3.0 s"),
        (report(disk=12000, prompt=16384), None, "Restored 12,000 of 16,384 tokens from disk"),
        (report(disk=100, reason="diverged"), 1.0,
         "Restored 100 of 372 tokens from disk · the rest differs from what is stored · first token after 1.0 s"),
        (report(reason="diverged", detail="The prompt differs from what is stored from token 12 on."), None,
         "The prompt differs from what is stored from token 12 on"),
        (report(reason="diverged", detail="The prompt differs from what is stored from token 0 on."), None,
         "Nothing stored begins like this prompt"),
        (report(memory=6, reason="diverged"), None, "Differs from what is stored from token 6 on"),
        (report(reason="unavailable", detail="The cache cannot be used now: no space."), None,
         "The cache cannot be used now: no space"),
        (report(reason="disabled", detail="x"), None, "The cache is off"),
        (None, 0.5, "First token after 500 ms"),
        (None, None, ""),
        ({}, None, ""),
    ],
)  # fmt: skip
def test_the_quiet_line(said: Any, ttft_s: float | None, line: str) -> None:
    assert quiet_line(said, ttft_s) == line


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_words(reason: Reason) -> None:
    line = quiet_line(report(reason=reason.value), None)
    assert len(line) > 10
    assert "_" not in line


def test_a_reason_that_is_new_is_told_by_its_detail_in_bounds() -> None:
    line = quiet_line(report(reason="novel", detail="word " * 100), None)
    assert line.startswith("Word word")
    assert len(line) <= 110


def test_the_reused_share_stays_between_nothing_and_all() -> None:
    assert share(report(disk=93)) == 0.25
    assert share(report()) == 0.0
    assert share(report(disk=500)) == 1.0
    assert share({}) == 0.0


def test_progress_counts_tokens() -> None:
    assert progress(512, 2048) == "Reading the prompt: 512 of 2,048 tokens"
    assert progress(0, 1) == "Reading the prompt: 0 of 1 token"


@pytest.mark.parametrize("state", list(State))
def test_every_state_has_words_and_a_tone(state: State) -> None:
    words, tone = model_state(ModelView("m", state))
    assert words
    assert tone in {"idle", "busy", "ready", "failed"}


def test_preparing_tells_how_far_it_is() -> None:
    view = ModelView("m", State.PREPARING, "converting weights", 0.4)
    assert model_state(view) == ("Preparing the model · 40%", "busy")
    assert starting(view) == "Converting weights · 40%"
    assert starting(ModelView("m", State.LOADING)) == "Loading the model"
    assert starting(None) == "Loading the model"
    assert model_state(None)[1] == "failed"
