"""An open root: its lock, files, index and settings, and what it takes to keep them open.

It opens the folder, finishes what dead processes left, has the index built anew where there is none, and
opens everything again when the folder was changed from outside. What is done with it is the facade's
business.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import msgspec

from rewarm.errors import IndexFault, RootError, SettingsError
from rewarm.store.commit import Committer
from rewarm.store.crew import Crew
from rewarm.store.disk import Disk, patiently, read_small
from rewarm.store.entries import Entries
from rewarm.store.files import Files
from rewarm.store.index import Index
from rewarm.store.lock import ProcessLock
from rewarm.store.rebuild import rebuild
from rewarm.store.recovery import Recovery
from rewarm.store.removal import Remover
from rewarm.store.room import Room
from rewarm.store.settings import Settings, default_limits

log = logging.getLogger("rewarm.store")

BUSY_TIMEOUT_S = 10.0
READER_TIMEOUT_S = 0.5
REBUILD_WAIT_S = 1.0
"""How long opening waits for the index to be built anew; of a large root it goes on in the background."""

RENEW_INTERVAL_S = 60.0
CLOSE_WAIT_S = 2.0
"""How long closing waits for a rebuild to stop."""

CACHE_TAG = b"""Signature: 8a477f597d28d172789f06886806bc55
# This folder is a cache of rewarm: KV states that can be computed again. Backups may leave it out.
# See https://bford.info/cachedir/
"""


class Root:
    """One folder, open.

    Attributes:
        folder: absolute.
        block_tokens: tokens per block.
        writing: held by whatever writes or removes: one such thing at a time in a process.
        rebuilt: whether the index had to be built anew.
        n_attached: how often the folder was opened: once, and each time that it was changed from outside.
        lock, files, index, reader, entries, room, remover, recovery, committer: what is open; `reader` is a connection
            of its own for look-ups, `lister` one for what takes longer and must not keep them waiting.

    Raises:
        OSError, IndexFault, RootError: the folder cannot be opened.
    """

    lock: ProcessLock
    files: Files
    index: Index
    reader: Index
    lister: Index
    entries: Entries
    room: Room
    recovery: Recovery
    remover: Remover
    committer: Committer

    def __init__(self, folder: Path, settings: Settings, disk: Disk) -> None:
        self.folder = folder
        self.block_tokens = settings.block_tokens
        self.writing = threading.RLock()
        self.rebuilt = False
        self.n_attached = 0
        self.is_closed = False
        self._disk = disk
        self._crew = Crew()
        self._rebuilding: threading.Thread | None = None
        self._renewed_s = float("-inf")
        self._detached = self._to_release = False
        self._attach(settings)
        self._join_rebuild(REBUILD_WAIT_S)

    def _join_rebuild(self, timeout: float | None) -> None:
        if self._rebuilding is not None:
            self._rebuilding.join(timeout)

    def _attach(self, settings: Settings) -> None:
        """Take the process' lock, open the index, finish what others left."""
        self._device = self.folder.stat().st_dev
        self._settings = settings
        self.lock = ProcessLock(self.folder / "tmp")
        self.files = Files(self.folder, self.lock.process, self._disk)
        try:
            self._connect()
        except BaseException:
            self.lock.release()
            raise
        self._index_file = _file_id(self.folder / "index.db")
        self._detached = False
        self.n_attached += 1
        if not self.index.is_built():
            self._rebuilding = threading.Thread(target=self._rebuild, name="rewarm-rebuild", daemon=True)
            self._rebuilding.start()

    def _connect(self) -> None:
        path = self.folder / "index.db"
        try:
            self._open_index(path)
        except IndexFault as fault:
            if not fault.broken:
                raise RootError(f"{path}: {fault}. Nothing was changed; try again, or use another folder.") from None
            log.warning("%s is broken (%s): it is built anew from the records", path, fault)
            self._remove_index()
            self._open_index(path)
        self.recovery.bury()
        with self.index.transaction():
            self._count_quarantine()
            self.index.note_forgets(self.lock.process, self.index.n_forgets())
            self.index.settle_forgets()

    def _count_quarantine(self) -> None:
        """Files that a process moved to quarantine just before it died are counted from now on."""
        known = {file_name for file_name, _ in self.index.quarantine()}
        with contextlib.suppress(OSError):
            for file_name, nbytes in self.files.quarantined():
                if file_name not in known:
                    self.index.add_quarantined(file_name, nbytes)

    def _open_index(self, path: Path) -> None:
        self.index = Index(path, BUSY_TIMEOUT_S)
        try:
            path.chmod(0o600)
            self.entries = Entries(self.index)
            self.room = room = Room(self.index, self.files, self.entries)
            self.recovery = Recovery(self.index, self.files, self.entries, self.lock)
            self.remover = Remover(room, self.recovery, self.lock)
            self.committer = Committer(room, self.recovery, self.remover, self.lock, self._crew)
            self.reader = Index(path, READER_TIMEOUT_S)
            self.lister = Index(path, READER_TIMEOUT_S)
            self.index.totals()
        except IndexFault:
            self._close_index()
            raise

    def _remove_index(self) -> None:
        for name in ("index.db", "index.db-wal", "index.db-shm"):
            (self.folder / name).unlink(missing_ok=True)

    def _rebuild(self) -> None:
        """On a thread of its own: find sees what has been entered so far."""
        attached = self.n_attached
        try:
            settings = self.settings()
            n = rebuild(
                self.recovery,
                self.remover,
                settings,
                self.writing,
                lambda: self.is_closed or self.n_attached != attached,
            )
            if n:
                self.rebuilt = True
                log.warning("the index was built anew from %d records; recency, hits and counters begin again", n)
                with self.writing:
                    self.remover.shrink(lambda: self.settings().limits)
        except (IndexFault, RootError, OSError) as error:
            log.warning("the index in %s is not complete (%s); the next start goes on with it", self.folder, error)
        finally:
            with self.writing:
                if self._to_release:
                    self._release()

    def look_after(self) -> None:
        """When the folder or its index was replaced or removed since it was opened, open it anew.

        A folder that was deleted is made again with the settings that it had, but never in another place than
        the disk that it was on: an unplugged drive leaves a folder of its name on the system's disk, or none.

        Raises:
            IndexFault: the folder is not there now.
        """
        with self.writing:
            if self.is_closed:
                return
            if not self._detached and _file_id(self.folder / "index.db") == self._index_file:
                return
            if not self._is_in_place():
                raise IndexFault(f"the cache folder {self.folder} is not there now")
            if not self._detached:
                log.warning("%s was changed from outside; it is opened anew", self.folder)
            self._reattach()

    def renew_index(self) -> None:
        """The index turned out to be broken: build it anew, once a minute at the most."""
        with self.writing:
            now = time.monotonic()
            if self.is_closed or now < self._renewed_s + RENEW_INTERVAL_S:
                return
            self._renewed_s = now
            log.warning("the index in %s is broken: it is built anew from the records", self.folder)
            self._detached = True
            self._close_index()
            with contextlib.suppress(OSError):
                self._remove_index()  # where another process has it open and that cannot be, opening finds it broken
            self._reattach()

    def _reattach(self) -> None:
        try:
            self._disk.make_folder(self.folder)
            self._disk.make_folder(self.folder / "tmp")
            settings = settle_settings(self.folder, self._settings, self._disk)
            self._detached = True
            self._close_index()
            self.lock.release()
            self._attach(settings)
        except (OSError, RootError) as error:
            fault = IndexFault(f"the cache folder {self.folder} cannot be opened anew: {str(error).rstrip('.')}")
            for index in (self.lister, self.reader, self.index):
                index.why_closed = str(fault)
            raise fault from None

    def _is_in_place(self) -> bool:
        """Whether the folder, or the one above it, is on the disk that it was opened on."""
        for folder in (self.folder, self.folder.parent):
            with contextlib.suppress(OSError):
                return folder.stat().st_dev == self._device
        return False

    def _close_index(self) -> None:
        for name in ("lister", "reader", "index"):
            index: Index | None = getattr(self, name, None)
            if index is not None:
                with contextlib.suppress(IndexFault):
                    index.close()

    def close(self) -> None:
        """Give everything back; idempotent."""
        with self.writing:
            if self.is_closed:
                return
            self.is_closed = True
        self._join_rebuild(CLOSE_WAIT_S)
        with self.writing:
            if self._rebuilding is not None and self._rebuilding.is_alive():
                self._to_release = True  # a disk holds it up: it gives back what it uses when it can
                return
            self._release()

    def _release(self) -> None:
        self._crew.close()
        with contextlib.suppress(IndexFault), self.index.transaction():
            self.index.remove_process(self.lock.process)
            self.index.settle_forgets()
        self._close_index()
        self.lock.release()

    def settings(self) -> Settings:
        """What `store.json` says now.

        Raises:
            SettingsError: it cannot be read.
        """
        return _read_settings(self.folder)

    def change_settings(self, **changes: object) -> Settings:
        """Replace fields of `store.json`, inside a transaction; what it says now."""
        settings = msgspec.structs.replace(self.settings(), **changes)
        self.files.replace(self.folder / "store.json", settings.encode())
        return settings


