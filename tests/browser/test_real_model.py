"""First light on the page: the bundled model answers, is stopped, and goes on without reading all anew."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
expect = playwright.expect

pytestmark = [pytest.mark.browser, pytest.mark.engine]


def test_the_bundled_model_goes_on_from_disk(
    serve: Callable[..., Any], open_page: Callable[..., Any], bundled_model: Path
) -> None:
    page = open_page(serve([bundled_model]))
    page.page.locator(".rw-system summary").click()
    system = "You are a calm guide who answers in one short sentence. " + "Say only what you know. " * 20
    page.page.get_by_role("textbox", name="System prompt").fill(system)
    page.input.focus()
    page.say("What is the capital of France?")
    expect(page.chip).to_have_text("Ready", timeout=120_000)
    page.at_rest()
    expect(page.replies.last).to_contain_text("Paris")
    assert page.notes.last.inner_text().startswith("Nothing stored for this prompt yet")
    page.button("Stop the model").click()
    expect(page.chip).to_have_text("Not loaded", timeout=30_000)
    page.say("And of Italy?")
    expect(page.chip).to_have_text("Ready", timeout=120_000)
    page.at_rest()
    found = re.match(r"Restored (\d+) of (\d+) tokens from disk", page.notes.last.inner_text())
    assert found, page.notes.last.inner_text()
    n_restored, n_prompt = map(int, found.groups())
    assert n_prompt > 120
    assert n_restored > n_prompt - 40
