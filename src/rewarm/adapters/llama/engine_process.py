"""The llama-server inside the `xllamacpp` wheel, as a program of its own: the same flags, the same API.

An assertion inside llama.cpp aborts the process that it runs in; so it runs in this one. Takes its key from
the environment (`LLAMA_API_KEY`), and ends when its standard input does, when that is a pipe: with whoever
started it. Knows nothing of the cache.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import stat
import sys
import threading
from typing import Any

import xllamacpp

from rewarm.adapters.llama import engine_params, flags

USAGE = "Runs llama-server as it is inside the xllamacpp wheel. Takes these of its flags:"


def main(arguments: list[str]) -> int:
    """Serve until a signal, or until standard input ends; the exit code."""
    if "--version" in arguments:
        print(f"version: xllamacpp {importlib.metadata.version('xllamacpp')}")  # noqa: T201
        return 0
    try:
        given = flags.parse(arguments)
        if given.last("--help"):
            print("\n  ".join([USAGE, *engine_params.HELP]))  # noqa: T201
            return 0
        params = engine_params.params(given)
    except (flags.UnusableFlags, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    params.api_keys = [key for key in os.environ.get("LLAMA_API_KEY", "").split(",") if key]
    return _serve(params)


def _serve(params: Any) -> int:
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=_read_to_the_end, args=(over,), daemon=True).start()
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        print(f"error: the model could not be loaded: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"listening on {server.listening_address}", flush=True)  # noqa: T201
    over.wait()
    sys.stdout.flush()
    # Not by way of the server's own end: it waits for the reply in progress.
    os._exit(0)


def _read_to_the_end(over: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    over.set()
    # While the model is being loaded nobody waits for `over`.
    threading.Timer(1.0, os._exit, (0,)).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
