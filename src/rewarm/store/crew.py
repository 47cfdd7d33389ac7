"""Work in two at once: the calling thread, and a helper that is started when it is first worth it.

What a record costs, its checksums and the copy into the system's own memory, lets the interpreter go on
meanwhile. It does not know what the work is.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Crew:
    """One helper beside the caller; used by one caller at a time.

    The helper is a daemon, so that a disk that holds it up does not hold up the end of the process.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[T], bool], items: Sequence[T]) -> None:
        """Have `work` done for each of `items`, begun in their order, two at a time.

        Args:
            work: returns whether what comes behind is to be begun; must not raise.
            items: what to work on.
        """
        left = deque(items)
        ended = threading.Event()

        def share() -> None:
            while left:
                try:
                    item = left.popleft()
                except IndexError:  # the other one has taken it
                    return
                if not work(item):
                    left.clear()

        def help_out() -> None:
            try:
                share()
            finally:
                ended.set()

        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="rewarm-writer-2", daemon=True)
            self._thread.start()
        self._tasks.put(help_out)
        share()
        ended.wait()

    def close(self) -> None:
        """Let the helper end."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread = None

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task
