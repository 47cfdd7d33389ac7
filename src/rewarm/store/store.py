"""Store: one root on one disk. Opens it, answers look-ups, reads and writes records, keeps the limits.

It refuses nothing on policy grounds and knows no engine. Reading goes over one connection and writing
over another; the methods that write or remove hold one lock, so that a process does one such thing at a
time. Safe to call from several threads.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rewarm.errors import DamagedRecord, IndexFault, RootError, SettingsError
from rewarm.format.layouts import decode_layout
from rewarm.format.record import Header
from rewarm.state.chain import Key
from rewarm.state.layout import Layout
from rewarm.state.plan import Child
from rewarm.state.reason import Reason
from rewarm.state.sequence import Array
from rewarm.store import check
from rewarm.store.commit import Committer
from rewarm.store.disk import Disk
from rewarm.store.entries import Entries, Entry
from rewarm.store.files import Files, RecordName
from rewarm.store.index import Index, Row
from rewarm.store.lock import ProcessLock
from rewarm.store.recovery import Recovery
from rewarm.store.removal import Remover
from rewarm.store.room import Removal, Room
from rewarm.store.saves import Outcome, Save
from rewarm.store.settings import FORMAT, Limits, Settings, default_limits

log = logging.getLogger("rewarm.store")

BUSY_TIMEOUT_S = 10.0
MAX_BLOCK_TOKENS = 2**20


class Source:
    """The index as the planner sees it, without records that this process has found to be bad."""

    def __init__(self, index: Index, bad: dict[Key, Reason]) -> None:
        self._index = index
        self._bad = bad

    def n_present(self, blocks: Sequence[Key]) -> int:
        """How many of `blocks` are there, from the first one on without a gap."""
        n = self._index.n_present(blocks)
        return next((i for i in range(n) if blocks[i] in self._bad), n)

    def record(self, key: Key) -> Child | None:
        """The record named `key`."""
        return None if key in self._bad else self._index.child(key)

    def before(self, parent: Key, tokens: bytes, *, points_only: bool) -> Child | None:
        """The last record under `parent` at or before `tokens`."""
        found = self._good(self._index.before(parent, tokens, is_point=True))
        if points_only:
            return found
        block = self._good(self._index.before(parent, tokens, is_point=False))
        return max((c for c in (found, block) if c), key=lambda c: c.tokens, default=None)

    def behind(self, parent: Key, tokens: bytes) -> Child | None:
        """The first record under `parent` at or behind `tokens`."""
        pair = [self._good(self._index.behind(parent, tokens, is_point=point)) for point in (True, False)]
        return min((c for c in pair if c), key=lambda c: c.tokens, default=None)

    def _good(self, child: Child | None) -> Child | None:
        return None if child is None or child.key in self._bad else child

    def gone(self, keys: Sequence[Key]) -> Reason | None:
        """Why one of `keys` is no longer there, as far as that is known."""
        for key in keys:
            if key in self._bad:
                return self._bad[key]
        return Reason.EVICTED if self._index.among_evicted(keys) else None


class Store:
    """An open root.

    Attributes:
        root: the folder.
        block_tokens: tokens per block.
        rebuilt: whether opening had to build the index anew.
        n_attached: how often the folder was opened: once, and each time that it was changed from outside.
    """

    def __init__(self, root: Path, settings: Settings, disk: Disk) -> None:
        self.root = root
        self.block_tokens = settings.block_tokens
        self.rebuilt = False
        self._disk = disk
        self._writing = threading.RLock()
        self._bad: dict[Key, Reason] = {}
        self._closed = False
        self.n_attached = 0
        self._attach(settings)

    def _attach(self, settings: Settings) -> None:
        """Take the process' lock, open the index, finish what others left."""
        self._device = self.root.stat().st_dev
        self._settings = settings
        self._pid_lock = ProcessLock(self.root / "tmp")
        self._files = Files(self.root, self._pid_lock.process, self._disk)
        try:
            self._connect(settings)
        except BaseException:
            self._pid_lock.release()
            raise
        self._index_file = _file_id(self.root / "index.db")
        self.n_attached += 1

    def look_after(self) -> None:
        """When the folder or its index was replaced or removed since it was opened, open it anew.

        A folder that was deleted is made again with the settings that it had, but never in another place than
        the disk that it was on: an unplugged drive leaves a folder of its name on the system's disk, or none.

        Raises:
            IndexFault: the folder is not there now.
        """
        with self._writing:
            if self._closed or _file_id(self.root / "index.db") == self._index_file:
                return
            if not self._is_in_place():
                raise IndexFault(f"the cache folder {self.root} is not there now")
            log.warning("%s was changed from outside; it is opened anew", self.root)
            try:
                self._disk.make_folder(self.root)
                self._disk.make_folder(self.root / "tmp")
                settings = _settle_settings(self.root, self._settings, self._disk)
                for index in (self._reader, self._index):
                    with contextlib.suppress(IndexFault):
                        index.close()
                self._pid_lock.release()
                self._bad.clear()
                self._attach(settings)
            except (OSError, RootError) as error:
                raise IndexFault(f"the cache folder {self.root} cannot be opened anew: {error}") from None

    def _is_in_place(self) -> bool:
        """Whether the folder, or the one above it, is on the disk that it was opened on."""
        for folder in (self.root, self.root.parent):
            with contextlib.suppress(OSError):
                return folder.stat().st_dev == self._device
        return False

    def _connect(self, settings: Settings) -> None:
        path = self.root / "index.db"
        try:
            self._open_index(path)
        except IndexFault as fault:
            if not fault.broken:
                raise RootError(f"{path}: {fault}. Nothing was changed; try again, or use another folder.") from None
            log.warning("%s is broken (%s): it is built anew from the records", path, fault)
            for name in ("index.db", "index.db-wal", "index.db-shm"):
                (self.root / name).unlink(missing_ok=True)
            self._open_index(path)
        self._recovery.bury()
        with self._index.transaction():
            self._index.note_forgets(self._pid_lock.process, self._index.n_forgets())
            self._index.settle_forgets()
        if not self._index.is_built():
            n = check.rebuild(self._recovery, self._remover, settings.pins)
            self.rebuilt = n > 0
            if n:
                log.warning("the index was built anew from %d records; recency, hits and counters begin again", n)

    def _open_index(self, path: Path) -> None:
        self._index = Index(path, BUSY_TIMEOUT_S)
        try:
            path.chmod(0o600)
            entries = Entries(self._index)
            room = Room(self._index, self._files, entries)
            self._entries = entries
            self._recovery = Recovery(self._index, self._files, entries, self._pid_lock)
            self._remover = Remover(room, self._recovery, self._pid_lock)
            self._committer = Committer(room, self._recovery, self._remover, self._pid_lock)
            self._reader = Index(path, 0.5)
            self._index.totals()
        except IndexFault:
            self._index.close()
            raise

    @classmethod
    def open(
        cls,
        root: Path,
        limits: Limits | None = None,
        policy: dict[str, Any] | None = None,
        block_tokens: int = 256,
        disk: Disk | None = None,
    ) -> Store:
        """Open a root, made with mode 0700 when it is not there. All but `root` are for a new root.

        Raises:
            ValueError: an argument makes no sense.
            SettingsError: `store.json` cannot be read.
            RootError: the folder cannot be used.
        """
        if not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
            raise ValueError(f"block_tokens must be between 1 and {MAX_BLOCK_TOKENS}, not {block_tokens}")
        if limits is not None:
            limits.check()
        root = root.absolute()
        disk = disk or Disk()
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            disk.make_folder(root / "tmp")
            wanted = Settings(format=FORMAT, block_tokens=block_tokens, limits=limits or Limits(), policy=policy or {})
            settings = _settle_settings(root, wanted, disk)
            return cls(root, settings, disk)
        except SettingsError:
            raise
        except OSError as error:
            raise RootError(
                f"The cache folder {root} cannot be used: {error.strerror or error}. Nothing was changed. "
                "Check that it can be written and that its disk is there, or choose another folder."
            ) from error
        except IndexFault as fault:
            raise RootError(f"The index in {root} cannot be used: {fault}. The records are untouched.") from None

    def close(self) -> None:
        """Close the root; idempotent."""
        with self._writing:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(IndexFault), self._index.transaction():
                self._index.remove_process(self._pid_lock.process)
                self._index.settle_forgets()
            for index in (self._reader, self._index):
                with contextlib.suppress(IndexFault):
                    index.close()
            self._pid_lock.release()

    # Looking up and reading.

    @contextlib.contextmanager
    def looking(self, deadline_s: float, without: Mapping[Key, Reason] | None = None) -> Iterator[Source]:
        """The planner's view of the index, for at most `deadline_s`, without the records in `without`.

        Raises:
            TimeoutError: the time is over.
            IndexFault: the index cannot be used.
        """
        with self._reader.deadline(deadline_s):
            yield Source(self._reader, {**self._bad, **(without or {})})

    def layouts(self, fingerprint: bytes) -> list[Layout]:
        """The layouts that a namespace has, or had, records of."""
        return [_layout(spec) for spec in self._cached_specs(fingerprint)]

    def _cached_specs(self, fingerprint: bytes) -> list[bytes]:
        return self._reader.layouts(fingerprint)

    def present(self, keys: Sequence[Key]) -> set[Key]:
        """Those of `keys` that are there and not known to be bad."""
        return {key for key in self._reader.present(keys) if key not in self._bad}

    def read(self, name: RecordName) -> tuple[Header, dict[str, Array]]:
        """A record, every byte checked.

        Raises:
            DamagedRecord, NewerFormat, OSError: see `Files.read`.
        """
        return self._files.read(name)

    def mark_bad(self, name: RecordName, reason: Reason) -> None:
        """From now on this process plans without the record; `settle_bad` deals with its file."""
        self._bad[name.key] = reason

    def settle_bad(self, name: RecordName, why: str, *, missing: bool) -> None:
        """Quarantine a record that is still bad when it is read again, or take out the row of a missing one."""
        with self._writing:
            if missing:
                self._remover.lost(name)
            else:
                try:
                    self._files.read(name)
                except DamagedRecord:
                    self._remover.quarantine(name, why)
                except OSError:
                    return
            self._bad.pop(name.key, None)

    # Writing and removing.

    def commit(self, save: Save, wanted: Collection[Key], now_s: float) -> Outcome:
        """Write a save; see `Committer.write`."""
        with self._writing:
            self.look_after()
            limits = self.settings().limits
            outcome = self._committer.write(save, limits, wanted, now_s)
            for draft in save.drafts:
                self._bad.pop(draft.name.key, None)
            if outcome.n_written and self._index.totals().nbytes + self._index.own_nbytes() > (limits.max_bytes or 0):
                # The index and its log have grown past what was reserved.
                self._remover.shrink(limits)
            return outcome

    def note_use(
        self, paths: Sequence[Sequence[Key]], hits: Sequence[Key], counts: dict[str, int], now_s: float
    ) -> None:
        """Store what was used since the last time: whole paths, ends that were restored, counters."""
        with self._writing, self._index.transaction():
            for path in paths:
                self._index.use(path)
            for end in hits:
                self._entries.matched(end, now_s)
            for name, by in counts.items():
                self._index.count(name, by)

    def written_on(self, day: int) -> int:
        """Bytes of records written on `day` (days since 1970)."""
        counters = self._reader.counters()
        return counters.get("bytes_written_today", 0) if counters.get("day") == day else 0

    def unseen(self, keys: Sequence[Key]) -> set[Key]:
        """Those of `keys` that are seen for the first time; from now on they have been."""
        with self._writing, self._index.transaction():
            seen: set[Key] = set()
            for start in range(0, len(keys), 500):
                seen |= self._index.among_sightings(keys[start : start + 500])
            new = [key for key in keys if key not in seen]
            self._index.remember_sightings(new)
        return set(new)

    def count_written(self, nbytes: int, day: int) -> None:
        """Add to the bytes written ever and on `day` (days since 1970)."""
        with self._writing, self._index.transaction():
            if self._index.counters().get("day") != day:
                self._index.set_counter("day", day)
                self._index.set_counter("bytes_written_today", 0)
            self._index.count("bytes_written", nbytes)
            self._index.count("bytes_written_today", nbytes)

    def sync(self, names: Sequence[RecordName]) -> None:
        """Push records to the medium, and the index's log after them."""
        for name in names:
            self._files.sync(name)
        with self._writing:
            self._index.erase_log()

    def entries(self) -> list[Entry]:
        """All entries, latest match first."""
        return Entries(self._reader).list()

    def pin(self, entry_id: str, *, pinned: bool) -> bool:
        """Pin or unpin an entry; whether it is there. What only a pin held above a limit goes at once."""
        key = bytes.fromhex(entry_id)
        with self._writing:
            with self._index.transaction():
                found = self._entries.pin(key, pinned=pinned)
                settings = self.settings()
                others = tuple(pin for pin in settings.pins if pin != entry_id)
                pins = (*others, entry_id) if pinned and found else others
                if pins != settings.pins:
                    self._replace(msgspec.structs.replace(settings, pins=pins))
            if not pinned:
                self._remover.shrink(settings.limits)
        return found

    def forget(self, entry_id: str, *, dry_run: bool) -> Removal:
        """Erase an entry and every record that only it needs."""
        key = bytes.fromhex(entry_id)
        with self._writing:
            own = [self._index.row(child.key) for child in self._entries.own(key)]
            rows = [row for row in own if row is not None]
            if dry_run:
                return Removal().add(rows)
            removed = self._remover.erase(rows, [key])
            self._unpin([entry_id])
            self._erase_traces()
            return removed

    def clear(self, fingerprint: bytes | None, *, dry_run: bool) -> Removal:
        """Erase every record of one namespace, or of all; pins too."""
        with self._writing:
            fingerprints = [fingerprint] if fingerprint else [each[0] for each in self._index.namespaces()]
            rows: list[Row] = []
            for each in fingerprints:
                rows += self._index.by_use(each)
            if dry_run:
                return Removal().add(rows)
            ids: list[bytes] = []
            with self._index.transaction():
                for each in fingerprints:
                    ids += self._entries.delete_of(each)
            removed = self._remover.erase(rows)
            self._unpin([each.hex() for each in ids])
            self._remove_quarantine(fingerprint is None)
            self._erase_traces()
            return removed

    def _unpin(self, entry_ids: Collection[str]) -> None:
        with self._index.transaction():
            settings = self.settings()
            pins = tuple(pin for pin in settings.pins if pin not in entry_ids)
            if pins != settings.pins:
                self._replace(msgspec.structs.replace(settings, pins=pins))

    def _remove_quarantine(self, everything: bool) -> None:  # noqa: FBT001
        if not everything:
            return
        with self._index.transaction():
            for file_name, _ in self._index.quarantine():
                if self._files.remove_quarantined(file_name):
                    self._index.delete_quarantined(file_name)

    def _erase_traces(self) -> None:
        """Deleted rows are overwritten (`secure_delete`); make the log forget them too."""
        with contextlib.suppress(IndexFault):
            self._index.erase_log()

    def n_forgets(self) -> int:
        """The number of the last forgetting by any process."""
        return self._reader.n_forgets()

    def forgotten_since(self, number: int) -> set[Key]:
        """Keys that were forgotten after the forgetting `number`, as far as they are not settled."""
        return self._reader.forgotten_since(number)

    def note_forgets(self, number: int) -> None:
        """This process writes and holds nothing more of what was forgotten up to `number`."""
        with self._writing, self._index.transaction():
            self._index.note_forgets(self._pid_lock.process, number)
            self._index.settle_forgets()

    # Settings, usage, checks.

    def settings(self) -> Settings:
        """What `store.json` says now.

        Raises:
            SettingsError: it cannot be read.
        """
        return _read_settings(self.root)

    def _replace(self, settings: Settings) -> None:
        self._files.replace(self.root / "store.json", settings.encode())

    def set_limits(self, limits: Limits) -> Removal:
        """Change the limits that are given, at once; what had to be evicted."""
        limits.check()
        with self._writing:
            with self._index.transaction():
                settings = self.settings()
                merged = limits.over(settings.limits)
                self._replace(msgspec.structs.replace(settings, limits=merged))
            return self._remover.shrink(merged)

    def set_policy(self, policy: dict[str, Any]) -> None:
        """Replace the switchable rules, which the cache reads."""
        with self._writing, self._index.transaction():
            self._replace(msgspec.structs.replace(self.settings(), policy=policy))

    def usage(self) -> dict[str, int]:
        """Bytes and files that the limits count, and the counters."""
        totals, going = self._reader.totals(), self._reader.condemned_totals()
        return {
            **self._reader.counters(),
            "bytes_used": totals.nbytes - going[1] + self._reader.own_nbytes(),
            "files_used": totals.n_files - going[0],
            "index_bytes": self._reader.own_nbytes(),
        }

    def namespaces(self) -> list[tuple[bytes, int, int]]:
        """Fingerprint, files and bytes of each namespace."""
        return self._reader.namespaces()

    def describe(self, fingerprint: bytes, description: bytes) -> None:
        """Write `identity.json` of a namespace, when it says something else than is there."""
        path = self.root / fingerprint.hex() / "identity.json"
        if path.is_file() and path.read_bytes() == description:
            return
        self._files.disk.make_folder(path.parent)
        self._files.replace(path, description)

    def descriptions(self) -> Iterator[tuple[bytes, bytes]]:
        """Fingerprint and `identity.json` of each namespace that has one."""
        for path in sorted(self.root.glob("*/identity.json")):
            if len(path.parent.name) == 64 and not path.is_symlink():
                with contextlib.suppress(OSError, ValueError):
                    yield bytes.fromhex(path.parent.name), path.read_bytes()

    def verify(self) -> check.Report:
        """Read every record; changes nothing."""
        with self._writing:
            return check.verify(self._index, self._files)

    def repair(self) -> int:
        """Build the index anew from the files, keeping the counters; how many records it has."""
        with self._writing:
            with self._index.transaction():
                self._recovery.finish_left()
                self._index.empty()
            n = check.rebuild(self._recovery, self._remover, self.settings().pins)
            self._bad.clear()
            self._remover.shrink(self.settings().limits)
            return n


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _layout(spec: bytes, _seen: dict[bytes, Layout] = {}) -> Layout:  # noqa: B006
    if spec not in _seen:
        _seen[spec] = decode_layout(spec)
    return _seen[spec]


def _read_settings(root: Path) -> Settings:
    path = root / "store.json"
    try:
        return Settings.decode(path.read_bytes(), path)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}. The records are untouched.") from error


def _settle_settings(root: Path, wanted: Settings, disk: Disk) -> Settings:
    """The settings of a root; of a new one, `wanted` with defaults for what it leaves out."""
    path = root / "store.json"
    if path.exists():
        settings = _read_settings(root)
        asked = wanted.limits.over(settings.limits)
        if asked != settings.limits:
            log.warning("%s has limits of its own, which stay in force: change them with set_limits", root)
        return settings
    usage = shutil.disk_usage(root)
    limits = wanted.limits.over(default_limits(usage.free, usage.total))
    settings = msgspec.structs.replace(wanted, limits=limits)
    # Two processes may make the same root at once: the first one's settings stand.
    temporary = ProcessLock(root / "tmp")
    try:
        Files(root, temporary.process, disk).replace_new(path, settings.encode())
    finally:
        temporary.release()
    return _read_settings(root)


Clock = Callable[[], float]
