"""The page's building blocks: native elements with labels, and icons drawn inline. Knows no chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

from rewarm.gateway.page.icons import PATHS


def element(tag: str, classes: str = "", **attributes: str) -> Element:
    """A native element; an underscore in an attribute's name stands for a hyphen."""
    made = ui.element(tag).classes(classes)
    for name, value in attributes.items():
        made.props[name.rstrip("_").replace("_", "-")] = value
    return made


def text(words: str, classes: str = "", tag: str = "span") -> TextElement:
    """An element with text, which is never taken for HTML."""
    made = TextElement(tag=tag, text=words)
    made.classes(classes)
    return made


def icon(name: str) -> Element:
    """A line icon in the colour of the text around it; hidden from screen readers."""
    drawn = (
        '<svg viewBox="0 0 24 24" width="20" height="20" fill="none" stroke="currentColor" stroke-width="1.7" '
        f'stroke-linecap="round" stroke-linejoin="round" aria-hidden="true"><path d="{PATHS[name]}"/></svg>'
    )
    return ui.html(drawn, sanitize=False, tag="span").classes("rw-icon")


def button(icon_name: str, label: str, classes: str = "", words: str = "") -> Element:
    """A native button with an icon, and with `words` beside it if given; `label` is its name and its tip."""
    made = element("button", f"rw-button {classes}", type="button", aria_label=label, title=label)
    with made:
        icon(icon_name)
        if words:
            text(words, "rw-button-words")
    return made


def on_click(made: Element, handler: Callable[..., Any] | None = None, script: str = "") -> Element:
    """Have a click call `handler` here, or run `script` in the browser, which may call `emit`."""
    return made.on("click", handler, js_handler=f"() => {{ {script} }}" if script else None)
