"""Asks before a conversation is deleted, and whether what the cache keeps of it is erased too. Knows `Chats`."""

from __future__ import annotations

from collections.abc import Callable

from rewarm.gateway.page.engine import Kept, Trouble
from rewarm.gateway.page.parts import close_dialog, element, show_dialog, text, toggle, word_button
from rewarm.gateway.page.turns import Chat, Chats
from rewarm.units import format_bytes


class DeleteDialog:
    """One question, asked of any conversation.

    Args:
        chats: where it is deleted.
        deleted: called with the one that is gone.
    """

    def __init__(self, chats: Chats, deleted: Callable[[Chat], None]) -> None:
        self._chats = chats
        self._deleted = deleted
        self._chat: Chat | None = None
        self._is_erased = True
        self._dialog = element("dialog", "rw-dialog", aria_label="Delete this conversation?")
        with self._dialog:
            self._title = text("", tag="h2")
            self._words = text("", tag="p")
            self._choice = element("label", "rw-check")
            with self._choice:
                self._box = element("input", type="checkbox")
                self._box.props["checked"] = True
                self._box.on("change", self._choose, js_handler="(e) => emit(e.target.checked)")
                with element("span"):
                    text("Also erase what the cache keeps of it alone", tag="div")
                    self._size = text("", "rw-hint-text", tag="div")
            self._trouble = text("", "rw-notice rw-bad rw-hidden", tag="div")
            self._trouble.props["role"] = "alert"
            with element("div", "rw-row rw-row-end"):
                word_button("Cancel", lambda: close_dialog(self._dialog))
                word_button("Delete", self._delete, "rw-danger-button")

    async def ask(self, chat: Chat) -> None:
        """Ask; what is kept is counted first."""
        self._chat = chat
        self._title.set_text(f"Delete “{chat.conversation.title}”?")
        toggle(self._trouble, "rw-hidden", is_on=True)
        try:
            kept, words = await self._chats.kept(chat), "It is taken from this list for good."
        except Trouble as trouble:
            kept, words = Kept(0, 0, 0), f"What the cache keeps of it stays: {trouble}"
        self._words.set_text("It was never kept on disk." if chat.is_private else words)
        self._is_erased = kept.n_entries > 0
        self._box.props["checked"] = self._is_erased
        self._box.update()
        toggle(self._choice, "rw-hidden", is_on=not self._is_erased)
        least = "at least " if kept.n_entries > 1 else ""
        self._size.set_text(
            f"Frees {least}{format_bytes(kept.nbytes)} in {kept.n_files:,} {'file' if kept.n_files == 1 else 'files'}. "
            "What other conversations share with it stays."
        )
        show_dialog(self._dialog)

    def _choose(self, event: object) -> None:
        self._is_erased = bool(getattr(event, "args", False))

    async def _delete(self) -> None:
        chat = self._chat
        if chat is None:
            return
        try:
            await self._chats.delete(chat, erase=self._is_erased)
        except (OSError, Trouble) as error:
            why = error.strerror or error if isinstance(error, OSError) else error
            self._trouble.set_text(f"It was not deleted: {why}")
            toggle(self._trouble, "rw-hidden", is_on=False)
            return
        close_dialog(self._dialog)
        self._deleted(chat)
