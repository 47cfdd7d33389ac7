"""Puts the chat page on the gateway's app. Knows the app as something that routes can be put on."""

from __future__ import annotations

import time
from pathlib import Path

from fastapi import FastAPI
from nicegui import ui

from rewarm.gateway.page.chat import ChatPage
from rewarm.gateway.page.engine import Models
from rewarm.gateway.page.history import History
from rewarm.gateway.page.turns import Chats

_HERE = Path(__file__).parent
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E"
    "%3Crect width='32' height='32' rx='8' fill='%230f766e'/%3E"
    "%3Cpath d='M9 21a7 7 0 1 0 2-9.5M9 8v5h5' fill='none' stroke='white' stroke-width='2.6' "
    "stroke-linecap='round' stroke-linejoin='round'/%3E%3C/svg%3E"
)


def mount_pages(app: FastAPI, models: Models, folder: Path) -> Chats:
    """Serve the chat page at `/` of `app`; call it after the app's own routes are there.

    Args:
        app: everything else that is not found in it is answered by NiceGUI.
        models: what answers.
        folder: where the conversations are kept.

    Returns:
        The conversations; to be closed while the models can still be told to stop.
    """
    chats = Chats(models, History(folder, time.time))
    style, script = (_HERE / "style.css").read_text(), (_HERE / "page.js").read_text()

    @ui.page("/", title="rewarm", favicon=_ICON, language="en-US")
    def chat_page() -> None:
        ui.add_head_html(f"<style>{style}</style><script>{script}</script>")
        ChatPage(models, chats).build()

    ui.run_with(app, title="rewarm", favicon=_ICON, dark=None, tailwind=False, show_welcome_message=False)
    return chats
