"""Look at every record: is each one whole, and do index and disk agree? Changes nothing.

Holds nobody up: records are read beside everything else that goes on, and what was evicted meanwhile is no
fault. Touches only files that have the names of records; knows no engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from rewarm.errors import DamagedRecord, NewerFormat
from rewarm.store.files import Files, RecordName
from rewarm.store.index import Index

THREADS = 4

Progress = Callable[[int, int], None]
"""Told records looked at, and records in all; on the thread that looked."""


@dataclass(slots=True)
class Report:
    """What a look at every record found.

    Attributes:
        n_good: records whose every byte is right.
        n_newer: records of a later format, left alone.
        n_unreadable: files that could not be read now, left alone.
        nbytes_indexed: bytes that the limits count for records.
        nbytes_allocated: bytes that the file system has allocated for them.
        damaged: names of bad files, and what is wrong with them.
        missing: records that the index knows and the disk does not.
        unknown: files with a record's name that the index does not know.
        bad: the damaged records, for a quarantine.
    """

    n_good: int = 0
    n_newer: int = 0
    n_unreadable: int = 0
    nbytes_indexed: int = 0
    nbytes_allocated: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    bad: list[tuple[RecordName, str]] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether index and files agree and nothing is bad."""
        return not (self.damaged or self.missing or self.unknown or self.n_unreadable)


def verify(index: Index, files: Files, progress: Progress | None = None) -> Report:
    """Read every record that the index or the disk knows, a few at a time."""
    report, lock = Report(), threading.Lock()
    known = {row.name: row.nbytes for row in list(index.by_use())}
    on_disk = set(files.records())
    names = sorted(on_disk, key=lambda each: each.key)
    n_done = 0

    def look(name: RecordName) -> None:
        nonlocal n_done
        tell = _look(name, files)
        with lock:
            tell(report)
            n_done += 1
            if progress is not None:
                progress(n_done, len(names))

    with ThreadPoolExecutor(THREADS, "rewarm-verify") as pool:
        for _ in pool.map(look, names):
            pass
    # What came or went since the look at both sides is no disagreement.
    report.missing = sorted(
        name.file_name for name in known.keys() - on_disk if index.row(name.key) is not None and not files.exists(name)
    )
    report.unknown = sorted(
        name.file_name for name in on_disk - known.keys() if index.row(name.key) is None and files.exists(name)
    )
    report.nbytes_indexed = sum(known.values())
    report.nbytes_allocated = sum(map(files.nbytes_allocated, on_disk))
    report.damaged.sort()
    return report


def _look(name: RecordName, files: Files) -> Callable[[Report], None]:
    """Read one record; what to note of it."""
    try:
        files.read(name)
    except DamagedRecord as error:
        return partial(_note_damaged, name, str(error))
    except NewerFormat:
        return partial(_count, "n_newer")
    except FileNotFoundError:
        return _nothing
    except OSError:
        return partial(_count, "n_unreadable")
    return partial(_count, "n_good")


def _count(what: str, report: Report) -> None:
    setattr(report, what, getattr(report, what) + 1)


def _note_damaged(name: RecordName, why: str, report: Report) -> None:
    report.damaged.append((name.file_name, why))
    report.bad.append((name, why))


def _nothing(_: Report) -> None:
    """Evicted since the tree was listed."""
