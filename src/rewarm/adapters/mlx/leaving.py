"""A client that leaves while its reply is computed. By itself mlx-lm would not know before it writes, at the end.

Knows a connection and what to call; not the engine.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def watched(client: socket.socket, leave: Callable[[], None]) -> Iterator[None]:
    """Call `leave`, once and on a thread of its own, when the client closes its side before the block ends."""
    over, done = socket.socketpair()

    def watch() -> None:
        with contextlib.suppress(OSError, ValueError):
            ready, _, _ = select.select([client, over], [], [])
            # What it sends meanwhile is its next request; then nobody can tell any more whether it is there.
            if over not in ready and client.recv(1, socket.MSG_PEEK) == b"":
                leave()

    watcher = threading.Thread(target=watch, name="rewarm-leaving", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.close()
        watcher.join()
        over.close()
