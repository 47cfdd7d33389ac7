"""The chat page: one per browser tab. Shows a `Chat`, and passes on what the user does; keeps nothing itself."""

from __future__ import annotations

from typing import Any

from nicegui import ui
from nicegui.element import Element

from rewarm.gateway.page.drawer import Drawer
from rewarm.gateway.page.engine import Models, ModelView, State
from rewarm.gateway.page.messages import Messages
from rewarm.gateway.page.parts import button, element, icon, on_click, text
from rewarm.gateway.page.turns import STARTING, Chat, Chats
from rewarm.gateway.page.words import model_state, starting

REFRESH_S = 0.1
_SEND = "const text = window.rewarm.take(); if (text !== null) emit(text);"
# Enter sends, Shift+Enter breaks the line; an Enter that ends a composition (Chinese, Japanese) does neither.
_ENTER = (
    "(e) => { if (e.key !== 'Enter' || e.shiftKey || e.isComposing || e.keyCode === 229) return;"
    " e.preventDefault(); " + _SEND + " }"
)


class ChatPage:
    """The elements of one page, and the conversation that it shows."""

    def __init__(self, models: Models, chats: Chats) -> None:
        self._models = models
        self._chats = chats
        self._chat = chats.latest()
        self._views: list[ModelView] = []
        self._model = ""
        self._shown: tuple[int, str] | None = None

    def build(self) -> None:
        """Draw the page, and keep it true from now on."""
        self._views = list(self._models.views())
        self._model = self._model_of(self._chat)
        self._client = ui.context.client
        self._drawer = Drawer(self._chats, open_chat=self._open, new_chat=self._new, delete=self._delete)
        with element("div", "rw-page"):
            self._build_header()
            with element("section", "rw-scroll", aria_label="Chat"), element("div", "rw-column"):
                self._build_system()
                self._messages = Messages(self._again)
            self._build_composer()
        self._refresh()
        ui.timer(REFRESH_S, self._refresh)

    # Building.

    def _build_header(self) -> None:
        with element("header", "rw-header"):
            on_click(button("menu", "Show or hide the conversations"), script="window.rewarm.toggleDrawer()")
            with element("div", "rw-models"):
                self._select = element("select", "rw-select", aria_label="Model")
                with self._select:
                    for view in self._views:
                        option = text(view.name, tag="option")
                        option.props["value"] = view.name
                self._select.props["value"] = self._model
                self._select.on("change", lambda e: self._choose(e.args), js_handler="(e) => emit(e.target.value)")
                self._chip = element("span", "rw-chip", role="status", aria_live="polite")
                with self._chip:
                    element("span", "rw-dot", aria_hidden="true")
                    self._chip_words = text("", "rw-chip-words")
            self._unload = button("power", "Stop the model: frees its memory", "rw-quiet", "Stop the model")
            on_click(self._unload, self._stop_model)
            on_click(button("plus", "New chat", "rw-phone-only"), self._new)

    def _build_system(self) -> None:
        with element("details", "rw-system"):
            with element("summary"):
                icon("chevron")
                text("System prompt")
                self._system_given = text("", "rw-system-given")
            self._system = element(
                "textarea",
                "rw-system-input",
                aria_label="System prompt",
                rows="4",
                placeholder="What the model should know and how it should answer. Empty: the model's own default.",
            )
            self._system.on("change", lambda e: self._set_system(e.args), js_handler="(e) => emit(e.target.value)")

    def _build_composer(self) -> None:
        with element("footer", "rw-footer"), element("div", "rw-column"):
            self._problem = element("div", "rw-trouble rw-hidden", role="status")
            with self._problem:
                self._problem_words = text("", tag="div")
            self._composer = element("div", "rw-composer")
            with self._composer:
                field = element(
                    "textarea", "rw-input", rows="1", aria_label="Message", placeholder="Message", enterkeyhint="send"
                )
                field.on("keydown", lambda e: self._send(e.args), js_handler=_ENTER)
                send = button("send", "Send", "rw-send")
                send.on("click", lambda e: self._send(e.args), js_handler=f"() => {{ {_SEND} }}")
                stop = button("stop", "Stop the reply", "rw-stop")
                on_click(stop, self._stop_reply)
            text("Enter sends · Shift+Enter starts a new line", "rw-hint", tag="div")

    # What the user does.

    def _send(self, words: Any) -> None:
        self._chat.send(str(words), self._model)
        self._refresh()

    def _again(self) -> None:
        self._chat.again(self._model)
        self._refresh()

    async def _stop_reply(self) -> None:
        await self._chat.stop()

    def _open(self, chat: Chat) -> None:
        self._chat = chat
        self._shown = None
        self._model = self._model_of(chat)
        self._select.props["value"] = self._model
        self._refresh()
        # Not of the element that was clicked: the list that it stood in has been drawn anew.
        self._client.run_javascript("window.rewarm.closeDrawer(); window.rewarm.focus();")

    def _new(self) -> None:
        model = self._model
        self._open(self._chats.new())
        self._choose(model)
        self._select.props["value"] = model

    async def _delete(self, chat: Chat) -> None:
        try:
            await self._chats.delete(chat)
        except OSError as error:
            self._problem_words.set_text(f"The conversation cannot be deleted ({error.strerror or error}).")
            self._problem.classes(remove="rw-hidden")
            return
        if chat is self._chat:
            self._open(self._chats.latest())

    def _choose(self, name: Any) -> None:
        if any(view.name == name for view in self._views):
            self._model = str(name)

    async def _set_system(self, words: Any) -> None:
        self._chat.conversation.system = str(words)
        self._system.props["value"] = str(words)
        self._chat.version += 1
        if self._chat.conversation.messages:
            await self._chat.save()

    async def _stop_model(self) -> None:
        await self._models.unload(self._model)

    # Keeping it true.

    def _refresh(self) -> None:
        self._views = list(self._models.views())
        view = next((view for view in self._views if view.name == self._model), None)
        self._show_model(view)
        self._drawer.refresh(self._chat)
        chat = self._chat
        if self._chats.get(chat.conversation.id) is not chat:  # another page deleted it
            self._open(self._chats.latest())
            return
        stage = starting(view) if chat.stage == STARTING else chat.stage
        if self._shown != (chat.version, stage):
            self._shown = (chat.version, stage)
            self._show_chat(chat, stage)

    def _show_chat(self, chat: Chat, stage: str) -> None:
        self._messages.show(chat, stage)
        _toggle(self._composer, "rw-busy", chat.is_busy)
        self._system.props["value"] = chat.conversation.system
        self._system_given.set_text("set" if chat.conversation.system.strip() else "")
        self._problem_words.set_text(chat.unsaved)
        _toggle(self._problem, "rw-hidden", not chat.unsaved)

    def _show_model(self, view: ModelView | None) -> None:
        words, tone = model_state(view)
        if self._chip_words.text != words:
            self._chip_words.set_text(words)
            self._chip.classes(replace=f"rw-chip rw-{tone}")
            self._chip.props["title"] = view.message if view else ""
        can_stop = view is not None and view.state in (State.READY, State.LOADING, State.PREPARING)
        _toggle(self._unload, "rw-hidden", not can_stop)

    def _model_of(self, chat: Chat) -> str:
        names = [view.name for view in self._views]
        wanted = chat.conversation.model
        return wanted if wanted in names else next(iter(names), "")


def _toggle(made: Element, name: str, is_on: bool) -> None:  # noqa: FBT001 - a state, not a flag
    if (name in made.classes) != is_on:
        made.classes(add=name if is_on else None, remove=None if is_on else name)
