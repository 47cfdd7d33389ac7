"""The chat page, as a person uses it: with Chromium, against a gateway whose workers echo."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
expect = playwright.expect

pytestmark = pytest.mark.browser

Open = Callable[..., Any]


def test_a_message_is_answered_and_the_quiet_line_says_what_the_cache_did(served: Any, open_page: Open) -> None:
    page = open_page(served)
    expect(page.chip).to_have_text("Not loaded")
    note = page.ask("What is a block?")
    expect(page.replies.last).to_contain_text("You said: What is a block?")
    assert re.fullmatch(r"Nothing stored for this prompt yet · first token after [\d.]+ m?s", note)
    expect(page.chip).to_have_text("Ready")
    assert re.match(r"\d+ of \d+ tokens still in memory · first token after", page.ask("And a point?"))


def test_it_is_used_with_the_keyboard_alone(served: Any, open_page: Open) -> None:
    page = open_page(served)
    page.press(page.input, "Enter")
    page.press(page.input, "Shift+Enter", words="one")
    page.press(page.input, words="two")
    expect(page.input).to_have_value("one\ntwo")
    page.press(page.input, "Enter")
    expect(page.mine).to_have_count(1)
    assert page.mine.inner_text() == "one\ntwo"
    expect(page.input).to_have_value("")
    expect(page.input).to_be_focused()
    page.at_rest()
    expect(page.replies).to_have_count(1)
    for _ in range(12):  # every control is reached, and says what it is
        page.page.keyboard.press("Tab")
        name = page.page.evaluate(
            "(e => e.ariaLabel || e.labels?.[0]?.innerText || e.innerText)(document.activeElement)"
        )
        assert name


def test_a_stopped_model_goes_on_where_it_was(served: Any, open_page: Open) -> None:
    page = open_page(served)
    page.ask("What is a block?")
    page.button("Stop the model").click()
    expect(page.chip).to_have_text("Not loaded")
    expect(page.input).to_be_focused()
    assert re.match(r"Restored \d+ of \d+ tokens from disk · first token after", page.ask("And a point?"))
    assert page.page.locator(".rw-meter span").last.evaluate("e => e.clientWidth") > 10


def test_the_conversation_survives_a_reload_and_a_restart_of_the_gateway(served: Any, open_page: Open) -> None:
    page = open_page(served, may_lose_server=True)
    page.ask("What is a block?")
    page.open()
    expect(page.replies).to_have_count(1)
    served.stop()
    served.start()
    expect(page.chip).to_have_text("Not loaded", timeout=30_000)  # the page comes back by itself
    expect(page.input).to_be_focused()
    expect(page.mine).to_have_text(["What is a block?"])
    expect(page.notes).to_contain_text("Nothing stored")
    assert page.ask("And a point?").startswith("Restored ")


def test_a_reply_goes_on_while_the_page_is_reloaded_and_can_be_stopped(served: Any, open_page: Open) -> None:
    page = open_page(served)
    page.say("slow story")
    expect(page.page.locator(".rw-stage")).to_contain_text("Reading the prompt: ")
    expect(page.replies.last).to_contain_text("word3")
    page.open()
    expect(page.replies.last).to_contain_text("word12")
    other = open_page(served)
    expect(other.replies.last).to_contain_text("word14")
    page.button("Stop the reply").click()
    page.at_rest()
    expect(page.notes.last).to_contain_text("Stopped")
    assert "word199" not in page.replies.last.inner_text()
    other.at_rest()
    assert page.ask("Go on")


def test_markdown_is_rendered_and_a_reply_can_do_nothing(served: Any, open_page: Open) -> None:
    page = open_page(served)
    page.ask("markdown")
    for tag in ("ol li", "strong", "table td", "pre code", "blockquote"):
        expect(page.replies.last.locator(tag).first).to_be_visible()
    page.ask("evil")
    expect(page.replies.last).to_contain_text("<script>")
    assert page.replies.last.locator("img, script, iframe").count() == 0
    assert page.page.evaluate("window.hacked") is None


def test_answering_again_replaces_the_reply(served: Any, open_page: Open) -> None:
    page = open_page(served)
    page.ask("What is a block?")
    page.button("Answer again").click()
    expect(page.notes.last).to_contain_text("tokens still in memory")
    expect(page.replies).to_have_count(1)
    expect(page.mine).to_have_count(1)


@pytest.mark.parametrize(
    ("words", "told"),
    [("crash at once", "ended"), ("refuse this", "longer than the model's context")],
    ids=["crash", "refusal"],
)
def test_what_goes_wrong_is_told_in_the_chat_and_the_next_message_works(
    served: Any, open_page: Open, words: str, told: str
) -> None:
    page = open_page(served)
    page.ask(words)
    trouble = page.page.get_by_role("alert").locator("visible=true")
    expect(trouble).to_contain_text(told)
    expect(trouble).to_contain_text("Your conversation is kept")
    expect(page.button("Try again")).to_be_visible()
    page.ask("hello")
    expect(page.replies.last).to_contain_text("hello")


def test_a_model_that_cannot_be_loaded_says_why(served: Any, open_page: Open) -> None:
    page = open_page(served)
    page.page.get_by_label("Model", exact=True).select_option("broken")
    page.input.focus()
    page.ask("hello")
    expect(page.page.get_by_role("alert").locator("visible=true")).to_contain_text("model.safetensors ends too early")
    expect(page.chip).to_have_text("Failed")
    assert "ends too early" in page.chip.get_attribute("title")
    page.page.get_by_label("Model", exact=True).select_option("echo")
    page.button("Try again").click()
    expect(page.replies.last).to_contain_text("You said: hello")


def test_conversations_are_begun_opened_renamed_found_and_deleted(served: Any, open_page: Open, tmp_path: Path) -> None:
    page = open_page(served)
    page.ask("first one")
    page.button("New chat").click()
    expect(page.page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.replies).to_have_count(0)
    expect(page.input).to_be_focused()
    page.ask("second one")
    items = page.page.locator(".rw-title")
    expect(items).to_have_text(["second one", "first one"])
    items.nth(1).click()
    expect(page.mine).to_have_text(["first one"])
    page.open()
    expect(items).to_have_text(["second one", "first one"])
    page.page.locator(".rw-item").nth(1).hover()
    page.button("Rename “first one”").click()
    page.press(page.page.get_by_label("New name"), "Enter", words="Old matters")
    expect(items).to_have_text(["second one", "Old matters"])
    search = page.page.get_by_role("searchbox")
    search.fill("first")
    expect(items).to_have_text(["Old matters"])
    search.fill("")
    expect(items).to_have_count(2)
    page.page.locator(".rw-item").nth(0).hover()
    page.button("Delete “second one”").click()
    dialog = page.page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    dialog.press("Escape")
    expect(dialog).to_be_hidden()
    expect(items).to_have_count(2)
    page.page.locator(".rw-item").nth(0).hover()
    page.button("Delete “second one”").click()
    dialog.get_by_role("button", name="Delete").click()
    expect(items).to_have_text(["Old matters"])
    expect(dialog).to_be_hidden()
    assert len(list((tmp_path / "data" / "chats").glob("*.json"))) == 1


def test_a_message_is_edited_and_both_branches_can_be_read(served: Any, open_page: Open) -> None:
    page = open_page(served)
    page.ask("one")
    page.ask("two")
    page.mine.last.hover()
    page.mine.last.get_by_role("button", name="Edit").click()
    field = page.page.get_by_role("textbox", name="Edit the message")
    page.press(field, "Control+A")
    page.press(field, "Enter", words="another two")
    expect(page.replies.last).to_contain_text("You said: another two.")
    expect(page.mine).to_have_count(2)
    expect(page.mine.last).to_contain_text("2 of 2")
    page.at_rest()
    page.mine.last.get_by_role("button", name="Earlier version").click()
    expect(page.replies.last).to_contain_text("You said: two.")
    page.open()
    expect(page.mine.last).to_contain_text("1 of 2")


def test_a_private_chat_is_marked_and_leaves_nothing(served: Any, open_page: Open, tmp_path: Path) -> None:
    page = open_page(served)
    page.button("New private chat").click()
    expect(page.page.get_by_role("heading", level=1)).to_have_text("A private chat")
    assert "cache is off" in page.ask("a secret").lower()
    expect(page.page.locator(".rw-private")).to_be_visible()
    assert not list((tmp_path / "data").rglob("*.json")) or not list((tmp_path / "data" / "chats").glob("*.json"))
    assert not (tmp_path / "kv" / "fake-disk.json").exists()


def test_code_and_replies_are_copied(served: Any, open_page: Open) -> None:
    page = open_page(served, permissions=["clipboard-read", "clipboard-write"])
    page.ask("markdown")
    page.page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.page.locator(".rw-toast")).to_have_text("Copied")
    assert page.page.evaluate("navigator.clipboard.readText()").startswith("match = cache.find(tokens)")
    page.button("Copy the reply").click()
    page.page.wait_for_function("navigator.clipboard.readText().then(t => t.startsWith('Here is what'))")


def test_a_system_prompt_is_sent_and_kept(served: Any, open_page: Open, tmp_path: Path) -> None:
    page = open_page(served)
    page.page.locator(".rw-system summary").click()
    page.page.get_by_role("textbox", name="System prompt").fill("Be brief.")
    page.input.focus()
    page.ask("hello")
    words = json.loads((tmp_path / "kv" / "fake-disk.json").read_text())
    assert words[:4] == ["<system>", "Be", "brief.", "<user>"]
    page.open()
    page.page.locator(".rw-system summary").click()
    expect(page.page.get_by_role("textbox", name="System prompt")).to_have_value("Be brief.")


DARK, LIGHT = "rgb(23, 24, 26)", "rgb(251, 251, 250)"


def test_dark_follows_the_system_until_one_chooses(served: Any, open_page: Open) -> None:
    page = open_page(served, color_scheme="dark")
    app = page.page.locator(".rw-app")
    theme = page.page.get_by_role("button", name="Theme")
    expect(app).to_have_css("background-color", DARK)
    expect(theme).to_have_accessible_name("Theme: System")
    page.page.emulate_media(color_scheme="light")
    expect(app).to_have_css("background-color", LIGHT)
    theme.click()
    expect(theme).to_have_accessible_name("Theme: Light")
    theme.click()
    expect(theme).to_have_accessible_name("Theme: Dark")
    expect(app).to_have_css("background-color", DARK)
    page.open()
    expect(app).to_have_css("background-color", DARK)
    theme.click()
    expect(theme).to_have_accessible_name("Theme: System")
    expect(app).to_have_css("background-color", LIGHT)
    page.page.emulate_media(color_scheme="dark")
    expect(app).to_have_css("background-color", DARK)


def test_it_fits_a_phone(served: Any, open_page: Open) -> None:
    page = open_page(served, viewport={"width": 375, "height": 667}, has_touch=True, is_mobile=True)
    page.input.tap()
    page.ask("markdown")
    assert page.page.evaluate("document.documentElement.scrollWidth") == 375
    for control in page.page.locator(".rw-header button, .rw-header select, .rw-chip, .rw-composer button").all():
        box = control.bounding_box()
        assert box is None or (box["x"] >= 0 and box["x"] + box["width"] <= 375)
    expect(page.page.get_by_role("navigation", name="Conversations")).to_be_hidden()
    page.button("conversations").tap()
    expect(page.page.get_by_role("navigation", name="Conversations")).to_be_visible()
    page.page.locator(".rw-title").tap()
    expect(page.page.get_by_role("navigation", name="Conversations")).to_be_hidden()
