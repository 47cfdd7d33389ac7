"""Puts the chat and the Models page on the gateway's app. Knows the app as something that routes can be put on."""

from __future__ import annotations

import time
from pathlib import Path

from fastapi import FastAPI
from nicegui import ui

from rewarm.gateway.page.chat import ChatPage
from rewarm.gateway.page.engine import Models
from rewarm.gateway.page.frame import ICON, frame
from rewarm.gateway.page.history import History
from rewarm.gateway.page.models import ModelsPage
from rewarm.gateway.page.turns import Chats


def mount_pages(app: FastAPI, models: Models, folder: Path) -> Chats:
    """Serve the chat at `/` of `app`, and the models at `/models`; call it after the app's own routes are there.

    Args:
        app: everything else that is not found in it is answered by NiceGUI.
        models: what answers.
        folder: where the conversations are kept.

    Returns:
        The conversations; to be closed while the models can still be told to stop.
    """
    chats = Chats(models, History(folder, time.time))

    @ui.page("/", title="rewarm", favicon=ICON, language="en-US")
    def chat_page(chat: str = "") -> None:
        with frame("chat", "chat.css", "chat.js"):
            ChatPage(models, chats, chat).build()

    @ui.page("/models", title="Models · rewarm", favicon=ICON, language="en-US")
    def models_page() -> None:
        with frame("models", "models.css"):
            ModelsPage(models).build()

    ui.run_with(app, title="rewarm", favicon=ICON, dark=None, tailwind=False, show_welcome_message=False)
    return chats
