"""The Cache page, as a person uses it: with Chromium, over a folder that holds conversations."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
expect = playwright.expect

from kept import SMALL, TITLES, entries, serve_filled  # noqa: E402

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
Serve = Callable[..., Any]


@pytest.fixture
def filled(serve: Serve, tmp_path: Path) -> Any:
    return serve_filled(serve, tmp_path)


def see(page: Any, *titles: str) -> None:
    """Wait until the table has these rows, in this order."""
    expect(page.locator(".rc-row:visible .rc-name")).to_have_text(list(titles))


def row(page: Any, title: str) -> Any:
    return page.locator(".rc-row:visible").filter(has_text=title)


def tile(page: Any, name: str) -> Any:
    return page.get_by_role("group", name=name)


def say(gateway: Any, words: str) -> None:
    body = {"model": "alpha", "messages": [{"role": "user", "content": words}], "stream": True}
    reply = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text


def test_it_tells_how_full_it_is_and_what_is_kept(filled: Any, open_page: Open) -> None:
    page = open_page(filled, at="/cache").page
    expect(tile(page, "Files")).to_contain_text("of 1,000,000")
    expect(tile(page, "Space used")).to_contain_text("of 1 TiB")
    expect(tile(page, "Hit rate")).to_contain_text("none yet")
    expect(tile(page, "Written today")).to_contain_text("ever")
    expect(page.locator(".rc-row:visible")).to_have_count(5)
    see(page, *reversed(TITLES), "System prompt")
    expect(row(page, TITLES[0])).to_contain_text("15")
    expect(page.get_by_role("region", name="Use per model")).to_contain_text("fake")
    expect(page.get_by_role("region", name="Latest misses")).to_contain_text("No reply so far.")


def test_it_is_searched_and_sorted(filled: Any, open_page: Open) -> None:
    page = open_page(filled, at="/cache").page
    expect(page.locator(".rc-row:visible")).to_have_count(5)
    page.get_by_role("searchbox").fill("sky")
    see(page, "Why is the sky blue?")
    expect(page.locator(".rc-count")).to_have_text("1 of 5")
    page.get_by_role("searchbox").fill("nowhere")
    expect(page.get_by_text("Nothing here is called “nowhere”.")).to_be_visible()
    page.get_by_role("searchbox").fill("")
    page.get_by_role("button", name="Sort by conversation").click()
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("Conversation")
    see(page, *sorted([*TITLES, "System prompt"], key=str.casefold))
    page.get_by_role("button", name="Sort by tokens").click()
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("Tokens")
    page.get_by_role("button", name="Sort by tokens").click()
    expect(page.locator("th[aria-sort=ascending]")).to_contain_text("Tokens")
    expect(page.locator(".rc-row:visible .rc-name").first).to_have_text("System prompt")


def test_a_conversation_is_pinned_with_the_keyboard(filled: Any, open_page: Open, tmp_path: Path) -> None:
    opened = open_page(filled, at="/cache")
    page = opened.page
    pin = page.get_by_role("button", name=f"Pin “{TITLES[1]}”", exact=True)
    pin.press("Enter")
    unpin = page.get_by_role("button", name=f"Unpin “{TITLES[1]}”")
    expect(unpin).to_have_attribute("aria-pressed", "true")
    expect(unpin).to_be_focused()
    assert [entry.label for entry in entries(tmp_path / "kv") if entry.pinned] == [f"{1:032x}"]
    opened.open("/cache")
    expect(unpin).to_have_text("Pinned")
    unpin.click()
    expect(pin).to_have_attribute("aria-pressed", "false")
    assert not any(entry.pinned for entry in entries(tmp_path / "kv"))


def test_forgetting_asks_first_and_says_what_it_frees(filled: Any, open_page: Open, tmp_path: Path) -> None:
    page = open_page(filled, at="/cache").page
    page.get_by_role("button", name=f"Forget “{TITLES[2]}”").click()
    question = page.locator(".rc-question:visible")
    expect(question).to_contain_text(re.compile(r"It frees 2 files, \d+ KiB\. What it shares with others stays\."))
    yes = page.get_by_role("button", name="Forget it").locator("visible=true")
    expect(yes).to_be_focused()
    page.get_by_role("button", name="Keep it").locator("visible=true").click()
    expect(question).to_have_count(0)
    assert len(entries(tmp_path / "kv")) == 5
    page.get_by_role("button", name=f"Forget “{TITLES[2]}”").click()
    yes.click()
    see(page, TITLES[3], TITLES[1], TITLES[0], "System prompt")
    assert f"{2:032x}" not in [entry.label for entry in entries(tmp_path / "kv")]


def test_it_shows_who_shares_what(filled: Any, open_page: Open) -> None:
    page = open_page(filled, at="/cache").page
    picture = page.get_by_role("region", name="Shared prefixes")
    expect(picture.get_by_role("listitem")).to_have_count(5)
    expect(picture.get_by_role("listitem").first).to_contain_text("System prompt")
    expect(picture).to_contain_text("15 tokens, the first 8 shared with “System prompt”")
    bars = picture.locator(".rc-branch").nth(1)
    shared, own = (bars.locator(f".rc-bar-{kind}").bounding_box() for kind in ("shared", "own"))
    assert abs(shared["width"] / (shared["width"] + own["width"]) - 8 / 15) < 0.02


def test_replies_appear_with_their_time_and_misses_with_their_reason(filled: Any, open_page: Open) -> None:
    page = open_page(filled, at="/cache").page
    for words in ("one two three four", "one two three four", "entirely other words"):
        say(filled, words)
    chart = page.get_by_role("img", name="Time to first token by length of the prompt: 2 restored, 1 prefilled.")
    expect(chart).to_be_visible()
    expect(chart.locator("circle")).to_have_count(3)
    expect(page.locator(".rc-legend")).to_contain_text(re.compile(r"Restored: \d+ ms, the median of 2"))
    misses = page.get_by_role("region", name="Latest misses").get_by_role("listitem")
    expect(misses).to_have_count(1)
    expect(misses).to_contain_text("Nothing stored for this prompt yet")
    expect(misses).to_contain_text("alpha · 5 tokens · just now")
    expect(tile(page, "Time saved")).to_contain_text("5 tokens restored", timeout=10_000)
    expect(tile(page, "Hit rate")).to_contain_text("2 of 3 look-ups", timeout=10_000)


def test_ten_thousand_conversations_are_paged(serve: Serve, open_page: Open, tmp_path: Path) -> None:
    filled = serve_filled(serve, tmp_path, 10_000, SMALL)
    page = open_page(filled, at="/cache").page
    expect(page.locator(".rc-count")).to_have_text("10,001")
    expect(page.locator(".rc-row:visible")).to_have_count(15)
    page.get_by_role("button", name="Next").click()
    expect(page.locator(".rc-where")).to_have_text("16 to 30 of 10,001")
    page.get_by_role("searchbox").fill("Lisbon")
    expect(page.locator(".rc-count")).to_have_text("1 of 10,001")
    see(page, TITLES[0])
    page.get_by_role("searchbox").fill("")
    page.get_by_role("button", name="Sort by own").click()
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("Own")
    expect(page.get_by_role("region", name="Shared prefixes")).to_contain_text("9,977 more that share are not drawn.")
    assert page.locator("*").count() < 1500  # only what is seen is sent


def test_an_empty_cache_says_what_comes(serve: Serve, open_page: Open, tmp_path: Path) -> None:
    page = open_page(serve_filled(serve, tmp_path, 0), at="/cache").page
    page.get_by_role("button", name="Forget “System prompt”").click()
    page.get_by_role("button", name="Forget it").locator("visible=true").click()
    expect(page.get_by_text("Nothing is kept yet. What is said in a chat")).to_be_visible()
    expect(page.get_by_text("Each streamed reply becomes a dot here")).to_be_visible()


def test_dark_and_light_have_enough_contrast(filled: Any, open_page: Open) -> None:
    for scheme in ("light", "dark"):
        page = open_page(filled, at="/cache", color_scheme=scheme).page
        expect(page.locator(".rc-row:visible")).to_have_count(5)
        for selector in (
            ".rc-under",
            ".rc-table td.rc-number",
            ".rw-tile-more",
            ".rc-branch-told",
            ".rc-pin",
            ".rc-place",
        ):
            ratio = page.locator(selector).first.evaluate(CONTRAST)
            assert ratio >= 4.5, f"{selector} in {scheme}: {ratio:.1f}"


def test_it_fits_a_phone(filled: Any, open_page: Open, tmp_path: Path) -> None:
    page = open_page(filled, at="/cache", viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True).page
    expect(page.locator(".rc-row:visible")).to_have_count(5)
    say(filled, "one two three")
    expect(page.locator(".rc-chart circle")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator(".rw-sheet").evaluate("e => e.scrollWidth <= e.clientWidth")
    for control in page.locator(".rc-entries button, .rc-entries input, .rc-entries select").all():
        box = control.bounding_box()
        assert box is None or (box["x"] >= 0 and box["x"] + box["width"] <= 390)
    page.get_by_label("Sort by", exact=True).select_option("Title")
    expect(page.locator(".rc-row:visible .rc-name").first).to_have_text(TITLES[2])
    expect(page.locator(".rc-row:visible .rc-name").nth(4)).to_contain_text("Unnamed, of ")
    page.get_by_role("button", name=f"Pin “{TITLES[0]}”", exact=True).tap()
    expect(page.get_by_role("button", name=f"Unpin “{TITLES[0]}”")).to_be_visible()


def test_every_control_says_what_it_is(filled: Any, open_page: Open) -> None:
    page = open_page(filled, at="/cache").page
    expect(page.locator(".rc-row:visible")).to_have_count(5)
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, a, input, select')].filter(e => e.offsetParent"
        " && !(e.ariaLabel || e.innerText.trim() || e.labels?.length)).length"
    )
    assert nameless == 0
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("(e => e.ariaLabel || e.innerText)(document.activeElement)"))
    assert {"Search the conversations", "Sort by tokens", f"Pin “{TITLES[3]}”", f"Forget “{TITLES[0]}”"} <= reached


CONTRAST = """(e) => {
    const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => { v /= 255;
        return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    let under = e;
    while (under && (rgb(getComputedStyle(under).backgroundColor)[3] ?? 1) === 0) under = under.parentElement;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(rgb(getComputedStyle(under).backgroundColor))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""
