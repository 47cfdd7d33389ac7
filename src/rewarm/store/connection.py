"""One SQLite connection, used under a lock: transactions, deadlines, and errors that say whether a rebuild is due.

Knows no tables but the schema that it makes.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rewarm.errors import IndexFault
from rewarm.store.schema import PAGE_NBYTES, SCHEMA, VERSION

LOG_PAGES = 64
LOG_NBYTES = 2 * LOG_PAGES * PAGE_NBYTES
"""What the log takes at the most, as long as no reader holds it up."""

_PASSING = {"SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_INTERRUPT", "SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR"}


class Connection:
    """One connection to `index.db`.

    Args:
        path: of the database; made when it is not there.
        busy_timeout_s: how long to wait for another process' transaction.

    Raises:
        IndexFault: it cannot be opened; `broken` when it is no index of this version.
    """

    def __init__(self, path: Path, busy_timeout_s: float) -> None:
        self.path = path
        self.why_closed = "the index is closed"
        self._lock = threading.RLock()
        self._deadline = float("inf")
        if os.path.lexists(path) and not (path.is_file() and not path.is_symlink()):
            raise IndexFault(f"{path.name} is no plain file: move away what is there")
        with contextlib.suppress(OSError):
            # Before SQLite makes it: log and shared memory take over the file's mode, and hold token ids too.
            # Never one that is there: closing it would drop the locks of this process' other connections (POSIX), and
            # the next process to close would take itself for the last one and remove the log under them.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        with self._faults():
            self._db = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
        try:
            self._open()
        except IndexFault:
            self.close()
            raise

    def _open(self) -> None:
        with self._faults():
            for pragma in (f"page_size = {PAGE_NBYTES}", "journal_mode = WAL", "synchronous = NORMAL"):
                self._db.execute(f"PRAGMA {pragma}")
            for pragma in (
                "secure_delete = ON",
                f"wal_autocheckpoint = {LOG_PAGES}",
                f"journal_size_limit = {LOG_NBYTES}",
            ):
                self._db.execute(f"PRAGMA {pragma}")
            self._db.set_progress_handler(self._late, 10_000)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._create()
                version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version != VERSION:
            raise IndexFault(f"the index has version {version}, not {VERSION}", broken=True)

    def _create(self) -> None:
        with contextlib.suppress(sqlite3.OperationalError):  # another process was first
            self._db.executescript(f"BEGIN IMMEDIATE;{SCHEMA}PRAGMA user_version = {VERSION};COMMIT;")
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _late(self) -> int:
        return int(time.monotonic() > self._deadline)

    def close(self) -> None:
        """Close the connection; an unfinished transaction is rolled back."""
        with self._lock, self._faults():
            self._db.close()

    @contextlib.contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Give up statements that take longer than `seconds`, waiting for the connection included.

        Raises:
            TimeoutError: the time is over.
        """
        end = time.monotonic() + seconds
        if not self._lock.acquire(timeout=max(0.0, seconds)):
            raise TimeoutError("the index is busy")
        try:
            self._deadline = end
            yield
        except IndexFault:
            if time.monotonic() > end:
                raise TimeoutError("the index took too long") from None
            raise
        finally:
            self._deadline = float("inf")
            self._lock.release()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """An IMMEDIATE transaction: other writers wait, readers go on; rolled back by any exception."""
        with self._lock:
            self.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(IndexFault):
                    if self._db.in_transaction:
                        self.execute("ROLLBACK")
                raise

    def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement."""
        with self._lock, self._faults():
            return self._db.execute(sql, values)

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """All rows of one query."""
        with self._lock, self._faults():
            return self._db.execute(sql, values).fetchall()

    def each(self, sql: str) -> Iterator[Any]:
        """The rows of one query, as they come; the connection is held meanwhile."""
        with self._lock, self._faults():
            yield from self._db.execute(sql)

    def one(self, sql: str, values: Sequence[Any] = ()) -> Any:
        """The first row of one query, or None."""
        with self._lock, self._faults():
            return self._db.execute(sql, values).fetchone()

    def version(self) -> int:
        """A number that changes when another connection, of whichever process, has committed something."""
        return int(self.one("PRAGMA data_version")[0])

    def copy_to(self, path: Path) -> None:
        """Write what is committed to a new database at `path`, mode 0600; others go on reading and writing.

        Raises:
            OSError: there is a file already, or it cannot be made.
        """
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        with self._lock, self._faults(), contextlib.closing(sqlite3.connect(path)) as target:
            self._db.backup(target)

    def erase_log(self) -> bool:
        """Move the log into the database and truncate it, so that deleted rows are in neither; whether it is."""
        busy = self.one("PRAGMA wal_checkpoint(TRUNCATE)")
        return busy is not None and not busy[0]

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn SQLite's errors into ours, which say whether a rebuild is needed."""
        try:
            yield
        except sqlite3.ProgrammingError as error:
            closed = "closed" in str(error)
            raise IndexFault(self.why_closed if closed else f"the index cannot be used now: {error}") from None
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorname", "") or ""
            passing = any(code.startswith(name) for name in _PASSING)
            broken = code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")) or (
                isinstance(error, sqlite3.DatabaseError) and not passing and code in ("SQLITE_ERROR", "SQLITE_SCHEMA")
            )
            raise IndexFault(f"the index cannot be used now: {error}", broken=broken) from None
