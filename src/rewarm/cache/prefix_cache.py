"""PrefixCache: the KV states under one root, and `open_cache`, which is `rewarm.open`.

Only wrong calls raise. Whatever goes wrong below is a match or a state of fewer tokens with a reason, or a
save that is dropped and counted. Safe to call from several threads; the writer's thread belongs to the
`PrefixCache`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import platformdirs

from rewarm.cache import stats as counting
from rewarm.cache.arena import Arena
from rewarm.cache.config_file import configured_root, expanded
from rewarm.cache.epochs import PROBE_LABEL, Epochs, Probe
from rewarm.cache.explain import Explanation, explain
from rewarm.cache.gone import Gone
from rewarm.cache.identity import Identity
from rewarm.cache.memory import queue_limit
from rewarm.cache.namespace import Match, Namespace
from rewarm.cache.policy import Policy
from rewarm.cache.reading import ReadPool
from rewarm.cache.saver import Shared
from rewarm.cache.stats import Stats
from rewarm.cache.writer import Writer
from rewarm.errors import IndexFault, SettingsError
from rewarm.store.check import Progress, Report
from rewarm.store.disk import Disk
from rewarm.store.entries import Entry
from rewarm.store.forgotten import Forgotten
from rewarm.store.moving import MARK, tidy_up
from rewarm.store.room import Removal
from rewarm.store.settings import Limits, Settings
from rewarm.store.store import Store

log = logging.getLogger("rewarm.cache")

FLUSH_S = 30.0
"""How long what removes or checks waits for saves that are being written."""


LIST_DEADLINE_S = 10.0
STATS_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What `close` left behind.

    Attributes:
        unwritten: saves that were not written at the deadline.
    """

    unwritten: int


