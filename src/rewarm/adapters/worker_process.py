"""What every worker process has in common: the flags of the cache, its opening, the address, the signals.

Knows no engine. A worker's main function owns the process and uses these.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import rewarm
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.errors import RewarmError
from rewarm.state.reason import Reason
from rewarm.store.settings import format_limits
from rewarm.units import parse_bytes

log = logging.getLogger(__name__)

SECRET_VARIABLE = "REWARM_WORKER_SECRET"  # noqa: S105
"""The environment variable whose value every request must bear."""

SHUTDOWN_S = 5.0
"""From the signal to the end: what is queued is written in this time."""


_LONGEST_S = 86_400.0


def cache_flags(prog: str) -> argparse.ArgumentParser:
    """A parser of the flags that say where the cache lives and how large it may grow; other flags pass it by."""
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    group = parser.add_argument_group("rewarm", "Where the KV cache is kept on disk, and how much of it.")
    group.add_argument(
        "--rewarm-dir",
        type=Path,
        metavar="DIR",
        help="folder of the cache (default: $REWARM_DIR, else dir in the configuration file, else one in the user's "
        "cache)",
    )
    group.add_argument("--rewarm-max-bytes", type=_size, metavar="SIZE", help="most bytes to keep, such as 20GiB")
    group.add_argument("--rewarm-max-files", type=_count, metavar="N", help="most files to keep")
    group.add_argument("--rewarm-min-free", type=_size, metavar="SIZE", help="bytes to leave free on the disk")
    group.add_argument("--rewarm-off", action="store_true", help="serve without the disk")
    group.add_argument(
        "--rewarm-stop-timeout",
        type=_seconds,
        default=SHUTDOWN_S,
        metavar="SECONDS",
        help=f"how long writing may take after SIGTERM (default: {SHUTDOWN_S:g})",
    )
    return parser


def open_cache(options: argparse.Namespace) -> tuple[PrefixCache | None, tuple[Reason, str]]:
    """The prefix cache that the flags ask for; or none, and why: the server then serves uncached."""
    if options.rewarm_off:
        return None, (Reason.DISABLED, "The disk cache is switched off.")
    limits = {
        name: value
        for name, value in (
            ("max_bytes", options.rewarm_max_bytes),
            ("max_files", options.rewarm_max_files),
            ("min_free_bytes", options.rewarm_min_free),
        )
        if value is not None
    }
    try:
        cache = rewarm.open(options.rewarm_dir, limits=rewarm.Limits(**limits) if limits else None)
        if limits:
            # `open` leaves the limits of a folder that was there alone; a flag is an order.
            cache.set_limits(rewarm.Limits(**limits))
        room = format_limits(cache.settings().limits)
    except (OSError, RewarmError, ValueError) as error:
        why = f"The cache folder cannot be used, so requests are served uncached: {error}"
        log.warning("rewarm: %s", why)
        return None, (Reason.UNAVAILABLE, why)
    log.info("rewarm: keeping KV in %s, %s", cache.root, room)
    return cache, (Reason.HIT, "")


def listen(host: str, port: int, handler: Callable[..., BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    """A server that is bound to `host` and `port`.

    Raises:
        OSError: the address is in use, or none of this machine.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    attributes = {"address_family": family, "daemon_threads": True, "request_queue_size": 128}
    server_class = type("Server", (ThreadingHTTPServer,), attributes)
    server: ThreadingHTTPServer = server_class(address, handler)
    return server


def on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` at the first SIGTERM or SIGINT; a second one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        return

    def handle(_signal: int, _frame: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def on_end_of_input(stop: Callable[[], None]) -> None:
    """Call `stop` when standard input ends, if it is a pipe and a gateway started us: so no worker outlives it."""
    if not os.environ.get(SECRET_VARIABLE) or not stat.S_ISFIFO(os.fstat(0).st_mode):
        return

    def read() -> None:
        while os.read(0, 4096):
            pass
        stop()

    threading.Thread(target=read, name="rewarm-input", daemon=True).start()


def _size(text: str) -> int:
    try:
        return _bounded(parse_bytes(text), text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    try:
        return _bounded(int(text), text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of files from 0 to 2**63 - 1") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to {_LONGEST_S:g}")
    return seconds


def _bounded(number: int, text: str) -> int:
    if not 0 <= number < 2**63:
        raise ValueError(f"{text!r} is not between 0 and 2**63 - 1")
    return number
