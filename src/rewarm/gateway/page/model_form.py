"""How one model is run: the form on the Models page. Asks first what a change leaves behind. Knows `Models`."""

from __future__ import annotations

import shlex
from typing import Any

from nicegui.element import Element

from rewarm.gateway.page.engine import Models, ModelView, Trouble
from rewarm.gateway.page.parts import element, text, toggle, word_button
from rewarm.units import format_bytes

_VALUE = "(e) => emit(e.target.value)"
_KV = {
    "mlx-lm": (("", "Full precision"), ("8-bit", "8-bit"), ("4-bit", "4-bit")),
    "llama.cpp": tuple(
        (each, each or "As llama.cpp does (f16)") for each in ("", "f32", "bf16", "q8_0", "q5_1", "q4_0")
    ),
}


class ModelForm:
    """The form, filled with what is set now.

    Args:
        view: the model.
        models: told of the change.
    """

    def __init__(self, view: ModelView, models: Models) -> None:
        self._name = view.name
        self._models = models
        self._given: dict[str, Any] = {}
        is_llama = view.engine == "llama.cpp"
        with element("div", "rw-model-form"):
            self._caching(is_on=bool(view.options.get("caching", True)))
            with element("div", "rw-form-grid"):
                self._fields(view, is_llama=is_llama)
            self._notice = text("", "rw-notice rw-hidden", tag="div")
            self._notice.props["role"] = "alert"
            with element("div", "rw-row"):
                self._save = word_button("Save", self._do_save, "rw-primary")
                self._sure = word_button("Change it", self._do_sure, "rw-danger-button rw-hidden")

    def _caching(self, *, is_on: bool) -> None:
        with element("label", "rw-switch"):
            box = element("input", type="checkbox", role="switch")
            box.props["checked"] = is_on
            box.on("change", lambda e: self._note("caching", bool(e.args)), js_handler="(e) => emit(e.target.checked)")
            text("Keep what it has read on disk")

    def _fields(self, view: ModelView, *, is_llama: bool) -> None:
        options = view.options
        if is_llama:
            self._text("context_length", "Context length, in tokens", options, "Empty: as the model was made", "number")
        with element("label", "rw-field"):
            text("Type of the KV cache", "rw-label")
            chosen = element("select", "rw-text", aria_label="Type of the KV cache")
            with chosen:
                for value, words in _KV["llama.cpp" if is_llama else "mlx-lm"]:
                    text(words, tag="option").props["value"] = value
            chosen.props["value"] = options.get("kv_type") or ""
            chosen.on("change", lambda e: self._note("kv_type", str(e.args) or None), js_handler=_VALUE)
        self._text("adapter", "Adapter (LoRA)", options, "A GGUF file" if is_llama else "A folder of mlx-lm")
        if is_llama:
            self._text("adapter_scale", "Scale of the adapter", options, "1 is as it was made", "number")
        self._text("draft_model", "Draft model", options, "A smaller model of the same kind, to guess ahead")
        self._text("flags", "Further flags of the engine", options, "As in a shell")

    def _text(self, field: str, label: str, options: Any, hint: str, kind: str = "text") -> Element:
        value = options.get(field)
        with element("label", "rw-field"):
            text(label, "rw-label")
            made = element("input", "rw-text", type=kind, aria_label=label, step="any", spellcheck="false")
            made.props["value"] = shlex.join(value) if field == "flags" else "" if value is None else str(value)
            made.on("change", lambda e: self._note(field, e.args), js_handler=_VALUE)
            text(hint, "rw-hint-text")
        return made

    def _note(self, field: str, value: Any) -> None:
        self._given[field] = value
        self._tell("")

    async def _do_save(self) -> None:
        await self._change(dry_run=True)

    async def _do_sure(self) -> None:
        await self._change(dry_run=False)

    async def _change(self, *, dry_run: bool) -> None:
        try:
            changes = {field: _converted(field, value) for field, value in self._given.items()}
            effect = await self._models.change(self._name, changes, dry_run=True)
            if dry_run and effect.new_cache:
                left = format_bytes(effect.left_bytes) if effect.left_bytes else "nothing so far"
                self._tell(
                    f"This begins a new cache: what is kept of the model now ({left}) cannot be used with it. It stays "
                    "until room is needed, and serves again when you change back.",
                    "rw-warning",
                    is_question=True,
                )
                return
            await self._models.change(self._name, changes, dry_run=False)
        except (Trouble, ValueError) as error:
            self._tell(str(error), "rw-bad")
            return
        self._given = {}
        self._tell("Saved. It counts from when the model is loaded next.", "rw-good")

    def _tell(self, words: str, tone: str = "", *, is_question: bool = False) -> None:
        self._notice.set_text(words)
        self._notice.classes(replace=f"rw-notice {tone}" if words else "rw-hidden")
        toggle(self._sure, "rw-hidden", is_on=not is_question)
        toggle(self._save, "rw-hidden", is_on=is_question)


def _converted(field: str, value: Any) -> Any:
    """What was typed, as the option that it is.

    Raises:
        ValueError: it is none; says so for a person.
    """
    if field in ("caching", "kv_type"):
        return value
    words = str(value).strip()
    if field == "flags":
        return shlex.split(words)
    if field in ("context_length", "adapter_scale"):
        if not words:
            return None if field == "context_length" else 1.0
        try:
            return int(words) if field == "context_length" else float(words)
        except ValueError:
            raise ValueError(f"“{words}” is no number. Nothing was changed.") from None
    return words or None
