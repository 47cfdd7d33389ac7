"""The whole story with the mouse: chat, restart, restored and why, another folder, half the size, erased at the end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nicegui", reason="needs the gateway's packages")

from kept import WORKER

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
expect = playwright.expect

pytestmark = pytest.mark.browser

SYSTEM = "You are a calm guide who answers in one short sentence. " + "Say only what you know. " * 20


@pytest.mark.engine
def test_the_story_with_the_bundled_model(
    serve: Callable[..., Any], open_page: Callable[..., Any], bundled_model: Path, tmp_path: Path
) -> None:
    tell(serve([bundled_model]), open_page, tmp_path)


def test_the_story_with_a_real_cache_and_no_model(
    serve: Callable[..., Any], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "models" / "echo"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    tell(serve([folder], WORKER), open_page, tmp_path)


def tell(gateway: Any, open_page: Callable[..., Any], tmp_path: Path) -> None:
    """Chat, restart, restored and why, another folder, half the size, erased."""
    page = open_page(gateway, may_lose_server=True)
    page.page.locator(".rw-system summary").click()
    page.page.get_by_role("textbox", name="System prompt").fill(SYSTEM)
    page.page.get_by_label("Longest reply").fill("24")
    page.input.click()
    page.say("What is the capital of France?")
    expect(page.chip).to_have_text("Ready", timeout=120_000)
    page.at_rest()
    assert page.notes.last.inner_text().startswith("Nothing stored for this prompt yet")

    gateway.stop()
    gateway.start()
    expect(page.chip).to_have_text("Not loaded", timeout=30_000)
    page.say("And of Italy?")
    expect(page.chip).to_have_text("Ready", timeout=120_000)
    page.at_rest()
    assert re.match(r"Restored \d+ of \d+ tokens from disk", page.notes.last.inner_text())

    page.go("Cache")
    expect(page.page.locator("#rw-main")).to_contain_text("What is the capital of France?")

    page.go("Settings")
    target = tmp_path / "elsewhere"
    page.page.get_by_label("Another folder").fill(str(target))
    page.page.get_by_role("button", name="Check").click()
    page.page.get_by_role("button", name="Use this folder").click()
    expect(page.page.locator(".rc-folder").first).to_have_text(str(target), timeout=60_000)
    size = page.page.get_by_label("Maximum size")
    before = float(size.input_value().split()[0])
    unit = size.input_value().split()[1]
    size.fill(f"{before / 2:.1f} {unit}")
    size.press("Enter")
    expect(page.page.locator("#rw-main")).to_contain_text("Saved.")

    page.go("Chat")
    page.input.click()
    page.say("And of Spain?")
    page.at_rest()
    expect(page.notes.last).to_contain_text(re.compile(r"Restored|still in memory"))
    page.page.locator(".rw-item").first.hover()
    page.button("Delete “What is the capital of France").click()
    dialog = page.page.get_by_role("dialog")
    expect(dialog.get_by_role("checkbox")).to_be_checked()
    expect(dialog).to_contain_text("Frees ")
    dialog.get_by_role("button", name="Delete").click()
    expect(page.page.locator(".rw-title")).to_have_count(0)
    page.go("Cache")
    # Of what is seen: the page may have listed it while it was being erased, and keeps the row, hidden, for the next.
    expect(page.page.locator("#rw-main")).not_to_contain_text("What is the capital of France?", use_inner_text=True)
