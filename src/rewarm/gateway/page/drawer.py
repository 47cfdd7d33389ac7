"""The list of conversations beside the chat. Knows `Chats`; what opening one means is the page's business."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rewarm.gateway.page.parts import button, element, on_click, text
from rewarm.gateway.page.turns import Chat, Chats


class Drawer:
    """Beside the page where there is room, over it on a phone.

    Args:
        chats: what is listed.
        open_chat: called with the chat that the user chose.
        new_chat: called when the user wants a new one.
        delete: called with the chat that the user deletes.
    """

    def __init__(
        self,
        chats: Chats,
        open_chat: Callable[[Chat], None],
        new_chat: Callable[[], None],
        delete: Callable[[Chat], Awaitable[None]],
    ) -> None:
        self._chats = chats
        self._open_chat = open_chat
        self._delete = delete
        self._shown: list[tuple[str, str, bool]] = []
        self._asking: str | None = None
        self._current: Chat | None = None
        on_click(element("div", "rw-scrim", aria_hidden="true"), script="window.rewarm.closeDrawer()")
        with element("nav", "rw-drawer", aria_label="Conversations"):
            with element("div", "rw-brand"):
                text("rewarm", "rw-wordmark")
            on_click(button("plus", "New chat", "rw-new", "New chat"), new_chat)
            self._list = element("ul", "rw-list")

    def refresh(self, current: Chat) -> None:
        """Draw the list again if it changed."""
        self._current = current
        wanted = [(chat.conversation.id, chat.conversation.title, chat is current) for chat in self._chats.all()]
        if wanted != self._shown:
            self._shown = wanted
            self._draw()

    def _draw(self) -> None:
        self._list.clear()
        with self._list:
            for chat in self._chats.all():
                self._draw_one(chat)
            if not self._shown:
                text("No conversations yet", "rw-none", tag="li")

    def _draw_one(self, chat: Chat) -> None:
        is_current = chat is self._current
        with element("li", "rw-item rw-current" if is_current else "rw-item"):
            if self._asking == chat.conversation.id:
                self._draw_question(chat)
                return
            title = element("button", "rw-title", type="button", title=chat.conversation.title)
            if is_current:
                title.props["aria-current"] = "page"
            with title:
                text(chat.conversation.title)
            on_click(title, lambda: self._open_chat(chat))
            on_click(button("trash", f"Delete “{chat.conversation.title}”", "rw-delete"), lambda: self._ask(chat))

    def _draw_question(self, chat: Chat) -> None:
        text("Delete it?", "rw-question")
        yes = element("button", "rw-small rw-danger", type="button")
        with yes:
            text("Delete")
        on_click(yes, lambda: self._confirmed(chat))
        no = element("button", "rw-small", type="button")
        with no:
            text("Keep")
        on_click(no, lambda: self._ask(None))

    def _ask(self, chat: Chat | None) -> None:
        self._asking = chat.conversation.id if chat else None
        self._draw()

    async def _confirmed(self, chat: Chat) -> None:
        self._asking = None
        await self._delete(chat)
        self._shown = []
        if self._current is not None:
            self.refresh(self._current)