def make_private(folder: Path) -> None:
    """Take a root that others may look into from them; a folder that holds other things already is left as it is.

    Raises:
        OSError: it cannot be looked at or changed.
    """
    status = folder.stat()
    if not hasattr(os, "geteuid") or status.st_uid != os.geteuid() or not status.st_mode & 0o077:
        return
    if (folder / "store.json").exists() or not any(folder.iterdir()):
        folder.chmod(0o700)
    else:
        log.warning("%s holds other files, and others can read its list of names: it is left as it is", folder)


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _read_settings(folder: Path) -> Settings:
    path = folder / "store.json"
    try:
        return Settings.decode(patiently(lambda: read_small(path)), path)
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror or error}. The records are untouched.") from error


def settle_settings(folder: Path, wanted: Settings, disk: Disk) -> Settings:
    """The settings of a root; of a new one, `wanted` with defaults for what it leaves out."""
    path = folder / "store.json"
    if path.exists():
        settings = _read_settings(folder)
        if wanted.limits.over(settings.limits) != settings.limits:
            log.warning("%s has limits of its own, which stay in force: change them with set_limits", folder)
        return settings
    usage = shutil.disk_usage(folder)
    limits = wanted.limits.over(default_limits(usage.free, usage.total))
    settings = msgspec.structs.replace(wanted, limits=limits)
    # Two processes may make the same root at once: the first one's settings stand.
    temporary = ProcessLock(folder / "tmp")
    try:
        files = Files(folder, temporary.process, disk)
        files.replace_new(folder / "CACHEDIR.TAG", CACHE_TAG)
        files.replace_new(path, settings.encode())
    finally:
        temporary.release()
    return _read_settings(folder)
