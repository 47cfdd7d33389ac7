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


def act(label: str, kind: str, handler: Callable[..., Any] | None = None) -> Element:
    """A small button of an icon alone, drawn by the style sheet (`rw-act-` and `kind`); `label` is its name."""
    made = element("button", f"rw-act rw-act-{kind}", type="button", aria_label=label, title=label)
    return on_click(made, handler) if handler is not None else made


def word_button(words: str, handler: Callable[..., Any], classes: str = "rw-plain") -> Element:
    """A button of words: `rw-plain`, `rw-primary` or `rw-danger-button`."""
    made = element("button", f"rw-button {classes}", type="button")
    with made:
        text(words)
    return on_click(made, handler)


def toggle(made: Element, name: str, *, is_on: bool) -> None:
    """Give an element a class, or take it away."""
    if (name in made.classes) != is_on:
        made.classes(add=name if is_on else None, remove=None if is_on else name)


def show_dialog(dialog: Element) -> None:
    """Open a native dialog: the keyboard stays in it, Escape closes it."""
    dialog.client.run_javascript(f"window.rewarm.open({dialog.html_id!r})")


def close_dialog(dialog: Element) -> None:
    """Close a native dialog."""
    dialog.client.run_javascript(f"window.rewarm.close({dialog.html_id!r})")
