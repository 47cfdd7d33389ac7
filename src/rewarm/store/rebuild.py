"""Build the index anew from the record files: headers only, in small transactions, so that others go on meanwhile.

Recency, hits and counters are lost, nothing else. Files that are provably bad go to quarantine; it touches
only files that have the names of records.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager

from rewarm.errors import DamagedRecord, NewerFormat
from rewarm.format.record import Header
from rewarm.state.chain import Key
from rewarm.store.files import RecordName
from rewarm.store.index import NewRow
from rewarm.store.recovery import Recovery, enter
from rewarm.store.removal import Remover
from rewarm.store.settings import Settings

BATCH = 200


def rebuild(
    recovery: Recovery,
    remover: Remover,
    settings: Settings,
    writing: AbstractContextManager[object],
    stop: Callable[[], bool],
) -> int:
    """Enter every record that has no row; how many there were, until `stop` said true.

    Args:
        recovery: enters records and entries.
        remover: quarantines.
        settings: of the root: block size, pins.
        writing: held for a batch at a time.
        stop: asked between batches; a rebuild that stopped is done again by the next open.
    """
    index, files = recovery.index, recovery.files
    points: list[Header] = []
    bad: list[tuple[RecordName, str]] = []
    n = 0
    names = files.records()
    while batch := list(itertools.islice(names, BATCH)):
        if stop():
            return n
        with writing, index.transaction():
            n += sum(_enter(recovery, name, points, bad) for name in batch)
    with writing, index.transaction():
        for header in sorted(points, key=lambda each: each.n):
            recovery.restore_entry(header)
        for pin in settings.pins:
            with contextlib.suppress(ValueError):  # no id: nothing that could be pinned
                recovery.entries.pin(bytes.fromhex(pin), pinned=True)
        for file_name, nbytes in files.quarantined():
            index.add_quarantined(file_name, nbytes)
        index.set_built()
    for name, why in bad:
        with writing:
            remover.quarantine(name, why)
    with writing, index.transaction():
        index.expose_orphans(settings.block_tokens)
    return n


def _enter(recovery: Recovery, name: RecordName, points: list[Header], bad: list[tuple[RecordName, str]]) -> bool:
    """Enter one record out of its header; whether it was good."""
    try:
        header = recovery.files.read_header(name)
    except NewerFormat:
        nbytes = recovery.files.nbytes(name)
        recovery.index.insert(NewRow(name, Key(bytes(32)), b"", bytes(32), 0, None, nbytes), 0)
        return False
    except DamagedRecord as error:
        bad.append((name, str(error)))
        return False
    except OSError:
        return False
    if recovery.index.row(name.key) is None:
        enter(recovery.index, name, header, recovery.files.nbytes(name))
    if name.is_point and header.entry:
        points.append(header)
    return True
