"""Store: the facade of one root. Answers look-ups, reads and writes records, keeps the limits.

It refuses nothing on policy grounds and knows no engine. Reading goes over one connection and writing
over another; the methods that write or remove hold one lock, so that a process does one such thing at a
time. Safe to call from several threads.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rewarm.errors import DamagedRecord, IndexFault, NewerFormat, RootError, SettingsError
from rewarm.format.layouts import decode_layout
from rewarm.format.record import ALIGNMENT, Header
from rewarm.state.chain import KEY_NBYTES, Key
from rewarm.state.layout import Layout
from rewarm.state.reason import Reason
from rewarm.state.sequence import Array
from rewarm.store import check
from rewarm.store.disk import Disk, read_small
from rewarm.store.entries import Entries, Entry
from rewarm.store.files import RecordName
from rewarm.store.forgotten import Forgotten
from rewarm.store.index import Row
from rewarm.store.rebuild import rebuild
from rewarm.store.room import INDEX_ROW_NBYTES, Removal
from rewarm.store.root import Root, make_private, settle_settings
from rewarm.store.saves import Outcome, Save
from rewarm.store.scatter import Place
from rewarm.store.settings import FORMAT, Limits, Settings, format_limits
from rewarm.store.source import Source
from rewarm.units import format_bytes

log = logging.getLogger("rewarm.store")

MAX_BLOCK_TOKENS = 2**20


class Store:
    """An open root.

    Attributes:
        gone: asked before room is made: fingerprints of the namespaces that make room first.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._bad: dict[Key, Reason] = {}
        self._layouts: dict[bytes, Layout] = {}
        self._log_is_due = False
        self.gone: Callable[[], Collection[bytes]] = tuple
        self._listed: tuple[tuple[int, int], list[Entry]] | None = None
        self._described = self._read_descriptions()

    @classmethod
    def open(
        cls,
        folder: Path,
        limits: Limits | None = None,
        policy: dict[str, Any] | None = None,
        block_tokens: int = 256,
        disk: Disk | None = None,
    ) -> Store:
        """Open a root, made with mode 0700 when it is not there. All but `folder` are for a new root.

        Raises:
            ValueError: an argument makes no sense.
            SettingsError: `store.json` cannot be read.
            RootError: the folder cannot be used.
        """
        if not isinstance(block_tokens, int) or not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
            raise ValueError(f"block_tokens must be between 1 and {MAX_BLOCK_TOKENS}, not {block_tokens}")
        if limits is not None:
            limits.check()
        folder = folder.absolute()
        disk = disk or Disk()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_private(folder)
            disk.make_folder(folder / "tmp")
            wanted = Settings(format=FORMAT, block_tokens=block_tokens, limits=limits or Limits(), policy=policy or {})
            store = cls(Root(folder, settle_settings(folder, wanted, disk), disk))
        except SettingsError:
            raise
        except OSError as error:
            raise RootError(
                f"The cache folder {folder} cannot be used: {error.strerror or error}. Nothing was changed. "
                "Check that it can be written and that its disk is there, or choose another folder."
            ) from error
        except IndexFault as fault:
            raise RootError(f"The index in {folder} cannot be used: {fault}. The records are untouched.") from None
        for caution in store.cautions():
            log.warning("%s", caution)
        return store

    @property
    def root(self) -> Path:
        """The folder."""
        return self._root.folder

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self._root.block_tokens

    @property
    def rebuilt(self) -> bool:
        """Whether the index had to be built anew."""
        return self._root.rebuilt

    @property
    def n_attached(self) -> int:
        """How often the folder was opened: once, and each time that it was changed from outside."""
        return self._root.n_attached

    def close(self) -> None:
        """Close the root; idempotent."""
        self._root.close()

    def look_after(self) -> None:
        """Open the folder anew when it was changed from outside; see `Root.look_after`."""
        self._root.look_after()

    def renew_index(self) -> None:
        """Build the index anew: it turned out to be broken; see `Root.renew_index`."""
        self._root.renew_index()

    # Looking up and reading.

    @contextlib.contextmanager
    def looking(self, deadline_s: float, without: Mapping[Key, Reason] | None = None) -> Iterator[Source]:
        """The planner's view of the index, for at most `deadline_s`, without the records in `without`.

        Raises:
            TimeoutError: the time is over.
            IndexFault: the index cannot be used.
        """
        with self._root.reader.deadline(deadline_s):
            yield Source(self._root.reader, {**self._bad, **(without or {})})

    def layouts(self, fingerprint: bytes) -> list[Layout]:
        """The layouts that a namespace has, or had, records of."""
        specs = self._root.reader.layouts(fingerprint)
        for spec in specs:
            if spec not in self._layouts:
                self._layouts[spec] = decode_layout(spec)
        return [self._layouts[spec] for spec in specs]

    def present(self, keys: Sequence[Key], deadline_s: float) -> set[Key]:
        """Those of `keys` that are there and not known to be bad.

        Raises:
            TimeoutError: the time is over.
            IndexFault: the index cannot be used.
        """
        with self._root.reader.deadline(deadline_s):
            return {key for key in self._root.reader.present(keys) if key not in self._bad}

    def read(self, name: RecordName, place: Place | None = None) -> tuple[Header, dict[str, Array]]:
        """A record, every byte checked, in the arrays that `place` gives.

        Raises:
            DamagedRecord, NewerFormat, OSError: see `Files.read`.
        """
        return self._root.files.read(name, place)

    def mark_bad(self, name: RecordName, reason: Reason) -> None:
        """From now on this process plans without the record; `settle_bad` deals with its file."""
        self._bad[name.key] = reason

    def settle_bad(self, name: RecordName, why: str, *, missing: bool) -> None:
        """Quarantine a record that is still bad when it is read again, or take out the row of a missing one.

        Raises:
            OSError, IndexFault: it cannot be done now.
        """
        with self._root.writing:
            if missing:
                self._root.remover.lost(name)
            else:
                try:
                    self._root.files.read(name)
                except DamagedRecord:
                    self._root.remover.quarantine(name, why)
                except NewerFormat:
                    return
            self._bad.pop(name.key, None)

    # Writing and removing.

    def commit(self, save: Save, wanted: Collection[Key], now_s: float) -> Outcome:
        """Write a save; see `Committer.write`."""
        with self._root.writing:
            self.look_after()
            self._root.room.gone = self.gone()
            outcome = self._root.committer.write(save, self._limits, wanted, now_s)
            for draft in save.drafts:
                self._bad.pop(draft.name.key, None)
            if outcome.n_written and self._is_over():
                # Index and log have grown past what was reserved, or a limit was lowered meanwhile.
                self._root.remover.shrink(self._limits, wanted)
            return outcome

    def enforce(self) -> Removal:
        """Evict what is above the limits now: somebody else may have changed them. Nothing, where it cannot be done."""
        with contextlib.suppress(IndexFault, OSError, RootError), self._root.writing:
            if self._is_over():
                self._root.room.gone = self.gone()
                return self._root.remover.shrink(self._limits)
        return Removal()

    def _limits(self) -> Limits:
        return self.settings().limits

    def _is_over(self) -> bool:
        totals, limits = self._root.index.totals(), self._limits()
        used = totals.nbytes + self._root.index.own_nbytes()
        return used > (limits.max_bytes or 0) or totals.n_files > (limits.max_files or 0)

    def note_use(
        self, paths: Sequence[Sequence[Key]], hits: Sequence[Key], counts: dict[str, int], now_s: float
    ) -> None:
        """Store what was used since the last time: whole paths, ends that were restored, counters."""
        with self._root.writing, self._root.index.transaction():
            for path in paths:
                self._root.index.use(path)
            for end in hits:
                self._root.entries.matched(end, now_s)
            for name, by in counts.items():
                self._root.index.count(name, by)

    def written_on(self, day: int) -> int:
        """Bytes of records written on `day` (days since 1970)."""
        counters = self._root.reader.counters()
        return counters.get("bytes_written_today", 0) if counters.get("day") == day else 0

    def unseen(self, keys: Sequence[Key]) -> set[Key]:
        """Those of `keys` that are seen for the first time; from now on they have been."""
        with self._root.writing, self._root.index.transaction():
            seen: set[Key] = set()
            for start in range(0, len(keys), 500):
                seen |= self._root.index.among_sightings(keys[start : start + 500])
            new = [key for key in keys if key not in seen]
            self._root.index.remember_sightings(new)
        return set(new)

    def count_written(self, nbytes: int, day: int) -> None:
        """Add to the bytes written ever and on `day` (days since 1970)."""
        with self._root.writing, self._root.index.transaction():
            if self._root.index.counters().get("day") != day:
                self._root.index.set_counter("day", day)
                self._root.index.set_counter("bytes_written_today", 0)
            self._root.index.count("bytes_written", nbytes)
            self._root.index.count("bytes_written_today", nbytes)

    def sync(self, names: Sequence[RecordName] | None) -> None:
        """Push records (None: all of them) to the medium, and the index's log after them.

        Raises:
            OSError, IndexFault: it cannot be done now.
        """
        for name in self._root.files.records() if names is None else names:
            self._root.files.sync(name)
        with self._root.writing:
            self._root.index.erase_log()

    def entries(self) -> list[Entry]:
        """All entries, latest match first; worked out anew when the index has changed since the last time."""
        lister = self._root.lister
        now = (self.n_attached, lister.version())
        if self._listed is None or self._listed[0] != now:
            self._listed = (now, Entries(lister).list())
        return list(self._listed[1])

    def pin(self, entry_id: str, *, pinned: bool) -> bool:
        """Pin or unpin an entry; whether it is there. What only a pin held above a limit goes at once."""
        key = bytes.fromhex(entry_id)
        with self._root.writing:
            with self._root.index.transaction():
                found = self._root.entries.pin(key, pinned=pinned)
                others = tuple(pin for pin in self.settings().pins if pin != entry_id)
                self._root.change_settings(pins=(*others, entry_id) if pinned and found else others)
            if not pinned:
                self._root.remover.shrink(self._limits)
        return found

    def path(self, entry_id: str) -> list[Row]:
        """The records that an entry needs, as far as they are there, from the first block on."""
        reader = self._root.reader
        rows = (reader.row(key) for key in Entries(reader).path([bytes.fromhex(entry_id)]))
        return sorted((row for row in rows if row is not None), key=lambda row: (row.n, row.name.is_point))

    def forget(self, *entry_ids: str, dry_run: bool) -> Removal:
        """Erase entries and every record that only they need, all at once."""
        keys = [bytes.fromhex(entry_id) for entry_id in entry_ids]

        def collect() -> list[Row]:
            own = [self._root.index.row(child.key) for child in self._root.entries.own(*keys)]
            for key in () if dry_run else keys:
                self._root.entries.delete(key)
            return [row for row in own if row is not None]

        with self._root.writing:
            if dry_run:
                return Removal().add(collect())
            removed = self._root.remover.erase(collect)
            self.erase_log(due=True)  # whatever the settings file is
            self._unpin(entry_ids)
            return removed

    def clear(self, fingerprint: bytes | None, *, dry_run: bool) -> Removal:
        """Erase every record of one namespace, or of all; pins too."""
        ids: list[bytes] = []

        def collect() -> list[Row]:
            fingerprints = [fingerprint] if fingerprint else [each[0] for each in self._root.index.namespaces()]
            rows: list[Row] = []
            for each in fingerprints:
                rows += self._root.index.by_use(each)
                if not dry_run:
                    ids.extend(self._root.entries.delete_of(each))
            return rows

        with self._root.writing:
            if dry_run:
                return Removal().add(collect())
            removed = self._root.remover.erase(collect)
            self.erase_log(due=True)  # whatever the settings file is
            self._unpin([each.hex() for each in ids])
            return removed

    def keep(self, name: str, ttl_s: float | None) -> None:
        """Let an entry (by id), or the entries of a namespace (by fingerprint), live `ttl_s` without a match."""
        with self._root.writing, self._root.index.transaction():
            ttls = {each: s for each, s in self.settings().ttls.items() if each != name}
            self._root.change_settings(ttls=ttls if ttl_s is None else {**ttls, name: ttl_s})

    def forget_expired(self, now_s: float, default_s: float | None) -> int:
        """Forget the unpinned entries that nobody has matched for their time; how many."""
        ttls, n = self.settings().ttls, 0
        for entry_id, fingerprint, matched_s in Entries(self._root.lister).unpinned():
            ttl_s = ttls.get(entry_id, ttls.get(fingerprint, default_s))
            if ttl_s is not None and now_s - matched_s > ttl_s:
                self.forget(entry_id, dry_run=False)
                n += 1
        return n

    def see(self, now_s: float) -> None:
        """Note the time, so that the next process can tell a clock that jumped."""
        with self._root.writing, self._root.index.transaction():
            self._root.index.set_counter("last_seen_s", int(now_s))

    def last_seen_s(self) -> int | None:
        """When a process last noted the time, seconds since 1970."""
        return self._root.reader.counters().get("last_seen_s")

    def _unpin(self, entry_ids: Collection[str]) -> None:
        with self._root.index.transaction():
            settings = self.settings()
            pins = tuple(pin for pin in settings.pins if pin not in entry_ids)
            ttls = {name: ttl_s for name, ttl_s in settings.ttls.items() if name not in entry_ids}
            if (pins, ttls) != (settings.pins, settings.ttls):
                self._root.change_settings(pins=pins, ttls=ttls)

    def erase_log(self, *, due: bool = False) -> None:
        """Make the log forget deleted rows too, which are overwritten in the index (`secure_delete`).

        When a reader holds the log up it stays `due`, and the next call tries again.
        """
        with self._root.writing, contextlib.suppress(IndexFault):
            self._log_is_due = self._log_is_due or due
            if self._log_is_due:
                self._log_is_due = not self._root.index.erase_log()

    def n_forgets(self, deadline_s: float = 10.0) -> int:
        """The number of the last forgetting by any process.

        Raises:
            TimeoutError: the time is over.
        """
        with self._root.reader.deadline(deadline_s):
            return self._root.reader.n_forgets()

    def forgotten_since(self, number: int) -> Forgotten:
        """What was forgotten after the forgetting `number`, as far as it is not settled."""
        return self._root.reader.forgotten_since(number)

    def note_forgets(self, number: int) -> None:
        """This process writes and holds nothing more of what was forgotten up to `number`."""
        with self._root.writing, self._root.index.transaction():
            self._root.index.note_forgets(self._root.lock.process, number)
            self._root.recovery.settle_forgets()

    # Settings, usage, checks.

    def settings(self) -> Settings:
        """What `store.json` says now.

        Raises:
            SettingsError: it cannot be read.
        """
        return self._root.settings()

    def set_limits(self, limits: Limits) -> Removal:
        """Change the limits that are given, at once; what had to be evicted."""
        limits.check()
        with self._root.writing:
            with self._root.index.transaction():
                before = self.settings().limits
                after = self._root.change_settings(limits=limits.over(before)).limits
            if after != before:
                log.info("the limits of %s are changed: %s", self.root, format_limits(after))
            self._root.room.gone = self.gone()
            removed = self._root.remover.shrink(self._limits)
        for caution in self.cautions():
            log.warning("%s", caution)
        return removed

    def cautions(self) -> list[str]:
        """Why nothing can be saved as things are, in sentences: limits that leave no room for any record."""
        limits, own = self._limits(), self._root.reader.own_nbytes(reserve=True)
        found = []
        if (limits.max_bytes or 0) < own + INDEX_ROW_NBYTES + ALIGNMENT:
            found.append(
                f"The limit of {format_bytes(limits.max_bytes or 0)} leaves no room for any record: index and log take "
                f"{format_bytes(own)} by themselves. Nothing is saved until max_bytes is raised."
            )
        if not limits.max_files:
            found.append("The limit of 0 files leaves room for none. Nothing is saved until max_files is raised.")
        free = None
        with contextlib.suppress(OSError):
            free = self._root.files.free_bytes()
        if free is not None and free < (limits.min_free_bytes or 0):
            found.append(
                f"{format_bytes(free)} are free on the disk of {self.root}, less than the "
                f"{format_bytes(limits.min_free_bytes or 0)} that are to stay free. What is stored makes room for what "
                "is new, as far as it can."
            )
        return found

    def set_policy(self, policy: dict[str, Any]) -> None:
        """Replace the switchable rules, which the cache reads."""
        with self._root.writing, self._root.index.transaction():
            self._root.change_settings(policy=policy)

    def usage(self) -> dict[str, int]:
        """Bytes and files that the limits count, and the counters."""
        lister = self._root.lister
        totals, going = lister.totals(), lister.condemned_totals()
        return {
            **lister.counters(),
            "bytes_used": totals.nbytes - going[1] + lister.own_nbytes(),
            "files_used": totals.n_files - going[0],
            "index_bytes": lister.own_nbytes(),
        }

    def namespaces(self) -> list[tuple[bytes, int, int]]:
        """Fingerprint, files and bytes of each namespace."""
        return self._root.lister.namespaces()

    def describe(self, fingerprint: bytes, description: bytes) -> None:
        """Write `identity.json` of a namespace."""
        path = self.root / fingerprint.hex() / "identity.json"
        self._root.files.disk.make_folder(path.parent)
        self._root.files.replace(path, description)
        self._described[fingerprint] = description

    def descriptions(self) -> list[tuple[bytes, bytes]]:
        """Fingerprint and `identity.json` of each namespace that had one at opening, or got one since."""
        return list(self._described.items())

    def description(self, fingerprint: bytes) -> bytes | None:
        """`identity.json` of one namespace, as its file says now; None where there is none."""
        folder = self.root / fingerprint.hex()
        path = folder / "identity.json"
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink() and not folder.is_symlink():
                return read_small(path)
        return None

    def read_descriptions(self) -> dict[bytes, bytes]:
        """`identity.json` of each namespace by fingerprint, read anew."""
        self._described = self._read_descriptions()
        return dict(self._described)

    def _read_descriptions(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        for path in sorted(self.root.glob("*/identity.json")):
            plain = path.is_file() and not path.is_symlink() and not path.parent.is_symlink()
            if len(path.parent.name) == 2 * KEY_NBYTES and plain:
                with contextlib.suppress(OSError, ValueError):
                    found[bytes.fromhex(path.parent.name)] = read_small(path)
        return found

    def verify(self, progress: check.Progress | None = None, *, quarantine: bool = False) -> check.Report:
        """Read every record; with `quarantine`, what is damaged is moved there, else nothing is changed."""
        report = check.verify(self._root.lister, self._root.files, progress)
        if quarantine:
            for name, why in report.bad:
                self.settle_bad(name, why, missing=False)
        return report

    def repair(self) -> int:
        """Build the index anew from the files, keeping the counters; how many records it has."""
        with self._root.writing:
            with self._root.index.transaction():
                self._root.recovery.finish_left()
                self._root.index.empty()
            n = rebuild(self._root.recovery, self._root.remover, self.settings(), self._root.writing, lambda: False)
            self._bad.clear()
            self._root.remover.shrink(self._limits)
            return n
