"""The Models page: what is offered, what runs and what it takes, how each model is run. Knows `Models`, no process.

A change of how a model is run says beforehand when it begins a new cache, and how much of the old one it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from rewarm.gateway.page.engine import Models, ModelView, State, Trouble
from rewarm.gateway.page.frame import sheet
from rewarm.gateway.page.model_form import ModelForm
from rewarm.gateway.page.parts import element, text, toggle, word_button
from rewarm.gateway.page.words import model_state
from rewarm.units import format_bytes

REFRESH_S = 0.5
ROWS = 100
_SOURCES = {
    "given": "Given at the start",
    "bundled": "Comes with rewarm",
    "huggingface": "Hugging Face",
    "lm-studio": "LM Studio",
    "ollama": "Ollama",
}
_SEARCH = "(e) => { clearTimeout(window.rewarmFind); window.rewarmFind = setTimeout(() => emit(e.target.value), 120); }"


class ModelsPage:
    """The list of models on one page."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._words = ""
        self._names: list[str] = []
        self._rows: dict[str, _Row] = {}

    def build(self) -> None:
        """Draw the page, and keep it true from now on."""
        lead = (
            "Found in the folders given, and where Hugging Face, LM Studio and Ollama keep theirs. Each runs by itself."
        )
        with sheet("Models", lead):
            with element("div", "rw-row"):
                search = element(
                    "input",
                    "rw-text rw-models-find",
                    type="search",
                    placeholder="Search",
                    aria_label="Search the models",
                )
                search.on("input", lambda e: self._find(e.args), js_handler=_SEARCH)
                word_button("Look for models again", self._scan)
                self._count = text("", "rw-faint rw-small-text")
            self._trouble = text("", "rw-notice rw-bad rw-hidden", tag="div")
            self._list = element("div", "rw-model-list")
        self._refresh()
        ui.timer(REFRESH_S, self._refresh)

    def _find(self, words: Any) -> None:
        self._words = str(words)[:200]
        self._refresh()

    async def _scan(self) -> None:
        try:
            await self._models.scan()
        except Trouble as trouble:
            self._trouble.set_text(str(trouble))
            toggle(self._trouble, "rw-hidden", is_on=False)
        self._refresh()

    def _refresh(self) -> None:
        views = list(self._models.details())
        wanted = self._words.casefold().split()
        found = [view for view in views if all(word in view.name.casefold() for word in wanted)][:ROWS]
        count = f"{len(found)} of {len(views)}"
        if count != self._count.text:
            self._count.set_text(count)
        names = [view.name for view in found]
        if names != self._names or not names:
            self._draw(names)
        for view in found:
            self._rows[view.name].refresh(view)

    def _draw(self, names: list[str]) -> None:
        if names == self._names and self._rows == {} and self._list.default_slot.children:
            return
        self._list.clear()
        self._names = names
        with self._list:
            self._rows = {name: _Row(name, self._models) for name in names}
            if not names:
                text("No model is called so." if self._words else "No model was found.", "rw-soft", tag="p")


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is told of a model in one line, and whether it takes memory."""

    words: str
    memory: str


class _Row:
    """One model: a card."""

    def __init__(self, name: str, models: Models) -> None:
        self._name = name
        self._models = models
        self._shown: object = None
        with element("section", "rw-card rw-model", aria_label=name):
            with element("div", "rw-model-head"):
                with element("div", "rw-model-words"):
                    text(name, "rw-model-name", tag="h2")
                    self._facts = text("", "rw-faint rw-small-text rw-number", tag="div")
                self._memory = text("", "rw-model-memory rw-number")
                self._chip = element("span", "rw-chip", role="status")
                with self._chip:
                    element("span", "rw-dot", aria_hidden="true")
                    self._state = text("")
                with element("div", "rw-row rw-model-acts"):
                    self._load = word_button("Load", self._do_load, "rw-primary")
                    self._unload = word_button("Unload", self._do_unload)
                    self._settings = word_button("Settings", self._do_settings, "rw-plain")
                    self._settings.props["aria-expanded"] = "false"
            self._bar = element("div", "rw-bar rw-hidden", role="progressbar", aria_label=f"Progress of {name}")
            with self._bar:
                self._part = element("span")
            self._notice = text("", "rw-notice rw-hidden", tag="div")
            self._log = text("", "rw-log-lines rw-hidden", tag="pre")
            self._form_place = element("div", "rw-hidden")
        self._form: ModelForm | None = None

    def refresh(self, view: ModelView) -> None:
        """Bring the card up to date."""
        if view == self._shown:
            return
        self._shown = view
        facts = _facts(view)
        _set(self._facts, facts.words)
        _set(self._memory, facts.memory)
        words, tone = model_state(view)
        _set(self._state, words)
        self._chip.classes(replace=f"rw-chip rw-{tone}")
        is_on = view.state in (State.READY, State.LOADING, State.PREPARING)
        toggle(self._load, "rw-hidden", is_on=is_on or bool(view.why_not) or view.state is State.STOPPING)
        toggle(self._unload, "rw-hidden", is_on=not is_on)
        is_busy = view.state in (State.LOADING, State.PREPARING)
        toggle(self._bar, "rw-hidden", is_on=not is_busy)
        toggle(self._bar, "rw-unknown", is_on=view.progress is None)
        self._part.style(replace=f"width: {view.progress:.0%}" if view.progress is not None else "")
        self._tell(view)

    def _tell(self, view: ModelView) -> None:
        notice, tone = "", ""
        if view.why_not:
            notice, tone = view.why_not, "rw-warning"
        elif view.state is State.FAILED:
            notice, tone = (
                f"{view.message.partition('Its last words:')[0].strip()} The next message starts it again.",
                "rw-bad",
            )
        elif view.reload_needed:
            notice, tone = "It still runs as it was set before: unload it, and the next message loads it anew.", ""
        _set(self._notice, notice)
        self._notice.classes(replace=f"rw-notice {tone}" if notice else "rw-hidden")
        lines = "\n".join(view.log) if view.state is State.FAILED else ""
        _set(self._log, lines)
        toggle(self._log, "rw-hidden", is_on=not lines)

    async def _do_load(self) -> None:
        try:
            await self._models.load(self._name)
        except Trouble:
            return  # the card tells it

    async def _do_unload(self) -> None:
        await self._models.unload(self._name)

    def _do_settings(self) -> None:
        is_open = self._settings.props["aria-expanded"] == "true"
        self._settings.props["aria-expanded"] = "false" if is_open else "true"
        toggle(self._form_place, "rw-hidden", is_on=is_open)
        self._form_place.clear()
        view = self._shown
        if not is_open and isinstance(view, ModelView):
            with self._form_place:
                self._form = ModelForm(view, self._models)


def _facts(view: ModelView) -> _Facts:
    parts = [_SOURCES.get(view.source, view.source), view.engine, format_bytes(view.nbytes) if view.nbytes else ""]
    options: Mapping[str, Any] = view.options
    if options.get("context_length"):
        parts.append(f"{options['context_length']:,} tokens of context")
    parts += [f"KV {options['kv_type']}" if options.get("kv_type") else "", "adapter" if options.get("adapter") else ""]
    parts.append("" if options.get("caching", True) else "caching off")
    memory = f"{format_bytes(view.memory_bytes)} of memory" if view.memory_bytes else ""
    return _Facts(" · ".join(part for part in parts if part), memory)


def _set(made: TextElement, words: str) -> None:
    if made.text != words:
        made.set_text(words)
