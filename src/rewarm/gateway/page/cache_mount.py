"""Puts the Cache and Settings pages on the gateway's app. Knows the frame and both pages."""

from __future__ import annotations

from nicegui import ui

from rewarm.gateway.cache_admin import CacheAdmin
from rewarm.gateway.page.cache import cache_page
from rewarm.gateway.page.frame import ICON, frame
from rewarm.gateway.page.settings import settings_page


def mount_cache_pages(admin: CacheAdmin) -> None:
    """Serve `/cache` and `/settings`; call it before the pages are put on the app."""

    @ui.page("/cache", title="Cache · rewarm", favicon=ICON, language="en-US")
    def cache() -> None:
        with frame("cache", "cache.css"):
            cache_page(admin)

    @ui.page("/settings", title="Settings · rewarm", favicon=ICON, language="en-US")
    def settings() -> None:
        with frame("settings", "cache.css"):
            settings_page(admin)
