"""The chat page: one per browser tab. Shows a `Chat`, and passes on what the user does; keeps nothing itself."""

from __future__ import annotations

from typing import Any

from nicegui import ui
from nicegui.element import Element

from rewarm.gateway.page.delete_dialog import DeleteDialog
from rewarm.gateway.page.drawer import Drawer, DrawerActs
from rewarm.gateway.page.engine import Models, ModelView, State
from rewarm.gateway.page.history import Message
from rewarm.gateway.page.messages import MessageActs, Messages
from rewarm.gateway.page.parts import button, element, icon, on_click, text, toggle
from rewarm.gateway.page.turns import STARTING, Chat, Chats
from rewarm.gateway.page.words import model_state, starting

REFRESH_S = 0.1
DRAWER_TICKS = 5
_VALUE = "(e) => emit(e.target.value)"
_SEND = "const text = window.rewarm.take(); if (text !== null) emit(text);"
# Enter sends, Shift+Enter breaks the line; an Enter that ends a composition (Chinese, Japanese) does neither.
_ENTER = (
    "(e) => { if (e.key !== 'Enter' || e.shiftKey || e.isComposing || e.keyCode === 229) return;"
    " e.preventDefault(); " + _SEND + " }"
)


class ChatPage:
    """The elements of one page, and the conversation that it shows: `wanted`, by its id, or the latest."""

    def __init__(self, models: Models, chats: Chats, wanted: str = "") -> None:
        self._models = models
        self._chats = chats
        self._chat = chats.get(wanted) or chats.latest()
        self._views: list[ModelView] = []
        self._model = ""
        self._shown: tuple[int, str] | None = None
        self._ticks = 0
        self._listed: Chat | None = None
        self._was_busy = False

    def build(self) -> None:
        """Draw the page, and keep it true from now on."""
        self._views = list(self._models.views())
        self._model = self._model_of(self._chat)
        self._client = ui.context.client
        self._dialog = DeleteDialog(self._chats, self._deleted)
        acts = DrawerActs(self._open, self._new, self._new_private, self._dialog.ask)
        self._drawer = Drawer(self._chats, acts)
        with element("div", "rw-page"):
            self._build_header()
            with element("section", "rw-scroll", aria_label="Chat"), element("div", "rw-column"):
                self._build_system()
                self._messages = Messages(MessageActs(self._again, self._edit, self._show_version))
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
            self._private = element("span", "rw-tag rw-private rw-hidden", title="Nothing of this chat is kept")
            with self._private:
                icon("lock")
                text("Private")
            self._unload = button("power", "Stop the model: frees its memory", "rw-quiet", "Stop the model")
            on_click(self._unload, self._stop_model)
            on_click(button("plus", "New chat", "rw-phone-only"), self._new)

    def _build_system(self) -> None:
        with element("details", "rw-system"):
            with element("summary"):
                icon("chevron")
                text("System prompt and settings")
                self._system_given = text("", "rw-system-given")
            self._system = element(
                "textarea",
                "rw-text rw-system-input",
                aria_label="System prompt",
                rows="4",
                placeholder="What the model should know and how it should answer. Empty: the model's own default.",
            )
            self._system.on("change", lambda e: self._set_system(e.args), js_handler="(e) => emit(e.target.value)")
            with element("div", "rw-sampling"):
                self._temperature = self._number("Temperature", "0.2", "any", "0 is always the likeliest word")
                self._max_tokens = self._number("Longest reply, in tokens", "1024", "1", "Empty: as suggested")
            text(
                "A changed system prompt is another beginning: the conversation is read anew.", "rw-hint-text", tag="p"
            )
        self._temperature.on("change", lambda e: self._set_number("temperature", e.args), js_handler=_VALUE)
        self._max_tokens.on("change", lambda e: self._set_number("max_tokens", e.args), js_handler=_VALUE)

    def _number(self, label: str, default: str, step: str, hint: str) -> Element:
        with element("label", "rw-field"):
            text(label, "rw-label")
            made = element("input", "rw-text", type="number", min="0", step=step, placeholder=default)
            made.props["aria-label"] = label
            text(hint, "rw-hint-text")
        return made

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

    def _again(self, reply: Message | None) -> None:
        self._chat.again(self._model, reply)
        self._refresh()

    def _edit(self, message: Message, words: str) -> None:
        self._chat.edit(message, words, self._model)
        self._refresh()
        self._client.run_javascript("window.rewarm.focus();")

    async def _show_version(self, message: Message) -> None:
        await self._chat.show(message)
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
        self._client.run_javascript(f"window.rewarm.opened({self._address()!r});")

    def _address(self) -> str:
        """Where the page shows this conversation again after a reload."""
        is_kept = self._chat.conversation.messages and not self._chat.is_private
        return f"/?chat={self._chat.conversation.id}" if is_kept else "/"

    def _new(self) -> None:
        self._begin(self._chats.new())

    def _new_private(self) -> None:
        self._begin(self._chats.new(is_private=True))

    def _begin(self, chat: Chat) -> None:
        model = self._model
        self._open(chat)
        self._choose(model)
        self._select.props["value"] = model

    def _deleted(self, chat: Chat) -> None:
        if chat is self._chat:
            self._open(self._chats.latest())
        else:
            self._refresh()

    def _choose(self, name: Any) -> None:
        if any(view.name == name for view in self._views):
            self._model = str(name)

    async def _set_system(self, words: Any) -> None:
        await self._chat.set(system=str(words))

    async def _set_number(self, name: str, words: Any) -> None:
        try:
            # An empty field, and what is no number, is the default again: -1 stands for it.
            number = float(str(words)) if str(words).strip() else -1.0
        except ValueError:
            number = -1.0
        if name == "temperature":
            await self._chat.set(temperature=number)
        else:
            await self._chat.set(max_tokens=int(max(-1.0, min(number, 1e9))))

    async def _stop_model(self) -> None:
        await self._models.unload(self._model)

    # Keeping it true.

    def _refresh(self) -> None:
        self._views = list(self._models.views())
        view = next((view for view in self._views if view.name == self._model), None)
        self._show_model(view)
        chat = self._chat
        # The list seldom changes by itself, and it is long.
        self._ticks += 1
        if self._ticks % DRAWER_TICKS == 1 or chat is not self._listed or chat.is_busy != self._was_busy:
            self._drawer.refresh(chat)
            self._listed, self._was_busy = chat, chat.is_busy
        if self._chats.get(chat.conversation.id) is not chat:  # another page deleted it
            self._open(self._chats.latest())
            return
        stage = starting(view) if chat.stage == STARTING else chat.stage
        if self._shown != (chat.version, stage):
            self._shown = (chat.version, stage)
            self._show_chat(chat, stage)

    def _show_chat(self, chat: Chat, stage: str) -> None:
        self._messages.show(chat, stage)
        toggle(self._composer, "rw-busy", is_on=chat.is_busy)
        kept = chat.conversation
        self._system.props["value"] = kept.system
        self._temperature.props["value"] = "" if kept.temperature is None else f"{kept.temperature:g}"
        self._max_tokens.props["value"] = "" if kept.max_tokens is None else str(kept.max_tokens)
        is_set = kept.system.strip() or kept.temperature is not None or kept.max_tokens is not None
        self._system_given.set_text("set" if is_set else "")
        toggle(self._private, "rw-hidden", is_on=not chat.is_private)
        self._problem_words.set_text(chat.unsaved)
        toggle(self._problem, "rw-hidden", is_on=not chat.unsaved)

    def _show_model(self, view: ModelView | None) -> None:
        words, tone = model_state(view)
        if self._chip_words.text != words:
            self._chip_words.set_text(words)
            self._chip.classes(replace=f"rw-chip rw-{tone}")
            self._chip.props["title"] = view.message if view else ""
        can_stop = view is not None and view.state in (State.READY, State.LOADING, State.PREPARING)
        toggle(self._unload, "rw-hidden", is_on=not can_stop)

    def _model_of(self, chat: Chat) -> str:
        names = [view.name for view in self._views]
        wanted = chat.conversation.model
        return wanted if wanted in names else next(iter(names), "")
