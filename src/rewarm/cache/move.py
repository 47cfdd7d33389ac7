"""Where a cache lives, for whoever lets people change it: what a folder is like, and moving the cache there.

describe_location(path)              -> Location: can it be written, what is free, what speaks against it
move_root(old, new, progress)        -> MoveReport; the cache must be closed, by this process too
abandon_move(new)                    removes what a stopped move has left
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rewarm.store import moving
from rewarm.store.location import Location, describe_location
from rewarm.store.moving import MoveReport, Progress, Wishes

__all__ = ["Location", "MoveReport", "abandon_move", "describe_location", "move_root"]


def move_root(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    stop: Callable[[], bool] | None = None,
    switch: Callable[[], None] | None = None,
) -> MoveReport:
    """Move the cache at `old` to the folder `new`; nothing of it is lost, however this ends.

    Records are copied and checked (on one disk they only get a second name), then everything is pushed to the
    medium, the new root is opened once, and the old one removed. Files that rewarm did not make stay where they are.
    Called again after a stop, an error or a crash, it goes on where it was.

    Args:
        old: a cache folder that nobody has open.
        new: an empty folder, one that is not there, or where an earlier move from `old` has stopped.
        progress: called with bytes that are done, and in all, after each file, on this thread.
        stop: asked before each file; true ends the move, with the cache whole at `old`.
        switch: called when the cache is whole at `new`, before the one at `old` is removed: the place to remember the
            new folder. If it raises, both are whole.

    Raises:
        RootError: it cannot be moved: somebody has it open (says which process), `new` is not empty or too small, a
            folder cannot be used. Says what is where.

    Returns:
        What was moved; `finished` is false after a stop.
    """
    plain = Wishes()
    wishes = Wishes(progress or plain.progress, stop or plain.stop, switch or plain.switch)
    return moving.move(Path(old).expanduser(), Path(new).expanduser(), wishes)


def abandon_move(new: str | os.PathLike[str]) -> bool:
    """Remove what a stopped move has left in `new`; false where there is no such thing.

    Raises:
        RootError: `new` holds the whole cache by now; nothing is removed.
    """
    return moving.abandon(Path(new).expanduser())
