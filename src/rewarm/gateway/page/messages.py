"""The messages of a conversation, drawn. Only what changed is drawn again, so a long chat stays quick."""

from __future__ import annotations

from collections.abc import Callable

from nicegui import ui
from nicegui.element import Element

from rewarm.gateway.page.history import Message
from rewarm.gateway.page.markdown import to_html
from rewarm.gateway.page.parts import button, element, on_click, text
from rewarm.gateway.page.turns import Chat

_WELCOME = (
    "Everything stays on this machine. What the model has read is kept on disk: stop it, start it again, "
    "and the conversation goes on without being read anew."
)
_KEPT = "Your conversation is kept. Try again, or go on with another message"
_LEFT_OUT = ": this one is then left out."


class Messages:
    """The list of messages.

    Args:
        again: called when the user wants the last message answered anew.
    """

    def __init__(self, again: Callable[[], None]) -> None:
        self._again = again
        self._chat: Chat | None = None
        self._drawn: list[_Drawn] = []
        self._shown_after: tuple[int, bool, bool] | None = None
        self._log = element("div", "rw-log", role="log", aria_label="Conversation", aria_live="polite")
        self._after = element("div", "rw-after")

    def show(self, chat: Chat, stage: str) -> None:
        """Bring the list up to date with `chat`; `stage` is what is being done for its last reply."""
        messages = chat.conversation.messages
        if chat is not self._chat or not messages:
            self._log.clear()
            self._drawn = []
            self._chat = chat
        if not messages:
            self._welcome()
            return
        if not self._drawn:
            self._log.clear()
        n_same = 0
        for drawn, message in zip(self._drawn, messages, strict=False):
            if drawn.message is not message:
                break
            n_same += 1
        for drawn in self._drawn[n_same:]:
            drawn.delete()
        del self._drawn[n_same:]
        with self._log:
            self._drawn += [_Drawn(message) for message in messages[n_same:]]
        for drawn in self._drawn[-1:]:
            drawn.refresh(stage, is_busy=chat.is_busy)
        for drawn in self._drawn[:-1]:
            drawn.refresh("", is_busy=False)
        self._show_after(chat)

    def _show_after(self, chat: Chat) -> None:
        """What can be done after the last message."""
        last = chat.conversation.messages[-1]
        wanted = (id(last), chat.is_busy, bool(last.error))
        if wanted == self._shown_after:
            return
        self._shown_after = wanted
        self._after.clear()
        if chat.is_busy:
            return
        is_whole = last.role == "assistant" and not last.error
        label = "Answer again" if is_whole else "Try again"
        with self._after:
            on_click(button("again", label, "rw-quiet rw-again", label), self._again)

    def _welcome(self) -> None:
        self._after.clear()
        self._shown_after = None
        with self._log, element("div", "rw-welcome"):
            text("What would you like to talk about?", tag="h1")
            text(_WELCOME, tag="p")


class _Drawn:
    """One message's elements."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self._shown: tuple[str, ...] = ()
        is_reply = message.role == "assistant"
        label = "Reply" if is_reply else "Your message"
        self._article = element("article", "rw-reply" if is_reply else "rw-mine", aria_label=label)
        self._stage: Element | None = None
        with self._article:
            if not is_reply:
                text(message.content, "rw-mine-words", tag="div")
                return
            self._body = ui.html("", sanitize=True).classes("rw-prose")
            self._stage = element("div", "rw-stage rw-hidden", role="status")
            with self._stage:
                element("span", "rw-pulse", aria_hidden="true")
                self._stage_words = text("")
            self._error = element("div", "rw-trouble rw-hidden", role="alert")
            with self._error:
                self._error_title = text("", tag="strong")
                self._error_words = text("", "rw-trouble-words", tag="div")
                self._safe = text("", "rw-trouble-safe", tag="div")
            with element("div", "rw-note"):
                self._meter = element("span", "rw-meter rw-hidden", aria_hidden="true")
                with self._meter:
                    self._meter_part = element("span")
                self._note = text("", "rw-note-words")

    def refresh(self, stage: str, *, is_busy: bool) -> None:
        """Bring the elements up to date; nothing is sent to the browser when nothing changed."""
        message = self.message
        wanted = (message.content, stage, message.note, message.error, str(is_busy))
        if self._stage is None or wanted == self._shown:
            return
        self._shown = wanted
        self._body.set_content(to_html(message.content))
        self._article.classes(replace="rw-reply rw-writing" if is_busy and not stage else "rw-reply")
        self._article.props["aria-busy"] = "true" if is_busy else "false"
        self._stage_words.set_text(stage)
        self._stage.classes(replace="rw-stage" if stage else "rw-stage rw-hidden")
        self._error_title.set_text("The reply broke off." if message.content else "There is no reply.")
        self._error_words.set_text(message.error)
        self._safe.set_text(_KEPT + ("." if message.content else _LEFT_OUT))
        self._error.classes(replace="rw-trouble" if message.error else "rw-trouble rw-hidden")
        self._note.set_text(message.note)
        if message.share is not None:
            self._meter.classes(remove="rw-hidden")
            self._meter_part.style(replace=f"width: {message.share:.1%}")
        self._note.props["title"] = message.detail

    def delete(self) -> None:
        """Take the message off the page."""
        self._article.delete()
