"""Keeps an engine running and its cache with it: starts, probes, starts again after a crash, saves at the end.

Owns the engine's process, the raw folder, and two threads: one has idle slots saved, one takes the raw files
apart. Knows nothing of HTTP clients.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

from rewarm.adapters.llama.codec import UnknownLayout
from rewarm.adapters.llama.engine import Engine, EngineGone, Program, Refused
from rewarm.adapters.llama.flags import Flags, what_defeats
from rewarm.adapters.llama.identity import Before, Resolved
from rewarm.adapters.llama.prompts import Prompts
from rewarm.adapters.llama.raw_folder import RawFolder
from rewarm.adapters.llama.seam import Stored, Tier
from rewarm.adapters.llama.slot_files import NoRoom, SlotFiles
from rewarm.adapters.llama.slots import SlotPool
from rewarm.cache.model_files import NoIdentity
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.errors import EngineError
from rewarm.state.reason import Reason
from rewarm.store.forgotten import Forgotten

log = logging.getLogger(__name__)

_IDENTITY_WAIT_S = 5.0
"""At the start, before any request: how long to wait for the weights' hash."""

_PAUSE_WAIT_S = 2.0
_LAST_REPLIES_S = 1.5
_RETRY_S = 5.0
_PROBE_TOKENS = [1, 2]
"""Any two: every vocabulary has them."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a slot file of two tokens tells.

    Attributes:
        cut_anywhere: whether the model's states may be cut at any token.
        flash_attention: "on" or "off"; "" where it does not tell.
    """

    cut_anywhere: bool
    flash_attention: str


