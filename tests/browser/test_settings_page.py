"""The Settings page, as a person uses it: with Chromium, over a folder that holds conversations."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from waiting import until

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
expect = playwright.expect

from kept import WORKER, entries, fill, model, serve_filled  # noqa: E402

import rewarm  # noqa: E402
from rewarm.units import parse_bytes  # noqa: E402

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
Serve = Callable[..., Any]
DARK, LIGHT = "rgb(33, 35, 39)", "rgb(255, 255, 255)"


@pytest.fixture
def filled(serve: Serve, tmp_path: Path) -> Any:
    return serve_filled(serve, tmp_path)


def told(gateway: Any, path: str = "settings") -> Any:
    return httpx.get(f"{gateway.url}/api/{path}", timeout=30, trust_env=False).json()


def say(gateway: Any, words: str) -> dict[str, Any]:
    body = {"model": "alpha", "messages": [{"role": "user", "content": words}], "stream": True}
    reply = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    return told(gateway, "stats")["replies"]


def type_in(page: Any, label: str, words: str) -> Any:
    field = page.get_by_label(label, exact=True)
    field.fill(words)
    field.press("Enter")
    return page.locator(".rc-setting").filter(has=page.get_by_label(label, exact=True)).locator(".rc-said")


def test_a_lower_limit_evicts_and_says_what_went(filled: Any, open_page: Open, tmp_path: Path) -> None:
    opened = open_page(filled, at="/settings")
    page = opened.page
    expect(page.get_by_label("Maximum number of files")).to_have_value("1,000,000")
    n_files = told(filled, "stats")["counters"]["files_used"]
    said = type_in(page, "Maximum number of files", str(n_files - 4))
    expect(said).to_have_text(re.compile(r"Saved\. 4 files, \d+ KiB removed\."))
    assert told(filled, "stats")["counters"]["files_used"] == n_files - 4
    with rewarm.open(tmp_path / "kv") as cache:
        assert cache.settings().limits.max_files == n_files - 4
    said = type_in(page, "Maximum number of files", f"{n_files + 10}")
    expect(said).to_have_text("Saved. Nothing had to go.")
    opened.open("/settings")
    expect(page.get_by_label("Maximum number of files")).to_have_value(f"{n_files + 10}")


def test_what_makes_no_sense_is_told_and_changes_nothing(filled: Any, open_page: Open) -> None:
    page = open_page(filled, at="/settings").page
    expect(page.get_by_label("Maximum size")).to_have_value("1 TiB")
    before = told(filled)
    for label, nonsense, why in (
        ("Maximum size", "plenty", "is no size"),
        ("Maximum number of files", "1.5", "is no whole number"),
        ("Free space to leave", "-3", "is no size"),
        ("Minimum length", "ten", "is no whole number"),
        ("Write at most, a day", "5 XB", "is no size"),
        ("Forget after, in days", "soon", "is no number of days"),
    ):
        expect(type_in(page, label, nonsense)).to_contain_text(why)
        field = page.get_by_label(label, exact=True)
        expect(field).to_have_attribute("aria-invalid", "true")
        page.wait_for_timeout(2500 if label == "Maximum size" else 0)
        expect(field).to_have_value(nonsense)  # to be mended
    assert told(filled) == before
    expect(type_in(page, "Maximum size", "40 GB")).to_contain_text("Saved.")
    expect(page.get_by_label("Maximum size")).to_have_attribute("aria-invalid", "false")
    assert told(filled)["limits"]["max_bytes"] == parse_bytes("40GB")


def test_rules_are_changed_and_survive_a_restart(filled: Any, open_page: Open) -> None:
    opened = open_page(filled, at="/settings", may_lose_server=True)
    page = opened.page
    expect(page.get_by_label("Minimum length")).to_have_value("0")
    expect(type_in(page, "Minimum length", "64")).to_have_text("Saved.")
    expect(type_in(page, "Write at most, a day", "5 GiB")).to_have_text("Saved.")
    expect(type_in(page, "Forget after, in days", "30")).to_have_text("Saved.")
    expect(type_in(page, "Unload when idle, after minutes", "20")).to_have_text("Saved.")
    page.get_by_label("When to save").select_option("When the model is idle")
    page.get_by_label("When to restore").select_option("Always")
    page.get_by_role("switch", name="Save at second sight").check()
    expect(page.get_by_role("switch", name="Thin out restore points")).not_to_be_checked()
    page.get_by_role("switch", name="Thin out restore points").check()
    expect(page.locator(".rc-said:visible", has_text="Saved.")).to_have_count(8)
    assert told(filled, "loading")["idle_unload_s"] == 1200
    policy = told(filled)["policy"]
    assert policy == {
        **policy,
        "min_tokens": 64,
        "write_bytes_per_day": 5 * 2**30,
        "keep_days": 30,
        "save_at": "idle",
        "load": "always",
        "second_sight": True,
        "thin": True,
    }
    filled.stop()
    filled.start()
    opened.open("/settings")
    expect(page.get_by_label("Write at most, a day")).to_have_value("5 GiB")
    expect(page.get_by_label("Forget after, in days")).to_have_value("30")
    expect(page.get_by_label("When to save")).to_have_value("idle")
    expect(page.get_by_label("Unload when idle, after minutes")).to_have_value("20")
    expect(page.get_by_role("switch", name="Save at second sight")).to_be_checked()
    expect(page.get_by_role("switch", name="Thin out restore points")).to_be_checked()
    expect(type_in(page, "Forget after, in days", "")).to_have_text("Saved.")
    assert told(filled)["policy"]["keep_days"] is None


def test_caching_is_paused_and_resumed_in_a_running_model(filled: Any, open_page: Open) -> None:
    say(filled, "one two three")
    page = open_page(filled, at="/settings").page
    page.get_by_role("button", name="Pause caching").click()
    expect(page.get_by_role("heading", name="Caching is paused")).to_be_visible()
    until(lambda: say(filled, "one two three")["n_bypassed"])  # the worker looks at the settings now and then
    page.get_by_role("button", name="Resume caching").click()
    expect(page.get_by_role("heading", name="Caching is on")).to_be_visible()
    until(lambda: say(filled, "one two three")["disk_tokens"])


def test_the_cache_is_moved_while_a_model_runs(serve: Serve, open_page: Open, tmp_path: Path, home: Path) -> None:
    gateway = serve([model(tmp_path)], WORKER)
    told(gateway)  # it runs: a signal before that is lost
    gateway.stop()
    gateway._environment.pop("REWARM_DIR")  # else it would stand above what is chosen on the page
    gateway.start()
    say(gateway, "one two three")
    opened = open_page(gateway, at="/settings", may_lose_server=True)
    page = opened.page
    old, new = Path(told(gateway)["folder"]), tmp_path / "new place" / "kv"
    assert home in old.parents
    page.get_by_label("Another folder").fill(str(new))
    page.get_by_role("button", name="Check").click()
    offer = page.get_by_role("group", name="Use this folder")
    expect(offer).to_contain_text(re.compile(r"Can be written\. [\d.]+ \w+ free; .* are kept now\."))
    assert not new.exists()
    page.get_by_role("button", name="Use this folder").click()
    expect(page.get_by_text(f"The cache is in {new}: ")).to_be_visible(timeout=30_000)
    expect(page.locator(".rc-folder").first).to_have_text(str(new))
    assert (new / "store.json").exists() and not (old / "store.json").exists()
    assert say(gateway, "one two three")["disk_tokens"] == 3  # by the same process
    gateway.stop()
    gateway.start()
    opened.open("/settings")
    expect(page.locator(".rc-folder").first).to_have_text(str(new))
    assert say(gateway, "one two three")["disk_tokens"] == 3


def test_records_are_left_and_found_again(filled: Any, open_page: Open, tmp_path: Path) -> None:
    page = open_page(filled, at="/settings").page
    expect(page.get_by_text("Named by REWARM_DIR in the environment.")).to_be_visible()
    for folder, n_entries in ((tmp_path / "other", 0), (tmp_path / "kv", 5)):
        page.get_by_label("Another folder").fill(str(folder))
        page.get_by_label("Another folder").press("Enter")
        if n_entries:
            expect(page.get_by_text("It holds a cache already")).to_be_visible()
            expect(page.get_by_role("radio", name="Bring along what is kept")).to_be_disabled()
        else:
            page.get_by_role("radio", name="Leave what is kept where it is").check()
        page.get_by_role("button", name="Use this folder").click()
        expect(page.get_by_text(f"The cache is in {folder}.")).to_be_visible(timeout=30_000)
        assert told(filled, "entries")["n_all"] == n_entries


def test_a_folder_that_cannot_be_used_says_why(filled: Any, open_page: Open, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    (tmp_path / "Dropbox").mkdir()
    page = open_page(filled, at="/settings").page
    for path, why in (
        ("somewhere", "Give the whole path"),
        (str(tmp_path / "kv"), "This is where the cache is."),
        (str(tmp_path / "full"), "There are other files in it."),
        ("", "Name a folder."),
    ):
        page.get_by_label("Another folder").fill(path)
        page.get_by_role("button", name="Check").click()
        expect(page.locator(".rc-form .rc-said")).to_contain_text(why)
        expect(page.get_by_role("button", name="Use this folder")).to_be_hidden()
    page.get_by_label("Another folder").fill(str(tmp_path / "Dropbox" / "kv"))
    page.get_by_role("button", name="Check").click()
    expect(page.locator(".rc-warnings")).to_contain_text("Dropbox keeps this folder in step")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("button", name="Use this folder")).to_be_hidden()
    assert told(filled)["folder"] == str(tmp_path / "kv")


def test_b155_erasing_asks_first_and_says_what_goes(filled: Any, open_page: Open, tmp_path: Path) -> None:
    page = open_page(filled, at="/settings").page
    page.get_by_role("button", name="See what would go").click()
    question = page.get_by_text(re.compile(r"This erases 5 conversations: \d+ files, \d+ KiB\. It cannot be undone\."))
    expect(question).to_be_visible()
    page.get_by_role("button", name="Keep it").click()
    expect(question).to_be_hidden()
    assert len(entries(tmp_path / "kv")) == 5
    page.get_by_label("What to erase").select_option(entries(tmp_path / "kv")[0].fingerprint)
    expect(page.get_by_label("What to erase").locator("option:checked")).to_contain_text("All of fake")
    page.get_by_role("button", name="See what would go").click()
    page.get_by_role("button", name="Erase it").click()
    expect(page.get_by_text(re.compile(r"\d+ files, \d+ KiB erased\."))).to_be_visible()
    assert entries(tmp_path / "kv") == []


def test_what_is_typed_is_not_taken_away(filled: Any, open_page: Open) -> None:
    page = open_page(filled, at="/settings").page
    expect(page.get_by_label("Maximum size")).to_have_value("1 TiB")
    page.get_by_label("Maximum size").fill("12")
    httpx.patch(f"{filled.url}/api/settings", json={"max_bytes": 2**35, "max_files": 77_000}, trust_env=False)
    expect(page.get_by_label("Maximum number of files")).to_have_value("77,000")  # the page has looked again
    expect(page.get_by_label("Maximum size")).to_have_value("12")


def test_dark_and_light_have_enough_contrast(filled: Any, open_page: Open) -> None:
    from test_cache_page import CONTRAST

    for scheme, background, limit in (("light", LIGHT, "2 TiB"), ("dark", DARK, "3 TiB")):
        page = open_page(filled, at="/settings", color_scheme=scheme).page
        expect(page.locator(".rw-card").first).to_have_css("background-color", background)
        expect(type_in(page, "Minimum length", "no")).to_be_visible()
        expect(type_in(page, "Maximum size", limit)).to_be_visible()
        for selector in (".rw-hint-text", ".rc-setting-name", ".rc-said.rc-bad", ".rc-said.rc-good", ".rw-plain"):
            ratio = page.locator(f"{selector}:visible").first.evaluate(CONTRAST)
            assert ratio >= 4.5, f"{selector} in {scheme}: {ratio:.1f}"


def test_it_fits_a_phone_and_every_control_has_a_name(serve: Serve, open_page: Open, tmp_path: Path) -> None:
    fill(tmp_path)
    gateway = serve([model(tmp_path)], WORKER)
    page = open_page(gateway, at="/settings", viewport={"width": 390, "height": 844}, is_mobile=True).page
    expect(page.get_by_label("Maximum size")).to_have_value("1 TiB")
    page.get_by_label("Another folder").fill(str(tmp_path / ("long-name-" * 12)))
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_role("button", name="Use this folder")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator(".rw-sheet").evaluate("e => e.scrollWidth <= e.clientWidth")
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, a, input, select')].filter(e => e.offsetParent"
        " && !(e.ariaLabel || e.innerText.trim() || e.labels?.length)).length"
    )
    assert nameless == 0
