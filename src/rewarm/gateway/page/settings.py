"""The Settings page: where the cache is, how large it may grow, when it saves; each change holds at once.

Reads and changes through `CacheAdmin`, on a thread; says under each setting what the change did.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from nicegui import ui

from rewarm.gateway.cache_admin import CacheAdmin
from rewarm.gateway.page import cache_words as words
from rewarm.gateway.page.cache_parts import error_words, set_class, set_text
from rewarm.gateway.page.frame import sheet
from rewarm.gateway.page.parts import element, on_click, text
from rewarm.gateway.page.settings_clear import ClearCard
from rewarm.gateway.page.settings_parts import ChoiceSetting, Said, SwitchSetting, TextSetting, settle
from rewarm.gateway.page.settings_place import PlaceCard
from rewarm.gateway.problems import Problem
from rewarm.units import parse_bytes

REFRESH_S = 1.0

_SAVE_AT = (
    ("turn", "After each reply"),
    ("idle", "When the model is idle"),
    ("unload", "When the model is unloaded"),
)
_AT_START = {"max_bytes": "--max-bytes", "max_files": "--max-files"}
_LOAD = (("worth", "When it is quicker than reading anew"), ("always", "Always"))


def settings_page(admin: CacheAdmin) -> None:
    """Fill the content area of a page, and keep it true from now on."""
    SettingsPage(admin).build()


class SettingsPage:
    """The elements of one page."""

    def __init__(self, admin: CacheAdmin) -> None:
        self._admin = admin
        self._is_paused = False

    def build(self) -> None:
        """Draw the page."""
        with sheet("Settings", "Each change holds at once, in every running model, and stays after a restart."):
            self._notice = text("", "rw-notice rw-bad rw-hidden", tag="div")
            self._notice.props["role"] = "status"
            with element("section", "rw-card rc-pause", aria_label="Caching"):
                with element("div", "rc-pause-words"):
                    self._state = text("", tag="h2")
                    self._state_more = text("", "rw-hint-text", tag="p")
                    self._pause_said = Said()
                self._pause = element("button", "rw-button rw-plain", type="button")
                with self._pause:
                    self._pause_words = text("Pause caching")
                on_click(self._pause, self._turn_caching)
            self._place = PlaceCard(self._admin)
            self._build_limits()
            self._build_saving()
            self._build_forgetting()
            self._build_models()
            self._clear = ClearCard(self._admin)
        ui.timer(REFRESH_S, self._refresh)

    def _build_limits(self) -> None:
        with element("section", "rw-card", aria_label="Limits"):
            text("How large it may grow", tag="h2")
            self._used = text("", "rw-hint-text rc-used", tag="p")
            self._max_bytes = TextSetting(
                "Maximum size",
                "Of everything in the folder. A lower one makes room at once: what was used least goes first.",
                lambda given: self._limit("max_bytes", _size(given)),
            )
            self._max_files = TextSetting(
                "Maximum number of files",
                "One conversation has a file for every 256 tokens, and a few more.",
                lambda given: self._limit("max_files", _count(given)),
            )
            self._min_free = TextSetting(
                "Free space to leave",
                "What must stay free on that disk, whoever fills it.",
                lambda given: self._limit("min_free_bytes", _size(given)),
            )

    def _build_saving(self) -> None:
        with element("section", "rw-card", aria_label="Saving and restoring"):
            text("Saving and restoring", tag="h2")
            self._save_at = ChoiceSetting(
                "When to save",
                "Later means fewer writes; what is not saved when the computer fails is read anew.",
                _SAVE_AT,
                lambda value: self._rule(save_at=value),
            )
            self._load = ChoiceSetting(
                "When to restore",
                "Disk and model are measured as they work.",
                _LOAD,
                lambda value: self._rule(load=value),
            )
            self._min_tokens = TextSetting(
                "Minimum length",
                "In tokens. Shorter conversations are read anew sooner than they are worth keeping.",
                lambda given: self._rule(min_tokens=_count(given or "0")),
                "0",
            )
            self._second_sight = SwitchSetting(
                "Save at second sight",
                "Only what is seen a second time is written: spares the disk prompts that never come back.",
                lambda is_on: self._rule(second_sight=is_on),
            )
            self._thin = SwitchSetting(
                "Thin out restore points",
                "Of models whose state cannot be cut, such as those with windows: the newest stay, older ones go.",
                lambda is_on: self._rule(thin=is_on),
            )
            self._budget = TextSetting(
                "Write at most, a day",
                "Spares an SSD. Empty: no limit.",
                lambda given: self._rule(write_bytes_per_day=_size(given) if given else None),
                "no limit",
            )

    def _build_forgetting(self) -> None:
        with element("section", "rw-card", aria_label="Forgetting"):
            text("Forgetting", tag="h2")
            self._keep_days = TextSetting(
                "Forget after, in days",
                "Conversations that nobody has gone on with for so long, but for pinned ones. Empty: never.",
                lambda given: self._rule(keep_days=_days(given) if given else None),
                "never",
            )

    def _build_models(self) -> None:
        with element("section", "rw-card", aria_label="Models in memory"):
            text("Models in memory", tag="h2")
            self._idle = TextSetting(
                "Unload when idle, after minutes",
                "Frees the memory of a model that nobody asks; what it holds is kept first. Empty: never.",
                self._unload_idle,
                "never",
            )

    # What the user does; on a thread.

    def _unload_idle(self, given: str) -> str:
        self._admin.unload_idle_after(_minutes(given) * 60 if given else None)
        return "Saved."

    def _limit(self, name: str, value: int) -> str:
        removal = self._admin.disk_cache.change({name: value}, {})
        self._admin.entries.changed()
        return f"Saved. {words.removal(removal)} removed." if removal.n_files else "Saved. Nothing had to go."

    def _rule(self, **rules: Any) -> str:
        self._admin.disk_cache.change({}, rules)
        return "Saved."

    async def _turn_caching(self) -> None:
        is_paused = not self._is_paused
        if await settle(self._pause_said, lambda: self._rule(paused=is_paused)):
            self._pause_said.good("")
        await self._refresh()

    def _usage(self) -> str:
        """How much is used now, and which limits do not stay as they are set here."""
        disk = self._admin.disk_cache
        counters = disk.report()["counters"]
        n_files, nbytes = int(counters.get("files_used", 0)), int(counters.get("bytes_used", 0))
        said = f"Used now: {words.size(nbytes)} in {words.files(n_files)}."
        names = [_AT_START[name] for name in disk.limits_at_start if name in _AT_START]
        at_start = f" {' and '.join(names)} at the next start set their limits anew." if names else ""
        return said + at_start

    # Keeping it true.

    async def _refresh(self) -> None:
        try:
            limits, policy = await asyncio.to_thread(self._admin.disk_cache.rules)
        except Exception as error:  # noqa: BLE001 - told on the page, whatever it is
            problem = error.message if isinstance(error, Problem) else error_words(error)
            set_text(self._notice, f"The cache cannot be used now; replies are made without it. {problem}")
            # A move says so at its own place, and is no fault.
            set_class(self._notice, "rw-hidden", is_on=self._admin.relocation.progress.stage.is_going_on)
        else:
            set_class(self._notice, "rw-hidden", is_on=True)
            self._show(msgspec.to_builtins(limits), msgspec.to_builtins(policy))
            set_text(self._used, await asyncio.to_thread(self._usage))
        await self._place.refresh()
        await self._clear.refresh()

    def _show(self, limits: dict[str, Any], policy: dict[str, Any]) -> None:
        self._is_paused = policy["paused"]
        set_text(self._state, "Caching is paused" if self._is_paused else "Caching is on")
        set_text(
            self._state_more,
            "Nothing is read and nothing is written. What is kept stays."
            if self._is_paused
            else "What models have read is kept, and given back when it is asked for again.",
        )
        set_text(self._pause_words, "Resume caching" if self._is_paused else "Pause caching")
        set_class(self._pause, "rw-primary", is_on=self._is_paused)
        self._max_bytes.show(words.size(limits["max_bytes"]))
        self._max_files.show(f"{limits['max_files']:,}")
        self._min_free.show(words.size(limits["min_free_bytes"]))
        self._save_at.show(policy["save_at"])
        self._load.show(policy["load"])
        self._min_tokens.show(f"{policy['min_tokens']:,}")
        self._second_sight.show(policy["second_sight"])
        self._thin.show(policy["thin"])
        budget, keep_days = policy["write_bytes_per_day"], policy["keep_days"]
        self._budget.show("" if budget is None else words.size(budget))
        self._keep_days.show("" if keep_days is None else f"{keep_days:g}")
        idle_s = self._admin.workers.idle_unload_s
        self._idle.show("" if idle_s is None else f"{idle_s / 60:g}")


def _size(given: str) -> int:
    try:
        return parse_bytes(given)
    except ValueError as error:
        raise Problem(400, f"{error}.") from None


def _count(given: str) -> int:
    plain = given.replace(",", "").replace(" ", "").replace("\N{NARROW NO-BREAK SPACE}", "")
    if not plain.isdecimal() or len(plain) > 15:
        raise Problem(400, f"{given!r} is no whole number.")
    return int(plain)


def _days(given: str) -> float:
    return _number(given, "days")


def _minutes(given: str) -> float:
    return _number(given, "minutes")


def _number(given: str, what: str) -> float:
    try:
        value = float(given.replace(",", "."))
    except ValueError:
        raise Problem(400, f"{given!r} is no number of {what}.") from None
    if not 0 < value < 100_000:
        raise Problem(400, f"{what.capitalize()} must be more than 0 and less than 100,000, not {given}.")
    return value
