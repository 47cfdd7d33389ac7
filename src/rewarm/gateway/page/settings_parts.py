"""Building blocks of the Settings page: a row with its label, its words, its control, and what a change did."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement

from rewarm.gateway.page.cache_parts import error_words, set_class, set_prop, set_text
from rewarm.gateway.page.parts import element, text

_numbers = itertools.count()


def unique(name: str) -> str:
    """An id that no other element has."""
    return f"rc-{name}-{next(_numbers)}"


class Said:
    """One line under a control: what a change did, or why it was not made."""

    def __init__(self) -> None:
        self._words: TextElement = text("", "rc-said rw-hidden", tag="div")
        self._words.props["role"] = "status"

    def good(self, words: str) -> None:
        """Say what was done."""
        self._say(words, "rc-good")

    def bad(self, words: str) -> None:
        """Say what went wrong."""
        self._say(words, "rc-bad")

    def _say(self, words: str, tone: str) -> None:
        set_text(self._words, words)
        self._words.classes(replace=f"rc-said {tone}" if words else "rc-said rw-hidden")


class Row:
    """One setting: what it is called, what it does, its control at the side, and what a change did.

    Args:
        label: what it is called.
        hint: what it does.
    """

    def __init__(self, label: str, hint: str) -> None:
        self.id = unique("setting")
        self._box = element("div", "rc-setting")
        with self._box:
            with element("div", "rc-setting-words"):
                name = text(label, "rc-setting-name", tag="label")
                name.props["for"] = self.id
                told = text(hint, "rw-hint-text", tag="div")
                told.props["id"] = f"{self.id}-hint"
            self._side = element("div", "rc-setting-side")

    def __enter__(self) -> Row:
        """Put the control at its place."""
        self._side.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """What it says comes below the control."""
        self.said = Said()
        self._side.__exit__(*exception)

    def control(self, tag: str, classes: str, **attributes: str) -> Element:
        """The control, bound to the row's label and hint."""
        return element(tag, classes, id=self.id, aria_describedby=f"{self.id}-hint", **attributes)


async def settle(said: Said, act: Callable[[], str]) -> bool:
    """Do something on a thread, and say what it did or why it did not; whether it did."""
    try:
        said.good(await asyncio.to_thread(act))
        return True
    except Exception as error:  # noqa: BLE001 - told on the page, whatever it is
        said.bad(error_words(error))
        return False


def tell_field(made: Element, field_id: str, script: str) -> None:
    """Run `script` on the field `e` in the browser.

    An attribute would not do: the page's framework puts a field's value back at every change anywhere.
    """
    made.client.run_javascript(f"const e = document.getElementById({json.dumps(field_id)}); if (e) {{ {script} }}")


class TextSetting:
    """A setting that is typed.

    Args:
        label, hint: see `Row`.
        save: given what was typed; makes the change, on a thread, and gives what it did.
        placeholder: shown where nothing is set.
    """

    def __init__(self, label: str, hint: str, save: Callable[[str], str], placeholder: str = "") -> None:
        self._save = save
        self._shown: str | None = ""
        with Row(label, hint) as row:
            self._field = row.control(
                "input",
                "rw-text rc-short",
                type="text",
                autocomplete="off",
                spellcheck="false",
                **({"placeholder": placeholder} if placeholder else {}),
            )
            self._field.on("change", lambda e: self._typed(e.args), js_handler="(e) => emit(e.target.value)")
        self._row = row

    async def _typed(self, words: Any) -> None:
        given = str(words).strip()
        is_saved = await settle(self._row.said, lambda: self._save(given))
        set_prop(self._field, "aria-invalid", "false" if is_saved else "true")
        # What makes no sense stays, to be mended; what was saved is shown as it was understood.
        self._shown = "" if is_saved else None

    def show(self, words: str) -> None:
        """Show the value in force, but not over what somebody is typing, or is to mend."""
        if self._shown is not None and words != self._shown:
            self._shown = words
            tell_field(self._field, self._row.id, f"if (document.activeElement !== e) e.value = {json.dumps(words)};")


class ChoiceSetting:
    """A setting that is one of a few.

    Args:
        label, hint: see `Row`.
        choices: value and words of each.
        save: given the value; makes the change, on a thread, and gives what it did.
    """

    def __init__(self, label: str, hint: str, choices: Sequence[tuple[str, str]], save: Callable[[str], str]) -> None:
        self._save = save
        self._choices = {value for value, _ in choices}
        with Row(label, hint) as row:
            self._field = row.control("select", "rw-text rc-short")
            with self._field:
                for value, words in choices:
                    text(words, tag="option").props["value"] = value
            self._field.on("change", lambda e: self._chosen(e.args), js_handler="(e) => emit(e.target.value)")
        self._row = row

    async def _chosen(self, value: Any) -> None:
        if value in self._choices:
            set_prop(self._field, "value", str(value))
            await settle(self._row.said, lambda: self._save(str(value)))

    def show(self, value: str) -> None:
        """Show the value in force."""
        set_prop(self._field, "value", value)


class SwitchSetting:
    """A setting that is on or off.

    Args:
        label, hint: see `Row`.
        save: given whether it is to be on; makes the change, on a thread, and gives what it did.
    """

    def __init__(self, label: str, hint: str, save: Callable[[bool], str]) -> None:
        self._save = save
        with Row(label, hint) as row, element("span", "rw-switch"):
            self._field = row.control("input", "", type="checkbox", role="switch")
            self._field.on("change", lambda e: self._turned(e.args), js_handler="(e) => emit(e.target.checked)")
        self._row = row
        self._is_on: bool | None = None

    async def _turned(self, is_on: Any) -> None:
        wanted = is_on is True
        self._is_on = wanted if await settle(self._row.said, lambda: self._save(wanted)) else None

    def show(self, is_on: bool) -> None:  # noqa: FBT001 - a state, not a flag
        """Show the value in force."""
        if is_on != self._is_on:
            self._is_on = is_on
            tell_field(self._field, self._row.id, f"e.checked = {json.dumps(is_on)};")


def toggle(made: Element, *, is_shown: bool) -> None:
    """Show an element, or hide it."""
    set_class(made, "rw-hidden", is_on=not is_shown)
