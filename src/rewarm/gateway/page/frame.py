"""The frame around every page: the way to the others, light and dark, one look. Knows names of pages, and no page.

A page that is not the chat writes itself into `sheet`, with the classes of frame.css: `rw-card`, `rw-tiles`,
`rw-table`, `rw-field`, `rw-switch`, `rw-bar`, `rw-notice`. Nothing is loaded from another host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from nicegui import ui
from nicegui.element import Element

from rewarm.gateway.page.parts import element, icon, on_click, text

_HERE = Path(__file__).parent
_MARK = (
    "<rect width='32' height='32' rx='8' fill='#0f766e'/>"
    "<path d='M9 21a7 7 0 1 0 2-9.5M9 8v5h5' fill='none' stroke='white' stroke-width='2.6' "
    "stroke-linecap='round' stroke-linejoin='round'/>"
)
_SVG = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'>{_MARK}</svg>"
ICON = "data:image/svg+xml," + _SVG.replace("%", "%25").replace("#", "%23").replace("<", "%3C").replace(">", "%3E")
"""The site's icon, as an address that needs no request."""

PLACES: tuple[tuple[str, str, str], ...] = (
    ("chat", "Chat", "/"),
    ("cache", "Cache", "/cache"),
    ("models", "Models", "/models"),
    ("settings", "Settings", "/settings"),
)
"""The pages: name (and icon), words, path."""

_THEMES = (("system", "System"), ("light", "Light"), ("dark", "Dark"))


@contextlib.contextmanager
def frame(here: str, *assets: str) -> Iterator[Element]:
    """The frame, with room for a page within; gives the element for it.

    Args:
        here: the name in `PLACES` of the page that is shown.
        assets: further files of this folder that belong into the head: `*.css` and `*.js`.
    """
    for name in ("frame.css", "frame.js", *assets):
        kind = "style" if name.endswith(".css") else "script"
        ui.add_head_html(f"<{kind}>{(_HERE / name).read_text(encoding='utf-8')}</{kind}>")
    with element("div", "rw-app"):
        skip = element("a", "rw-skip", href="#rw-main")
        with skip:
            text("Skip to the page")
        with element("nav", "rw-rail", aria_label="Pages"):
            ui.html(_SVG, sanitize=False).classes("rw-logo").props("aria-hidden=true")
            for name, words, path in PLACES:
                _place(name, words, path, is_here=name == here)
            element("div", "rw-rail-space")
            _theme_switch()
        with element("div", "rw-main", id="rw-main", tabindex="-1") as main:  # within the `main` that NiceGUI makes
            yield main


@contextlib.contextmanager
def sheet(heading: str, lead: str = "") -> Iterator[Element]:
    """A page of cards under a heading, within `frame`; gives the column."""
    with element("div", "rw-sheet"), element("div", "rw-sheet-column") as column:
        with element("div", "rw-sheet-head"), element("div", "rw-sheet-words"):
            text(heading, tag="h1")
            if lead:
                text(lead, "rw-sheet-lead", tag="p")
        yield column


def _place(name: str, words: str, path: str, *, is_here: bool) -> None:
    link = element("a", "rw-place", href=path)
    if is_here:
        link.props["aria-current"] = "page"
    with link:
        icon(name)
        text(words)


def _theme_switch() -> None:
    """One button; which of its words is seen is decided by the style sheet, so that it is right from the start."""
    switch = element("button", "rw-theme", type="button", title="System, light or dark")
    with switch:
        for name, words in _THEMES:
            with element("span", f"rw-theme-{name}"):
                icon(f"theme-{name}")
                text("Theme: ", "rw-visually-hidden")
                text(words)
    on_click(switch, script="window.rewarm.nextTheme()")
