"""Keeps an engine running and its cache with it: starts, probes, starts again after a crash, saves at the end.

Owns the engine's process, the raw folder, and two threads: one has idle slots saved, one takes the raw files
apart. Knows nothing of HTTP clients.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

import rewarm
from rewarm.adapters.llama.engine import Engine, EngineGone, Program, Refused
from rewarm.adapters.llama.flags import Flags, what_defeats
from rewarm.adapters.llama.identity import Before
from rewarm.adapters.llama.probe import Opened, Prober
from rewarm.adapters.llama.prompts import Prompts
from rewarm.adapters.llama.raw_folder import RawFolder
from rewarm.adapters.llama.seam import Tier
from rewarm.adapters.llama.slot_saver import Stored
from rewarm.adapters.llama.turns import Turn
from rewarm.cache.model_files import NoIdentity
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.errors import EngineError
from rewarm.state.reason import Reason
from rewarm.state.sequence import SequenceState
from rewarm.store.forgotten import Forgotten

log = logging.getLogger(__name__)

_PAUSE_WAIT_S = 2.0
_IDLE_S = 2.0
"""For so long no request runs before slots are saved, where the rule `save_at` is `idle`."""

_SWITCH_S = 20.0
"""For what waits to be written, before another cache takes the place of the present one."""

_LAST_REPLIES_S = 1.5
_RETRY_S = 5.0


class Runner:
    """One engine and its cache. Safe to use from several threads.

    Args:
        program: what to run.
        flags: the user's.
        cache: the prefix cache, or None.
        why_not: why there is none.
        raw: the folder for slot files, or None where slots are not ours to save, whatever comes.

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
        self._why_not = why_not
        defeated = _why_not(program, flags)
        if raw is None or defeated[1]:
            self._why_not = defeated if defeated[1] else why_not
        self._caches = raw is not None and not defeated[1]
        self.engine = Engine(program, flags, raw.path if raw is not None and self._caches else None)
        self.prompts = Prompts(self.engine)
        self._prober = Prober(self.engine, program, raw)
        self._retry_at = 0.0
        self._tier: Tier | None = None
        self._opened: Opened | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._running: list[Turn] = []
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
                self._end_reader(self._tier)
            self._tier = self._opened = None
            try:
                before, why_not = self._look()
                self.engine.start()
                self._opened = self._prober.open(before, why_not)
                tier = self._tier_of(self._opened, is_new=True)
            except (EngineError, EngineGone, Refused) as error:
                self.failure, self._retry_at = str(error), time.monotonic() + _RETRY_S
                raise EngineError(self.failure) from error
            self.failure, self._tier = "", tier
            self._work(tier)
        return tier

    def ensure_soon(self) -> None:
        """As `ensure`, in the background; not at once again after a failure."""
        if not self._lock.locked() and not self._closed and time.monotonic() >= self._retry_at:
            threading.Thread(target=self._try_ensure, name="rewarm-start", daemon=True).start()

    def served(self) -> None:
        """A request has ended: its slot may be saved."""
        self._wake.set()

    @contextlib.contextmanager
    def following(self, turn: Turn) -> Iterator[None]:
        """Count a request as running while it is sent."""
        self._running.append(turn)
        try:
            yield
        finally:
            self._running.remove(turn)

    def stats(self) -> dict[str, Any]:
        """The cache's counters, this process' and the engine's memory in bytes, and what runs now."""
        tier, cache = self._tier, self._cache
        pool = None if tier is None else tier.pool
        live = [] if pool is None else [len(slot.live) for slot in pool.all() if len(slot.live)]
        per_token = 0.0 if self._opened is None or self._opened.files is None else self._opened.files.nbytes_per_token
        prefills = [{"done": done, "all": whole} for done, whole in (turn.progress for turn in self._running) if whole]
        return {
            "cache": None if cache is None or tier is None or not tier.is_cached else cache.stats(),
            "memory_bytes": _resident_nbytes(self.engine.pid),
            "engine_memory": {"entries": len(live), "nbytes": int(sum(live) * per_token)},
            "requests": {
                "running": len(self._running),
                "waiting": 0 if pool is None else pool.n_waiting,
                "prefills": prefills,
            },
            **({} if tier is None else tier.stats()),
        }

    def flush(self, timeout_s: float) -> bool:
        """Have what idle slots hold saved and written; whether all of it is, within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        tier, cache = self._tier, self._cache
        if tier is None or tier.saver is None or cache is None:
            return True
        # A client has its reply a moment before the slot is given back.
        tier.pool.wait_for_pause(min(_LAST_REPLIES_S, timeout_s))
        tier.saver.save_idle()
        tier.pool.wait_for_saves(max(0.0, deadline - time.monotonic()))
        while not tier.is_settled and time.monotonic() < deadline:
            time.sleep(0.01)
        written = cache.flush(max(0.0, deadline - time.monotonic()))
        return written and tier.is_settled and not tier.pool.dirty()

    def use_folder(self, folder: str | None) -> dict[str, Any]:
        """Let the cache in a folder take the place of the present one; None: serve uncached.

        Raises:
            OSError, RewarmError: it cannot be opened, or nothing can be cached; all is as it was.
        """
        if folder is None:
            return {"dir": None, "unwritten": self.use(None, (Reason.DISABLED, "The disk cache is switched off."))}
        if not self._caches:
            raise EngineError(self._why_not[1] or "The slots of this server are not rewarm's to save.")
        cache = rewarm.open(Path(folder))
        return {"dir": str(cache.root), "unwritten": self.use(cache, (Reason.HIT, ""))}

    def use(self, cache: PrefixCache | None, why_not: tuple[Reason, str]) -> int:
        """Let another cache take the place of the present one, which is written and closed.

        Args:
            cache: the other one; None to serve uncached.
            why_not: why there is none.

        Returns:
            How many saves of the present one were not written in time.
        """
        with self._lock:
            before, tier = self._cache, self._tier
            if tier is not None and tier.saver is not None:
                self.flush(_SWITCH_S)
                self._end_reader(tier)
            self._cache = cache
            self._why_not = why_not
            if cache is not None:
                cache.on_forget(self._forget)
            if self._opened is not None:
                # Until now others may have used the slots, or other rules held.
                for slot in self._opened.pool.all():
                    slot.tenant = slot.tenant if tier is not None and tier.is_cached and cache is not None else None
                self._tier = self._tier_of(self._opened, is_new=False)
                self._work(self._tier)
        return 0 if before is None else before.close(timeout=_SWITCH_S).unwritten

    def close(self, deadline: float) -> None:
        """Have what idle slots hold saved, and hand it to the cache; until `deadline` (monotonic) at most."""
        self._closed = True
        self._wake.set()
        tier = self._tier
        if tier is not None and tier.is_cached:
            saving = threading.Thread(target=self._save_all, args=(tier, deadline), daemon=True)
            saving.start()
            saving.join(max(0.0, deadline - time.monotonic()))
        if tier is not None and tier.saver is not None:
            tier.saver.unread.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if tier is not None:
            self._end_reader(tier)

    def close_cache(self, timeout_s: float) -> None:
        """Write what waits, and close the cache that is in use."""
        if self._cache is not None:
            self._cache.close(timeout=timeout_s)

    def end(self) -> None:
        """End the engine; nothing is served or saved any more."""
        self.engine.stop()
        if self._raw is not None:
            self._raw.close()

    def _save_all(self, tier: Tier, deadline: float) -> None:
        """At the end: give replies that are just ending a moment, then have the rest saved."""
        tier.pool.wait_for_pause(min(_LAST_REPLIES_S, max(0.0, deadline - time.monotonic())))
        if tier.saver is not None:
            tier.saver.save_idle()
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

    def _tier_of(self, opened: Opened, *, is_new: bool) -> Tier:
        """The engine with the cache that is in use; one that is new may be asked to evaluate something first."""
        if opened.files is None or opened.before is None or opened.identity is None:
            return Tier(self.engine, opened.pool, None, opened.why_not)
        if self._cache is None:
            return Tier(self.engine, opened.pool, None, self._why_not)
        files = opened.files

        def probe() -> list[SequenceState]:
            if not is_new:
                raise EngineError("slots are in use; what another version of llama.cpp has stored is not looked for")
            return self._prober.states(files)

        identity = self._cache.adopt_epoch(opened.identity, probe)
        stored = Stored(self._cache, identity, opened.before, files, opened.cut_anywhere, opened.n_ctx)
        return Tier(self.engine, opened.pool, stored)

    def _work(self, tier: Tier) -> None:
        """Start the threads that save and read for `tier`; those of an earlier one end by themselves."""
        if tier.saver is None:
            return
        saver = threading.Thread(target=self._save_in_pauses, args=(tier,), name="rewarm-saver", daemon=True)
        reader = threading.Thread(target=self._read, args=(tier,), name="rewarm-reader", daemon=True)
        saver.start()
        reader.start()
        # Not before: whoever closes meanwhile joins what stands here.
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [reader]

    def _end_reader(self, tier: Tier) -> None:
        if tier.saver is not None:
            tier.saver.is_closing.set()
            tier.saver.unread.put(None)

    def _save_in_pauses(self, tier: Tier) -> None:
        """The saver's thread: right after a reply when no other slot works, else at the next pause."""
        while not self._closed and self._tier is tier and tier.saver is not None:
            self._wake.wait(_PAUSE_WAIT_S * 4)
            self._wake.clear()
            if not self.engine.is_alive:
                continue
            try:
                tier.erase_tainted()
            except EngineGone:
                continue
            while tier.pool.dirty() and self._may_save(tier):
                if tier.pool.wait_for_pause(_PAUSE_WAIT_S) and self._may_save(tier) and tier.saver.save_idle():
                    time.sleep(_PAUSE_WAIT_S)  # not now: no room, or a request came in between

    def _may_save(self, tier: Tier) -> bool:
        """Whether idle slots are to be saved now, and not only when they are handed over and at the end."""
        cache, raw = self._cache, self._raw
        if self._closed or self._tier is not tier or not self.engine.is_alive or cache is None or raw is None:
            return False
        policy = cache.policy()
        if not raw.in_memory or policy.paused or policy.save_at == "unload":
            return False
        if policy.save_at == "idle":
            used = tier.pool.last_release
            time.sleep(_IDLE_S)
            return tier.pool.n_held == 0 and tier.pool.last_release == used
        return True

    def _forget(self, keys: Forgotten) -> None:
        """On the cache's thread: a conversation has been forgotten."""
        tier = self._tier
        if tier is not None:
            tier.forget(keys)
            self._wake.set()

    def _read(self, tier: Tier) -> None:
        """The reader's thread: takes raw files apart, in the order in which they were written."""
        saver = tier.saver
        while saver is not None and (unread := saver.unread.get()) is not None:
            try:
                saver.keep(unread)
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


def _resident_nbytes(engine_pid: int | None) -> int:
    """The memory of this process and of the engine's, its children included."""
    total = psutil.Process().memory_info().rss
    if engine_pid is not None:
        with contextlib.suppress(psutil.Error):
            engine = psutil.Process(engine_pid)
            total += sum(process.memory_info().rss for process in (engine, *engine.children(recursive=True)))
    return int(total)
