"""`rewarm llama-server`: an unmodified llama-server behind a face of its own port and API, with memory.

Owns the process: its signals, its exit code, the prefix cache's opening and closing. Knows nothing of the
gateway but the secret that it may set in the environment.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import platformdirs

from rewarm.adapters.llama import flags
from rewarm.adapters.llama.engine import Program, find_program
from rewarm.adapters.llama.face import Access
from rewarm.adapters.llama.flags import Flags, UnusableFlags
from rewarm.adapters.llama.proxy import Handler
from rewarm.adapters.llama.raw_folder import RawFolder
from rewarm.adapters.llama.runner import Runner
from rewarm.adapters.worker_process import (
    SECRET_VARIABLE,
    cache_flags,
    listen,
    on_end_of_input,
    on_signals,
    open_cache,
)
from rewarm.errors import EngineError
from rewarm.state.reason import Reason

log = logging.getLogger(__name__)

_HOST, _PORT = "127.0.0.1", 8080
_BAD_FLAGS = 2


def main(argv: list[str]) -> int:
    """Run the server with the arguments `argv`; returns an exit code only where it did not begin to serve."""
    parser = cache_flags("rewarm llama-server")
    parser.add_argument_group("engine").add_argument(
        "--llama-server", type=Path, metavar="PATH", help="your own llama-server (default: the one in xllamacpp)"
    )
    options, others = parser.parse_known_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s - %(levelname)s - %(message)s")
    try:
        program = find_program(options.llama_server)
        given = flags.parse(others, os.environ if program.reads_environment else None)
        if given.last("--help") or given.last("--version"):
            return _print_about(program, given, parser)
        serve(program, given, options)
    except (UnusableFlags, EngineError, OSError) as error:
        print(f"rewarm llama-server: {error}", file=sys.stderr)  # noqa: T201
        return _BAD_FLAGS if isinstance(error, UnusableFlags) else EngineError.exit_code


def serve(program: Program, given: Flags, options: argparse.Namespace) -> NoReturn:
    """Serve until a signal (exit code 0), or end with 4 when the engine cannot be started at first.

    Raises:
        OSError: the address cannot be had.
        UnusableFlags: a flag makes no sense.
    """
    if given.value("--ssl-key-file") or given.value("--ssl-cert-file"):
        raise UnusableFlags("--ssl-key-file: TLS is not served here; put a proxy in front")
    access = Access(os.environ.get(SECRET_VARIABLE) or None, given.api_keys, given.value("--api-prefix").rstrip("/"))
    for warning in flags.warnings(given):
        log.warning("rewarm: %s", warning)
    defeated = flags.what_defeats(given)
    server = listen(given.value("--host", _HOST), given.number("--port", _PORT), lambda *a: Handler(runner, access, *a))
    cache, why_not = (None, (Reason.DISABLED, defeated)) if defeated else open_cache(options)
    # A gateway may give a worker a cache later.
    has_slots = not defeated and (cache is not None or access.secret is not None)
    raw = RawFolder(platformdirs.user_cache_path("rewarm") / "raw") if has_slots else None
    runner = Runner(program, given, cache, why_not, raw)
    over = threading.Event()
    failures: list[str] = []

    def stop() -> None:
        over.set()
        threading.Thread(target=server.shutdown, daemon=True).start()

    def start() -> None:
        try:
            runner.ensure()
            log.info("rewarm: serving at http://%s:%d", *server.server_address[:2])
        except EngineError as error:
            if not over.is_set():
                failures.append(str(error))
                stop()

    on_signals(stop)
    on_end_of_input(stop)
    threading.Thread(target=start, name="rewarm-start", daemon=True).start()
    server.serve_forever(poll_interval=0.05)
    server.server_close()
    stop_timeout_s: float = options.rewarm_stop_timeout
    deadline = time.monotonic() + stop_timeout_s
    if failures:
        print(f"rewarm llama-server: {failures[0]}", file=sys.stderr)  # noqa: T201
    runner.close(deadline - min(1.0, stop_timeout_s / 4))
    runner.close_cache(max(0.5, deadline - time.monotonic()))
    runner.end()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter: a client that still reads would hold the process.
    os._exit(EngineError.exit_code if failures else 0)


def _print_about(program: Program, given: Flags, parser: argparse.ArgumentParser) -> int:
    if given.last("--help"):
        parser.print_help()
        print("\nllama-server's own flags, as this engine names them:")  # noqa: T201
        print(" ".join(sorted(program.flags)))  # noqa: T201
    else:
        print(program.version)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