class PrefixCache:
    """The KV states under one root. Made by `rewarm.open`."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self.store = store
        self._stats = Stats()
        self._arena = Arena()
        self._writer = Writer(store, self._stats, queue_limit(), clock, self._arena)
        self._clock = clock
        self._pool = ReadPool()
        self._looks = ReadPool(1, "rewarm-look")
        self._lists = ReadPool(1, "rewarm-list")
        self._gone = Gone(store, self._lists)
        store.gone = self._gone.known
        store.enforce()
        self._closed = False
        self._usage: dict[str, int] = {}
        # At interpreter exit what still waits is written, or said to be lost.
        atexit.register(_close_at_exit, weakref.ref(self))

    @property
    def root(self) -> Path:
        """The cache folder."""
        return self.store.root

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self.store.block_tokens

    def namespace(self, identity: Identity, tenant: bytes | None = None) -> Namespace:
        """The states of one model; nothing is shared between tenants.

        Args:
            identity: of the model; its fingerprint may still be pending.
            tenant: part of every key, never written.
        """
        shared = Shared(self.store, self._stats, self._writer, self._clock, self._pool, self._looks, self._arena)
        return Namespace(shared, identity, tenant or b"")

    def adopt_epoch(self, identity: Identity, probe: Probe) -> Identity:
        """The identity to use for a running engine: an earlier version's, where that computes the same.

        For adapters, when a model has been loaded, on the thread that runs the engine: `probe` is called there, at
        most once, and only when its result is needed. An identity that is not known yet is given back as it is.

        Args:
            identity: with the running version as its field `engine_epoch`.
            probe: evaluates `rewarm.cache.epochs.PROBE_TOKENS` in two chunk plans or more; see there.
        """
        return Epochs(self.store, self.namespace).adopt(identity, probe)

    def flush(self, timeout: float | None = 30.0, *, durable: bool = False) -> bool:
        """Wait until all saves so far are written; with `durable`, pushed to the medium.

        Returns:
            Whether they are, within `timeout` seconds.
        """
        return self._writer.flush(timeout, durable=durable)

    @property
    def queue_free_bytes(self) -> int:
        """Bytes that the queue of saves can still take: what it refused before may be saved again."""
        return self._writer.free_bytes

    def gone(self) -> dict[str, str]:
        """Models that are gone, by fingerprint: `missing` or `replaced`. What is kept of them makes room first."""
        return {fingerprint.hex(): why for fingerprint, why in self._gone.known().items()}

    def cautions(self) -> list[str]:
        """Why nothing can be saved as things are, in sentences: limits that leave no room. Reads the disk."""
        return self.store.cautions()

    def close(self, timeout: float | None = 10.0) -> CloseReport:
        """Write what waits, for at most `timeout` seconds, and give the root back; idempotent."""
        if self._closed:
            return CloseReport(0)
        self._closed = True
        left = self._writer.close(timeout)
        if left:
            log.warning("%d saves were not written before the deadline; what is stored is whole", left)
        for pool in (self._pool, self._looks, self._lists):
            pool.close()
        # A writer that a disk holds up still has the store in its hands: it closes it when it can.
        self._writer.when_ended(self.store.close)
        return CloseReport(left)

    def __enter__(self) -> PrefixCache:
        """The cache itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self.close()

    def entries(self) -> list[Entry]:
        """Named ends of chains, latest match first; the probes of engines are not among them.

        Raises:
            IndexFault: the index cannot be used now, or takes longer than 10 seconds.
        """
        try:
            found = self._lists.within(self.store.entries, LIST_DEADLINE_S)
        except OSError as error:  # a TimeoutError is one
            raise IndexFault(f"the entries cannot be listed now: {error}") from None
        return [entry for entry in found if entry.label != PROBE_LABEL]

    def pin(self, entry: Entry | str) -> bool:
        """Spare an entry's whole path from eviction; whether the entry is there."""
        return self.store.pin(_entry_id(entry), pinned=True)

    def unpin(self, entry: Entry | str) -> bool:
        """Spare an entry no more; whether it is there."""
        return self.store.pin(_entry_id(entry), pinned=False)

    def keep(self, what: Entry | Namespace | str, ttl_s: float | None) -> None:
        """Let an entry, or all entries of a model (namespace or fingerprint), live so long without a match.

        Args:
            what: the entry (or its id), or the namespace (or its fingerprint, hex).
            ttl_s: seconds; None: as the rule `keep_days` says.

        Raises:
            ValueError: nothing can be meant by `what`, or the time is negative.
        """
        if ttl_s is not None and not 0 <= ttl_s < 2**53:
            raise ValueError(f"a time to live is 0 seconds or more, not {ttl_s}")
        if isinstance(what, Namespace):
            what = what.identity.fingerprint or ""
        name = _entry_id(what) if isinstance(what, Entry) or len(what) == 32 else _hex(what, 32, "a fingerprint")
        self.store.keep(name, ttl_s)

    def forget(self, *entries: Entry | str, dry_run: bool = False) -> Removal:
        """Erase entries and every record that only they need; what waits to be written is written first.

        Several go at once: what they share and nobody else needs goes too, and counts once.
        """
        ids = [_entry_id(each) for each in entries]
        self._writer.flush(FLUSH_S, held=False)
        try:
            return self.store.forget(*ids, dry_run=dry_run)
        finally:
            self._writer.flush(FLUSH_S, held=False)  # every process of ours has taken note then

    def on_forget(self, callback: Callable[[Forgotten], None]) -> None:
        """Have `callback(forgotten)` called when a conversation is forgotten, by whichever process: see `holds_any`."""
        self._writer.on_forget(callback)

    def clear(self, namespace: Namespace | str | None = None, *, dry_run: bool = False) -> Removal:
        """Erase all records, pinned ones too: of one namespace (or fingerprint, hex), or of all."""
        self._writer.flush(FLUSH_S, held=False)
        if isinstance(namespace, Namespace):
            namespace = namespace.identity.fingerprint
            if namespace is None:
                return Removal()
        try:
            return self.store.clear(_fingerprint(namespace), dry_run=dry_run)
        finally:
            self._writer.flush(FLUSH_S, held=False)  # every process of ours has taken note then

    def touch(self, match: Match) -> None:
        """Note that a prefix was used, though the engine's own memory served it."""
        if match.n_tokens:
            self._writer.note(match.plan.path)

    def count_saved(self, seconds: float) -> None:
        """Add to the time that restoring has saved, in seconds: estimated by whoever saw the prefill."""
        self._stats.add_if("saved_ms", max(0, round(seconds * 1000)))

    def note_prefill(self, identity: Identity, n_tokens: int, took_s: float) -> None:
        """Note that a model evaluated so many prompt tokens in so many seconds; kept over restarts."""
        if identity.fingerprint and n_tokens > 0 and took_s > 0:
            name = identity.fingerprint[:16]
            self._stats.add(f"prefill_tokens:{name}", n_tokens)
            self._stats.add_if(f"prefill_us:{name}", round(1e6 * took_s))

    def prefill_s(self, identity: Identity, n_tokens: int) -> float | None:
        """Seconds that a model takes to evaluate so many prompt tokens, by all that was noted; None before that."""
        name = (identity.fingerprint or "")[:16]
        with contextlib.suppress(IndexFault, OSError):
            self._usage = self._lists.within(self.store.usage, STATS_DEADLINE_S)
        pending = self._stats.peek()
        seen, took = (
            self._usage.get(f"{what}:{name}", 0) + pending.get(f"{what}:{name}", 0)
            for what in ("prefill_tokens", "prefill_us")
        )
        return took / 1e6 / seen * n_tokens if seen and took else None

    def set_limits(self, limits: Limits) -> Removal:
        """Change the limits that are given; evicts at once, and says what."""
        return self.store.set_limits(limits)

    def set_policy(self, policy: Policy) -> None:
        """Change the switchable rules; every process sees them within a second or at its next save.

        Raises:
            ValueError: a value makes no sense.
        """
        policy.check()
        self.store.set_policy(msgspec.to_builtins(policy))

    def policy(self) -> Policy:
        """The switchable rules in force, as of a second ago at most; waits for no disk."""
        return self._writer.policy()

    @property
    def restore_is_possible(self) -> bool:
        """Whether the disk answers: false while it holds every reading thread up."""
        return not self._pool.is_held_up

    def settings(self) -> Settings:
        """What `store.json` says now: limits, block size, policy, pins.

        Raises:
            SettingsError: it cannot be read, or not within 10 seconds.
        """
        try:
            return self._lists.within(self.store.settings, LIST_DEADLINE_S)
        except OSError as error:
            raise SettingsError(f"The settings in {self.root} cannot be read now: {error}") from None

    def stats(self) -> dict[str, int | dict[str, int]]:
        """All counters by name; `misses` and `dropped_saves` by reason.

        Where the index cannot be used now, what is stored there is as it was when it last could.
        """
        with contextlib.suppress(IndexFault, OSError):
            self._usage = self._lists.within(self.store.usage, STATS_DEADLINE_S)
        usage = self._usage
        found = counting.report(usage, self._stats.peek(), self._writer.queue_bytes)
        if usage.get("day") != int(self._clock() // 86_400):
            found["bytes_written_today"] = 0
        return found

    def explain(self, tokens: Iterable[int], identity: Identity, tenant: bytes | None = None) -> Explanation:
        """What a prompt would find now, and why not more; looks only, and counts as no use.

        Raises:
            ValueError: `tokens` is no sequence of 64-bit signed integers.
        """
        return explain(self.namespace(identity, tenant), tokens)

    def verify(self, progress: Progress | None = None, *, quarantine: bool = False) -> Report:
        """Read every record, beside everything else that goes on.

        Args:
            progress: told records looked at, and records in all.
            quarantine: move what is damaged out of the way; else nothing is changed.
        """
        self._writer.flush(FLUSH_S, held=False)
        return self.store.verify(progress, quarantine=quarantine)

    def repair(self) -> int:
        """Build the index anew from the records; how many it has."""
        self._writer.flush(FLUSH_S, held=False)
        return self.store.repair()


def open_cache(
    path: str | os.PathLike[str] | None = None,
    limits: Limits | None = None,
    policy: Policy | None = None,
    block_tokens: int = 256,
    *,
    disk: Disk | None = None,
    clock: Callable[[], float] = time.time,
) -> PrefixCache:
    """Open a cache folder, made with mode 0700 when it is not there.

    Args:
        path: the folder; by default the user's cache folder (or `REWARM_DIR`).
        limits: of a new root; an existing one keeps its own.
        policy: of a new root.
        block_tokens: tokens per block, of a new root.
        disk: the file operations, for tests.
        clock: seconds since 1970, for tests.

    Raises:
        ValueError: an argument makes no sense.
        RootError: the folder cannot be used; says why and what to do.
    """
    root = Path(path) if path is not None else default_root()
    if policy is not None:
        policy.check()
    rules = msgspec.to_builtins(policy) if policy is not None else None
    store = Store.open(root, limits, rules, block_tokens, disk)
    if (store.root / MARK).exists():  # a move ended before it had removed where the cache was
        threading.Thread(target=tidy_up, args=(store.root, disk), name="rewarm-tidy", daemon=True).start()
    return PrefixCache(store, clock)


def default_root() -> Path:
    """The folder that `REWARM_DIR` names, else `dir` in the configuration file, else `kv` in the user's cache folder.

    Raises:
        ConfigurationError: the configuration file is asked and cannot be read, or there is no home folder.
    """
    named = os.environ.get("REWARM_DIR")
    if named:
        return expanded(named)
    return configured_root() or expanded(Path(platformdirs.user_cache_dir("rewarm")) / "kv")


def _entry_id(entry: Entry | str) -> str:
    found = entry.id if isinstance(entry, Entry) else entry
    return _hex(found, 16, "an entry's id")


def _fingerprint(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(_hex(text, 32, "a fingerprint"))


def _hex(text: str, n_bytes: int, what: str) -> str:
    with contextlib.suppress(ValueError):
        if len(bytes.fromhex(text)) == n_bytes and len(text) == 2 * n_bytes:
            return text.lower()
    raise ValueError(f"{text!r} is not {what}: {2 * n_bytes} hex characters")


def _close_at_exit(cache: weakref.ref[PrefixCache]) -> None:
    found = cache()
    if found is not None:
        found.close()
