"""Building blocks of the Cache and Settings pages: words on buttons, changes that are sent only when they are some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

from rewarm.gateway.page.parts import element, on_click, text
from rewarm.gateway.problems import Problem


def action(label: str, handler: Callable[[], Any], classes: str = "") -> Element:
    """A native button with words on it."""
    made = element("button", f"rw-button {classes or 'rw-plain'}", type="button")
    with made:
        text(label)
    return on_click(made, handler)


def set_text(made: TextElement, words: str) -> None:
    """Show `words`; nothing is sent when they are shown already."""
    if made.text != words:
        made.set_text(words)


def set_prop(made: Element, name: str, value: str | bool) -> None:  # noqa: FBT001 - an attribute's value
    """Set an attribute; False takes it away; nothing is sent when it is so already."""
    now = made.props.get(name)
    if value is False:
        if now is not None:
            del made.props[name]
            made.update()
    elif now != value:
        made.props[name] = value
        made.update()


def set_class(made: Element, name: str, *, is_on: bool) -> None:
    """Give an element a class, or take it away."""
    if (name in made.classes) != is_on:
        made.classes(add=name if is_on else None, remove=None if is_on else name)


def meter(classes: str = "") -> tuple[Element, Element]:
    """A bar and the part of it that is filled; hidden from screen readers, the words beside it say the same."""
    bar = element("span", f"rw-bar {classes}", aria_hidden="true")
    with bar:
        part = element("span")
    return bar, part


def set_part(part: Element, share: float) -> None:
    """How much of a bar is filled, 0 to 1."""
    width = f"{share:.1%}"
    if part.style.get("width") != width:
        part.style(replace=f"width: {width}")


def error_words(error: Exception) -> str:
    """What went wrong, for a person."""
    if isinstance(error, Problem):
        return error.message
    return f"The gateway failed at this: {type(error).__name__}: {error}"
