"""Moving a root to another folder: copy and check, switch, open the new one, and only then remove the old one.

    new/moving.json    from the first moment to the last: where the root comes from; a stopped move goes on by it
    new/store.json     made last, by rename: from then on the new folder is a root

While it goes on, one transaction holds the old index: nobody opens the old root, and nothing in it changes.
Touches only files that rewarm made. It knows no engines, and not who will use the new folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from rewarm.errors import DamagedRecord, IndexFault, NewerFormat, RootError
from rewarm.store.disk import Disk, read_small
from rewarm.store.files import RecordName
from rewarm.store.index import Index
from rewarm.store.lock import holders
from rewarm.store.root import BUSY_TIMEOUT_S
from rewarm.store.settings import Limits, Settings
from rewarm.store.store import Store
from rewarm.store.tree import Tree
from rewarm.units import format_bytes

log = logging.getLogger("rewarm.store")

MARK = "moving.json"
MARK_BEING_MADE = "moving.json.tmp"
_PIECE = 2**20

Progress = Callable[[int, int], None]
"""Told bytes that are done, and bytes in all."""


@dataclass(slots=True)
class MoveReport:
    """What a move did.

    Attributes:
        finished: whether the cache is in the new folder now; else it is whole in the old one.
        n_files: records that were brought over, those of an earlier try included.
        nbytes: of these, rounded up to 4 KiB each.
        n_damaged: records that were damaged in the old folder already; brought over as they are.
        left_behind: files in the old folder that rewarm did not make, or that could not be removed.
    """

    finished: bool = False
    n_files: int = 0
    nbytes: int = 0
    n_damaged: int = 0
    left_behind: list[str] = field(default_factory=list)


class _Mark(msgspec.Struct, frozen=True):
    """`moving.json`: where the root comes from; once it is whole, how often its index had been used."""

    source: str
    recency: int | None = None


class _Stopped(Exception):
    """The caller wants the move to stop."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a caller of `move` wants to be told and asked.

    Attributes:
        progress: told bytes that are done, and in all, after each file.
        stop: asked before each file; true stops the move, which can go on later or be undone.
        switch: called when the new root is whole and can be opened, before the old one is removed: for whoever
            remembers where the cache is. What it raises ends the move with both folders whole.
    """

    progress: Progress = lambda _done, _total: None
    stop: Callable[[], bool] = lambda: False
    switch: Callable[[], None] = lambda: None


def move(old: Path, new: Path, wishes: Wishes, disk: Disk | None = None) -> MoveReport:
    """Move the root at `old` to the folder `new`, which is empty, absent, or where an earlier try has stopped.

    Raises:
        RootError: it cannot be moved; says why, and that the old root is untouched.
    """
    try:
        return _Move(old.absolute().resolve(), new.absolute().resolve(), wishes, disk or Disk()).run()
    except OSError as error:
        raise RootError(
            f"Moving the cache from {old} to {new} stopped: {error}. What is in {old} is whole; try again, and the "
            "move goes on where it stopped."
        ) from error
    except IndexFault as fault:
        raise RootError(f"The index in {old} cannot be used now: {fault}. Nothing was removed; try again.") from None


def abandon(new: Path, disk: Disk | None = None) -> bool:
    """Remove what a move that stopped has left in `new`; false, and nothing is done, where there is no such thing.

    Raises:
        RootError: the move had come so far that `new` is a root of its own, or the old root is no more.
    """
    new = new.absolute().resolve()
    mark = _read_mark(new)
    if mark is None:
        return False
    if (new / "store.json").exists() or not (Path(mark.source) / "store.json").is_file():
        raise RootError(f"{new} holds the whole cache by now. Nothing was removed. Use it, or clear it first.")
    Tree(new, disk or Disk()).remove()
    with contextlib.suppress(OSError):
        (new / MARK).unlink()
        new.rmdir()
    return True


class _Move:
    def __init__(self, old: Path, new: Path, wishes: Wishes, disk: Disk) -> None:
        self._old, self._new, self._wishes, self._disk = old, new, wishes, disk
        self._source, self._target = Tree(old, disk), Tree(new, disk)
        self._settings = Settings(format=0, block_tokens=1, limits=Limits())
        self._report = MoveReport()

    def run(self) -> MoveReport:
        self._check_places()
        mark = self._check_target()
        if not (self._old / "store.json").is_file():
            if mark is None or not (self._new / "store.json").is_file():
                raise RootError(f"There is no cache in {self._old}. Nothing was changed.")
            self._finish()  # an earlier move got as far as removing the old root
            return self._report
        with contextlib.closing(Store.open(self._old)) as store:  # finishes what dead processes left
            self._settings = store.settings()
        with self._alone() as index:
            try:
                self._copy_all(index, mark)
            except _Stopped:
                return self._report
            self._try_new(_n_known(index))
            self._wishes.switch()
            (self._old / "store.json").unlink()
        self._finish()
        return self._report

    def _check_places(self) -> None:
        if self._old == self._new:
            raise RootError(f"The cache is in {self._old} already. Nothing was changed.")
        if self._old in self._new.parents or self._new in self._old.parents:
            raise RootError(f"{self._new} and {self._old} lie within each other. Nothing was changed.")

    def _check_target(self) -> _Mark | None:
        """The mark of an earlier try; None where the target is empty or not there."""
        if not os.path.lexists(self._new):
            return None
        mark = _read_mark(self._new)
        if mark is None:
            if not self._new.is_dir() or any(path.name != MARK_BEING_MADE for path in self._new.iterdir()):
                raise RootError(f"{self._new} is no empty folder. Nothing was changed; choose another one.")
            return None
        if mark.source != str(self._old):
            raise RootError(f"{self._new} holds a part of a cache from {mark.source}. Nothing was changed.")
        return mark

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Index]:
        """Hold the old root: nobody has it open, and nobody can open it, until the end."""
        index = Index(self._old / "index.db", BUSY_TIMEOUT_S)
        try:
            with index.transaction():
                self._refuse_holders(self._old)
                yield index
        finally:
            with contextlib.suppress(IndexFault):
                index.close()

    def _refuse_holders(self, root: Path) -> None:
        found = holders(root / "tmp") if (root / "tmp").is_dir() else []
        if found:
            who = ", ".join(_process(number) for number in found)
            raise RootError(f"The cache in {root} is in use by {who}. Nothing was changed; end that first.")

    def _copy_all(self, index: Index, mark: _Mark | None) -> None:
        """Bring everything over, the settings last."""
        if (self._new / "store.json").is_file():
            self._take_back(mark)
        names = list(self._source.files.records())
        self._target.remove_records(set(names))
        coming = [name for name in names if not self._is_there(name)]
        total = sum(map(self._source.files.nbytes, names))
        self._check_room(sum(map(self._source.files.nbytes, coming)), index)
        self._make_target()
        self._report.n_files = len(names) - len(coming)
        self._report.nbytes = total - sum(map(self._source.files.nbytes, coming))
        self._wishes.progress(self._report.nbytes, total)
        for name in coming:
            if self._wishes.stop():
                raise _Stopped
            self._bring(name)
            self._report.n_files += 1
            self._report.nbytes += self._source.files.nbytes(name)
            self._wishes.progress(self._report.nbytes, total)
        for relative in self._source.small_files():
            self._copy(self._old / relative, self._new / relative)
        self._copy_index(index)
        self._target.sync_folders()
        self._mark(_Mark(str(self._old), index.counters().get("recency", 0)))
        self._copy(self._old / "store.json", self._new / "store.json")
        self._target.sync_folder(self._new)
        self._report.finished = True

    def _take_back(self, mark: _Mark | None) -> None:
        """An earlier try had made the new root whole, but not removed the old one, which may have been used since."""
        self._refuse_holders(self._new)
        with contextlib.closing(Index(self._new / "index.db", BUSY_TIMEOUT_S)) as index:
            used = index.counters().get("recency", 0)
        if mark is None or mark.recency != used:
            raise RootError(
                f"{self._new} holds the whole cache by now, and has been used since. Nothing was changed. Use it, and "
                f"remove {self._old}; or clear it, and move again."
            )
        (self._new / "store.json").unlink()

    def _is_there(self, name: RecordName) -> bool:
        source, target = self._source.files.path(name), self._target.files.path(name)
        try:
            return target.lstat().st_size == source.lstat().st_size
        except OSError:
            return False

    def _check_room(self, nbytes: int, index: Index) -> None:
        there = next(each for each in (self._new, *self._new.parents) if each.is_dir())
        need = index.own_nbytes() + _PIECE
        if there.stat().st_dev != self._old.stat().st_dev or not self._source.knows_links():
            need += nbytes + (self._settings.limits.min_free_bytes or 0)
        free = self._disk.free_bytes(there)
        if need > free:
            raise RootError(
                f"{format_bytes(free)} are free at {self._new}, and {format_bytes(need)} are needed, with what is to "
                "stay free. Nothing was changed. Make room there, or lower a limit of the cache first."
            )

    def _make_target(self) -> None:
        self._new.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._new.chmod(0o700)
        self._mark(_Mark(str(self._old)))
        self._disk.make_folder(self._new / "tmp")

    def _mark(self, mark: _Mark) -> None:
        temporary = self._new / MARK_BEING_MADE
        temporary.write_bytes(msgspec.json.encode(mark))
        self._disk.rename(temporary, self._new / MARK)

    def _bring(self, name: RecordName) -> None:
        """One record: a second name on the same disk, else a copy whose every byte is checked."""
        source, target = self._source.files.path(name), self._target.files.path(name)
        self._target.make_folders(target.parent)
        with contextlib.suppress(OSError):
            target.unlink(missing_ok=True)
            if source.stat().st_dev == target.parent.stat().st_dev:
                target.hardlink_to(source)
                return
        self._copy(source, target)
        try:
            self._target.files.read(name)
        except NewerFormat:
            return
        except DamagedRecord:
            if not _equal(source, target):
                target.unlink()
                raise OSError(f"{target} does not hold what was written to it") from None
            self._report.n_damaged += 1

    def _copy(self, source: Path, target: Path) -> None:
        """Copy a file under a temporary name, push it to the medium, rename it."""
        self._target.make_folders(target.parent)
        temporary = self._new / "tmp" / "moving.tmp"
        temporary.unlink(missing_ok=True)
        fd = self._disk.create(temporary)
        try:
            with source.open("rb") as stream:
                while piece := stream.read(_PIECE):
                    rest = memoryview(piece)
                    while rest:
                        rest = rest[self._disk.write(fd, [rest]) :]
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)
        self._disk.rename(temporary, target)

    def _copy_index(self, index: Index) -> None:
        for suffix in ("", "-wal", "-shm"):
            (self._new / f"index.db{suffix}").unlink(missing_ok=True)
        with contextlib.closing(Index(index.path, BUSY_TIMEOUT_S)) as reader:
            reader.copy_to(self._new / "index.db")
        fd = self._disk.open(self._new / "index.db")
        try:
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)

    def _try_new(self, n_known: int) -> None:
        """Whether the new root can be opened and knows as many records as the old one; else it is none."""
        try:
            with contextlib.closing(Store.open(self._new)) as store:
                found = sum(n_files for _, n_files, _ in store.namespaces())
            if found < n_known:
                raise RootError(f"the copy in {self._new} does not know its own records")
        except RootError as error:
            self._report.finished = False
            (self._new / "store.json").unlink(missing_ok=True)
            raise RootError(f"The copy in {self._new} cannot be used: {error} The cache is in {self._old}.") from error

    def _finish(self) -> None:
        self._report.finished = True
        self._report.left_behind = self._source.remove()
        with contextlib.suppress(OSError):
            (self._new / MARK).unlink()
        if self._report.left_behind:
            log.warning("%d files were left in %s, where the cache was", len(self._report.left_behind), self._old)


def tidy_up(root: Path, disk: Disk | None = None) -> bool:
    """Remove the old root of a move that ended before it could; whether there was anything to do.

    Args:
        root: a root that is whole.
        disk: the file operations.
    """
    mark = _read_mark(root)
    if mark is None or not (root / "store.json").is_file():
        return False
    old = Path(mark.source)
    if (old / "store.json").exists():
        return False  # it is, or is again, a root of its own
    left = Tree(old, disk or Disk()).remove() if old.is_dir() else []
    with contextlib.suppress(OSError):
        (root / MARK).unlink()
    log.info("what a move had left in %s is removed; %d other files stay there", old, len(left))
    return True


def _n_known(index: Index) -> int:
    return sum(n_files for _, n_files, _ in index.namespaces())


def _read_mark(folder: Path) -> _Mark | None:
    try:
        return msgspec.json.decode(read_small(folder / MARK), type=_Mark)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _process(number: int | None) -> str:
    if number is None:
        return "another process"
    if number == os.getpid():
        return f"this process ({number})"
    with contextlib.suppress(psutil.Error):
        return f"process {number} ({psutil.Process(number).name()})"
    return f"process {number}"


def _equal(a: Path, b: Path) -> bool:
    with a.open("rb") as one, b.open("rb") as other:
        while True:
            piece = one.read(_PIECE)
            if piece != other.read(_PIECE):
                return False
            if not piece:
                return True
