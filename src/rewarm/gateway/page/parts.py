"""The page's building blocks: native elements with labels, and icons drawn inline. Knows no chat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

_PATHS = {
    "menu": "M4 7h16M4 12h16M4 17h16",
    "plus": "M12 5v14M5 12h14",
    "send": "M12 19V6M6 11.5 12 5.5l6 6",
    "stop": "M7.5 7.5h9v9h-9z",
    "power": "M12 4v7M7.2 7a7 7 0 1 0 9.6 0",
    "again": "M19.5 12a7.5 7.5 0 1 1-2.4-5.5M19.5 3.5v4h-4",
    "trash": "M5 7h14M10 7V5h4v2M7 7l.8 12h8.4L17 7",
    "theme": "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
    "chevron": "M9 6l6 6-6 6",
}


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
        f'stroke-linecap="round" stroke-linejoin="round" aria-hidden="true"><path d="{_PATHS[name]}"/></svg>'
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
