"""A client that leaves while its reply is computed. By itself an engine would not know before it writes, at the end.

Knows a connection and what to call; not the engine.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Iterator

# Not select.select: it refuses descriptors past 1023, which a server with many records open reaches.


def is_gone(client: socket.socket) -> bool:
    """Whether a client has closed its side."""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ)
            return bool(selector.select(0)) and client.recv(1, socket.MSG_PEEK) == b""
    except (OSError, ValueError):
        return True


@contextlib.contextmanager
def watched(client: socket.socket, leave: Callable[[], object]) -> Iterator[None]:
    """Call `leave`, once and on a thread of its own, when the client closes its side before the block ends."""
    over, done = socket.socketpair()

    def watch() -> None:
        with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ)
            selector.register(over, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select()}
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