class Runner:
    """One engine and its cache. Safe to use from several threads.

    Args:
        program: what to run.
        flags: the user's.
        cache: the prefix cache, or None.
        why_not: why there is none.
        raw: the folder for slot files, or None without a cache.

    Attributes:
        prompts: reads requests with the engine's own template and tokenizer.
        failure: why the engine could not be started at the last attempt; "" when it could.
    """

    def __init__(
        self,
        program: Program,
        flags: Flags,
        cache: PrefixCache | None,
        why_not: tuple[Reason, str],
        raw: RawFolder | None,
    ) -> None:
        self.failure = ""
        self.flags = flags
        self._program = program
        self._cache, self._raw = cache, raw
        self._why_not = why_not if cache is None else _why_not(program, flags)
        self._caches = cache is not None and raw is not None and not self._why_not[1]
        self.engine = Engine(program, flags, raw.path if raw is not None and self._caches else None)
        self.prompts = Prompts(self.engine)
        self._retry_at = 0.0
        self._tier: Tier | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._threads: list[threading.Thread] = []
        if self._why_not[1]:
            log.warning("rewarm: %s", self._why_not[1])
        if cache is not None and self._caches:
            cache.on_forget(self._forget)

    @property
    def caches(self) -> bool:
        """Whether slots are ours to save: the client's own slot actions are refused then."""
        return self._caches

    @property
    def is_ready(self) -> bool:
        """Whether a request can be served at once."""
        return self._tier is not None and self.engine.is_alive

    def ensure(self) -> Tier:
        """The cache of a running engine; starts one where none runs, and waits for it.

        Raises:
            EngineError: it cannot be started.
        """
        tier = self._tier
        if tier is not None and self.engine.is_alive:
            return tier
        with self._lock:
            if self._tier is not None and self.engine.is_alive:
                return self._tier
            if self._tier is not None:
                log.warning("rewarm: the engine has ended; a fresh one is started")
                self._tier.unread.put(None)
            self._tier = None
            try:
                before, why_not = self._look()
                self.engine.start()
                tier = self._open(before, why_not)
            except (EngineError, EngineGone, Refused) as error:
                self.failure, self._retry_at = str(error), time.monotonic() + _RETRY_S
                raise EngineError(self.failure) from error
            self.failure, self._tier = "", tier
        if tier.is_cached:
            self._work(tier)
        return tier

    def ensure_soon(self) -> None:
        """As `ensure`, in the background; not at once again after a failure."""
        if not self._lock.locked() and not self._closed and time.monotonic() >= self._retry_at:
            threading.Thread(target=self._try_ensure, name="rewarm-start", daemon=True).start()

    def served(self) -> None:
        """A request has ended: its slot may be saved."""
        self._wake.set()

    def close(self, deadline: float) -> None:
        """Have what idle slots hold saved, and hand it to the cache; until `deadline` (monotonic) at most."""
        self._closed = True
        self._wake.set()
        tier = self._tier
        if tier is not None and tier.is_cached:
            saving = threading.Thread(target=self._save_all, args=(tier, deadline), daemon=True)
            saving.start()
            saving.join(max(0.0, deadline - time.monotonic()))
        if tier is not None:
            tier.unread.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """End the engine; nothing is served or saved any more."""
        self.engine.stop()
        if self._raw is not None:
            self._raw.close()

    def _save_all(self, tier: Tier, deadline: float) -> None:
        """At the end: give replies that are just ending a moment, then have the rest saved."""
        tier.pool.wait_for_pause(min(_LAST_REPLIES_S, max(0.0, deadline - time.monotonic())))
        tier.save_idle()
        # The saver's thread may be in the middle of one.
        tier.pool.wait_for_saves(max(0.0, deadline - time.monotonic()))

    def _try_ensure(self) -> None:
        try:
            self.ensure()
        except EngineError as error:
            log.error("rewarm: %s", error)

    def _look(self) -> tuple[Before | None, tuple[Reason, str]]:
        if not self._caches:
            return None, self._why_not
        try:
            return Before(self.flags), (Reason.HIT, "")
        except (OSError, ValueError, NoIdentity) as error:
            return None, (Reason.UNAVAILABLE, f"The model's files cannot be identified: {error}")

    def _open(self, before: Before | None, why_not: tuple[Reason, str]) -> Tier:
        props = self.engine.ask("GET", "/props")
        pool = SlotPool(max(1, int(props.get("total_slots", 1))))
        if before is None or self._cache is None or self._raw is None:
            return Tier(self.engine, pool, None, why_not)
        files = SlotFiles(self.engine, self._raw, before.facts.n_swa)
        try:
            probed = self._probe(files)
        except (Refused, NoRoom, OSError, KeyError) as error:
            if isinstance(error, EngineGone):
                raise
            why = f"This server cannot save its slots, so requests are served uncached: {error or 'no room'}"
            log.warning("rewarm: %s", why)
            return Tier(self.engine, pool, None, (Reason.DISABLED, why))
        pool.cut_anywhere = probed.cut_anywhere
        n_ctx = int(props.get("default_generation_settings", {}).get("n_ctx", 0)) or before.facts.n_ctx_train
        resolved = Resolved(self._build(props), probed.flash_attention, n_ctx)
        identity = before.identity(resolved)
        if not before.unchanged():
            return Tier(
                self.engine, pool, None, (Reason.UNAVAILABLE, "The model's files changed while they were being loaded.")
            )
        identity.wait(_IDENTITY_WAIT_S)
        space = self._cache.namespace(identity)
        stored = Stored(self._cache, space, identity, before, files, probed.cut_anywhere, n_ctx)
        return Tier(self.engine, pool, stored)

    def _build(self, props: dict[str, Any]) -> str:
        return self._program.version or f"llama-server {props.get('build_info', '')}"

    def _probe(self, files: SlotFiles) -> Probed:
        """Have two tokens evaluated and their slot saved, and look at the file."""
        wanted = {"prompt": _PROBE_TOKENS, "n_predict": 1, "id_slot": 0, "cache_prompt": False}
        self.engine.ask("POST", "/completion", wanted)
        raw = files.save(0, len(_PROBE_TOKENS))
        try:
            found, states = files.look(raw)
        except UnknownLayout as error:
            log.warning("rewarm: slot files of this model are kept whole, usable at their own length only: %s", error)
            return Probed(cut_anywhere=False, flash_attention="")
        finally:
            files.erase(0)
        base = found.memory.base
        stream = next((s for s in base.streams if s is not None), None) if base is not None else None
        attention = "" if stream is None or not stream.values else ("off" if stream.v_trans else "on")
        return Probed(states.state.layout().rows_only, attention)

    def _work(self, tier: Tier) -> None:
        """Start the threads that save and read for `tier`; those of an earlier one end by themselves."""
        saver = threading.Thread(target=self._save_in_pauses, args=(tier,), name="rewarm-saver", daemon=True)
        reader = threading.Thread(target=self._read, args=(tier,), name="rewarm-reader", daemon=True)
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [reader]
        saver.start()
        reader.start()

    def _save_in_pauses(self, tier: Tier) -> None:
        """The saver's thread: right after a reply when no other slot works, else at the next pause."""
        while not self._closed and self._tier is tier:
            self._wake.wait()
            self._wake.clear()
            try:
                tier.erase_forgotten()
            except EngineGone:
                continue
            if self._closed or self._raw is None or not self._raw.in_memory:
                continue
            while tier.pool.dirty() and not self._closed and self.engine.is_alive and self._tier is tier:
                if tier.pool.wait_for_pause(_PAUSE_WAIT_S) and not self._closed and tier.save_idle():
                    time.sleep(_PAUSE_WAIT_S)  # not now: no room, or a request came in between

    def _forget(self, keys: Forgotten) -> None:
        """On the cache's thread: a conversation has been forgotten."""
        tier = self._tier
        if tier is not None:
            tier.forget(keys)
            self._wake.set()

    def _read(self, tier: Tier) -> None:
        """The reader's thread: takes raw files apart, in the order in which they were written."""
        while (unread := tier.unread.get()) is not None:
            try:
                tier.keep(unread)
            except Exception:
                # The last line of defence: a reply that was given is not taken back because it was not kept.
                log.exception("rewarm: a slot was not stored")


def _why_not(program: Program, flags: Flags) -> tuple[Reason, str]:
    why = what_defeats(flags)
    if not why and "--slot-save-path" not in program.flags:
        why = "This llama-server has no --slot-save-path, so its slots cannot be saved; requests are served uncached."
    if not why and not program.version:
        why = "This llama-server does not tell its version, so its states cannot be told apart; served uncached."
    return (Reason.DISABLED, why) if why else (Reason.HIT, "")
