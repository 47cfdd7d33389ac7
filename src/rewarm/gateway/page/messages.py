"""The messages of a conversation, drawn. Only what changed is drawn again, so a long chat stays quick."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from nicegui import ui

from rewarm.gateway.page.history import Conversation, Message
from rewarm.gateway.page.markdown import to_html
from rewarm.gateway.page.parts import act, element, icon, text, toggle, word_button
from rewarm.gateway.page.turns import Chat

ROWS = 60
"""So many messages are drawn at first; what is older, when it is asked for."""

_WELCOME = (
    "Everything stays on this machine. What the model has read is kept on disk: stop it, start it again, "
    "and the conversation goes on without being read anew."
)
_PRIVATE = (
    "Nothing of this chat is written to disk: not by the history, not by the cache. It can be read here until it is "
    "deleted or rewarm ends. The model reads all of it anew for every reply."
)
_KEPT = "Your conversation is kept. Try again, or go on with another message"
_LEFT_OUT = ": this one is then left out."
# As in the field below: Enter sends, Shift+Enter breaks the line; Escape leaves it as it was.
_EDIT_KEYS = (
    "(e) => { if (e.key === 'Escape') { emit(null); return; }"
    " if (e.key !== 'Enter' || e.shiftKey || e.isComposing || e.keyCode === 229) return;"
    " e.preventDefault(); emit(e.target.value); }"
)


@dataclass(frozen=True, slots=True)
class MessageActs:
    """What the messages ask of the page.

    Attributes:
        again: make a reply anew; None: answer the last message.
        edit: say something in place of a message of the user.
        show: show the branch through a message.
    """

    again: Callable[[Message | None], None]
    edit: Callable[[Message, str], None]
    show: Callable[[Message], Awaitable[None]]


class Messages:
    """The list of messages.

    Args:
        acts: what the user can do with them.
    """

    def __init__(self, acts: MessageActs) -> None:
        self._acts = acts
        self._chat: Chat | None = None
        self._rows = ROWS
        self._drawn: list[_Reply | _Mine] = []
        self._earlier = word_button("", self._show_all, "rw-quiet rw-earlier rw-hidden")
        with self._earlier:
            self._earlier_words = text("")
        self._log = element("div", "rw-log", role="log", aria_label="Conversation", aria_live="polite")
        self._after = word_button("Try again", lambda: acts.again(None), "rw-plain rw-after rw-hidden")

    def show(self, chat: Chat, stage: str) -> None:
        """Bring the list up to date with `chat`; `stage` is what is being done for its last reply."""
        branch = chat.conversation.branch()
        if chat is not self._chat or not branch:
            self._log.clear()
            self._drawn, self._rows = [], ROWS
            self._chat = chat
        n_left_out = max(0, len(branch) - self._rows)
        self._earlier_words.set_text(f"Show {n_left_out:,} earlier messages")
        toggle(self._earlier, "rw-hidden", is_on=not n_left_out)
        toggle(self._after, "rw-hidden", is_on=chat.is_busy or not branch or branch[-1].role != "user")
        if branch:
            self._draw(branch[n_left_out:])
            self._refresh(chat, stage)
        else:
            self._welcome(is_private=chat.is_private)

    def _draw(self, messages: list[Message]) -> None:
        if not self._drawn:
            self._log.clear()
        while self._drawn and self._drawn[0].message is not messages[0] and self._drawn[0].message not in messages:
            self._drawn.pop(0).delete()
        n_same = 0
        for drawn, message in zip(self._drawn, messages, strict=False):
            if drawn.message is not message:
                break
            n_same += 1
        for drawn in self._drawn[n_same:]:
            drawn.delete()
        del self._drawn[n_same:]
        with self._log:
            for message in messages[n_same:]:
                kind = _Reply if message.role == "assistant" else _Mine
                self._drawn.append(kind(message, self._acts))

    def _refresh(self, chat: Chat, stage: str) -> None:
        versions = _versions(chat.conversation)
        for drawn in self._drawn:
            is_made = chat.is_busy and drawn is self._drawn[-1]
            drawn.refresh(chat, versions[drawn.message.parent], stage if is_made else "", is_made=is_made)

    def _show_all(self) -> None:
        self._rows = 1_000_000
        if self._chat is not None:
            # What is older comes before what is there: all is drawn anew.
            self._log.clear()
            self._drawn = []
            self.show(self._chat, self._chat.stage)

    def _welcome(self, *, is_private: bool) -> None:
        self._log.clear()
        with self._log, element("div", "rw-welcome rw-welcome-private" if is_private else "rw-welcome"):
            if is_private:
                icon("lock")
            text("A private chat" if is_private else "What would you like to talk about?", tag="h1")
            text(_PRIVATE if is_private else _WELCOME, tag="p")


def _versions(conversation: Conversation) -> dict[int, list[Message]]:
    found: dict[int, list[Message]] = {}
    for message in conversation.messages:
        found.setdefault(message.parent, []).append(message)
    return found


class _Versions:
    """Which of several versions of a message is shown, and the way to the others."""

    def __init__(self, message: Message, acts: MessageActs) -> None:
        self._message = message
        self._acts = acts
        self._all: list[Message] = [message]
        self._made = element("span", "rw-versions rw-hidden", role="group", aria_label="Versions")
        with self._made:
            act("Earlier version", "back", lambda: self._go(-1))
            self._words = text("", "rw-number")
            act("Later version", "forward", lambda: self._go(1))

    def refresh(self, versions: list[Message]) -> None:
        self._all = versions
        at = next((n for n, each in enumerate(versions, 1) if each is self._message), 1)
        words = f"{at} of {len(versions)}" if len(versions) > 1 else ""
        if words != self._words.text:
            self._words.set_text(words)
            toggle(self._made, "rw-hidden", is_on=not words)

    async def _go(self, by: int) -> None:
        at = next((n for n, each in enumerate(self._all) if each is self._message), 0) + by
        if 0 <= at < len(self._all):
            await self._acts.show(self._all[at])


class _Mine:
    """A message of the user."""

    def __init__(self, message: Message, acts: MessageActs) -> None:
        self.message = message
        self._acts = acts
        self._article = element("article", "rw-mine", aria_label="Your message")
        with self._article:
            self._words = text(message.content, "rw-mine-words", tag="div")
            self._editor = element("div", "rw-editor rw-hidden")
            self._row = element("div", "rw-acts")
            with self._row:
                self._versions = _Versions(message, acts)
                act("Copy the message", "copy").props["data-copy"] = message.content
                self._edit = act("Edit the message", "pencil", self._open)

    def refresh(self, chat: Chat, versions: list[Message], _stage: str, *, is_made: bool) -> None:
        """Bring the elements up to date."""
        self._versions.refresh(versions)
        toggle(self._row, "rw-resting", is_on=chat.is_busy)

    def _open(self) -> None:
        self._editor.clear()
        with self._editor:
            field = element("textarea", "rw-text", aria_label="Edit the message", rows="3")
            field.props["value"] = self.message.content
            field.on("keydown", lambda e: self._done(e.args), js_handler=_EDIT_KEYS)
            with element("div", "rw-row rw-row-end"):
                text("What was said before stays beside it.", "rw-hint-text")
                word_button("Cancel", lambda: self._done(None))
                send = element("button", "rw-button rw-primary", type="button")
                with send:
                    text("Send")
                send.on(
                    "click",
                    lambda e: self._done(e.args),
                    js_handler=f"() => emit(document.getElementById({field.html_id!r}).value)",
                )
        self._set_editing(is_on=True)
        self._article.client.run_javascript(f"window.rewarm.select({field.html_id!r})")

    def _done(self, words: Any) -> None:
        self._set_editing(is_on=False)
        if words is None or str(words).strip() in ("", self.message.content):
            self._article.client.run_javascript("window.rewarm.focus()")
            return
        self._acts.edit(self.message, str(words))

    def _set_editing(self, *, is_on: bool) -> None:
        toggle(self._article, "rw-editing", is_on=is_on)
        toggle(self._editor, "rw-hidden", is_on=not is_on)

    def delete(self) -> None:
        """Take the message off the page."""
        self._article.delete()


class _Reply:
    """A reply, finished or being made."""

    def __init__(self, message: Message, acts: MessageActs) -> None:
        self.message = message
        self._shown: tuple[object, ...] = ()
        self._article = element("article", "rw-reply", aria_label="Reply")
        with self._article:
            self._body = ui.html("", sanitize=True).classes("rw-prose")
            self._stage = element("div", "rw-stage rw-hidden", role="status")
            with self._stage:
                with element("div", "rw-stage-line"):
                    element("span", "rw-pulse", aria_hidden="true")
                    self._stage_words = text("")
                self._bar = element("div", "rw-bar rw-hidden", role="progressbar", aria_label="Prompt read")
                with self._bar:
                    self._bar_part = element("span")
            self._error = element("div", "rw-trouble rw-hidden", role="alert")
            with self._error:
                self._error_title = text("", tag="strong")
                self._error_words = text("", "rw-trouble-words", tag="div")
                self._safe = text("", "rw-trouble-safe", tag="div")
                word_button("Try again", lambda: acts.again(self.message))
            self._foot = element("div", "rw-foot")
            with self._foot:
                with element("div", "rw-note"):
                    self._meter = element("span", "rw-meter rw-hidden", aria_hidden="true")
                    with self._meter:
                        self._meter_part = element("span")
                    self._note = text("", "rw-note-words")
                with element("div", "rw-acts"):
                    self._versions = _Versions(message, acts)
                    self._copy = act("Copy the reply", "copy")
                    act("Answer again", "again", lambda: acts.again(self.message))

    def refresh(self, chat: Chat, versions: list[Message], stage: str, *, is_made: bool) -> None:
        """Bring the elements up to date; nothing is sent to the browser when nothing changed."""
        message = self.message
        self._versions.refresh(versions)
        part = chat.part if is_made else None
        wanted = (message.content, message.note, message.error, stage, part, is_made, chat.is_busy)
        if wanted == self._shown:
            return
        self._shown = wanted
        self._body.set_content(to_html(message.content))
        self._article.classes(replace="rw-reply rw-writing" if is_made and not stage else "rw-reply")
        self._article.props["aria-busy"] = "true" if is_made else "false"
        toggle(self._foot, "rw-hidden", is_on=is_made)
        toggle(self._foot, "rw-resting", is_on=chat.is_busy)
        self._show_stage(stage, part)
        self._show_error()
        self._show_note(is_made=is_made)

    def _show_stage(self, stage: str, part: float | None) -> None:
        self._stage_words.set_text(stage)
        toggle(self._stage, "rw-hidden", is_on=not stage)
        toggle(self._bar, "rw-hidden", is_on=part is None)
        if part is not None:
            self._bar.props["aria-valuenow"] = f"{part:.0%}".rstrip("%")
            self._bar_part.style(replace=f"width: {part:.1%}")

    def _show_error(self) -> None:
        message = self.message
        self._error_title.set_text("The reply broke off." if message.content else "There is no reply.")
        self._error_words.set_text(message.error)
        self._safe.set_text(_KEPT + ("." if message.content else _LEFT_OUT))
        toggle(self._error, "rw-hidden", is_on=not message.error)

    def _show_note(self, *, is_made: bool) -> None:
        message = self.message
        is_empty = not (is_made or message.content or message.error or message.note)
        self._note.set_text("No reply was made" if is_empty else message.note)
        self._note.props["title"] = message.detail
        if message.share is not None:
            toggle(self._meter, "rw-hidden", is_on=False)
            self._meter_part.style(replace=f"width: {message.share:.1%}")
        self._copy.props["data-copy"] = "" if is_made else message.content
        toggle(self._copy, "rw-hidden", is_on=not message.content)

    def delete(self) -> None:
        """Take the message off the page."""
        self._article.delete()
