"""The Models page: load, unload, why one failed, and what a change leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
expect = playwright.expect

pytestmark = pytest.mark.browser

Open = Callable[..., Any]


def to_models(served: Any, open_page: Open, **options: Any) -> Any:
    opened = open_page(served, **options)
    opened.go("Models")
    expect(opened.page.get_by_role("heading", level=1)).to_have_text("Models")
    return opened.page


def test_a_model_is_loaded_and_unloaded_and_tells_its_memory(served: Any, open_page: Open) -> None:
    page = to_models(served, open_page)
    echo = page.get_by_role("region", name="echo")
    expect(echo.get_by_role("status")).to_have_text("Not loaded")
    echo.get_by_role("button", name="Load", exact=True).click()
    expect(echo.get_by_role("status")).to_have_text("Ready")
    expect(echo).to_contain_text("of memory")
    echo.get_by_role("button", name="Unload").click()
    expect(echo.get_by_role("status")).to_have_text("Not loaded")


def test_a_model_that_failed_gives_the_reason_and_its_last_lines(served: Any, open_page: Open) -> None:
    page = to_models(served, open_page)
    broken = page.get_by_role("region", name="broken")
    broken.get_by_role("button", name="Load", exact=True).click()
    expect(broken.get_by_role("status")).to_have_text("Failed")
    expect(broken.locator(".rw-log-lines")).to_contain_text("model.safetensors ends too early")


def test_a_change_that_begins_a_new_cache_says_so_first(served: Any, open_page: Open) -> None:
    page = to_models(served, open_page)
    echo = page.get_by_role("region", name="echo")
    echo.get_by_role("button", name="Settings").click()
    echo.get_by_label("Type of the KV cache").select_option("8-bit")
    echo.get_by_role("button", name="Save").click()
    expect(echo.get_by_role("alert")).to_contain_text("This begins a new cache")
    expect(echo).not_to_contain_text("KV 8-bit")
    echo.get_by_role("button", name="Change it").click()
    expect(echo.get_by_role("alert")).to_contain_text("Saved")
    expect(echo).to_contain_text("KV 8-bit")
    echo.get_by_role("switch").click()
    echo.get_by_role("button", name="Save").click()
    expect(echo).to_contain_text("caching off")
    echo.get_by_label("Further flags").fill("--host 0.0.0.0")
    echo.get_by_role("button", name="Save").click()
    expect(echo.get_by_role("alert")).to_contain_text("Nothing was changed")


def test_models_are_found_by_name_and_fit_a_phone(served: Any, open_page: Open) -> None:
    page = to_models(served, open_page, viewport={"width": 390, "height": 800})
    page.get_by_role("searchbox").fill("brok")
    expect(page.get_by_role("region", name="echo")).to_have_count(0)
    expect(page.get_by_role("region", name="broken")).to_be_visible()
    page.get_by_role("searchbox").fill("")
    page.get_by_role("region", name="echo").get_by_role("button", name="Settings").click()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
