"""`rewarm mlx-lm`: mlx_lm.server as it is, with the disk beneath its prompt cache.

Replaces `mlx_lm.server.run`, which `mlx_lm.server.main` looks up when it is called; every flag of that
server stays. Owns the process: its signals, its exit code, and the prefix cache's opening and closing.
Knows nothing of the gateway but the secret that it may set in the environment.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

import mlx_lm.server as engine

import rewarm
from rewarm.adapters.mlx.handler import Handler, WithoutPrompts
from rewarm.adapters.mlx.seam import ModelProvider, ResponseGenerator, StoredPromptCache
from rewarm.adapters.worker_process import on_end_of_input
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.errors import EngineError, RewarmError
from rewarm.state.reason import Reason
from rewarm.units import parse_bytes

log = logging.getLogger(__name__)

SECRET_VARIABLE = "REWARM_WORKER_SECRET"  # noqa: S105
"""The environment variable whose value every request must bear."""

_SHUTDOWN_S = 5.0
"""From the signal to the end: what is queued is written in this time."""

_GENERATION_STOP_S = 1.5
"""Part of it that an evaluation in progress may take; then the process ends without it."""


def main(argv: list[str]) -> int:
    """Run the server with the arguments `argv`; returns an exit code only where it did not begin to serve."""
    parser = _parser()
    options, others = parser.parse_known_args(argv)
    before = sys.argv, engine.run

    def run(host: str, port: int, model_provider: Any, *_: Any, **__: Any) -> None:
        serve(host, port, model_provider.cli_args, options)

    sys.argv, engine.run = ["rewarm mlx-lm", *others], run
    try:
        engine.main()
    except SystemExit as end:
        if any(flag in ("-h", "--help") for flag in others):
            # mlx-lm has printed its own flags and asked to end.
            parser.print_help()
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except OSError as error:
        print(f"rewarm mlx-lm: {error}", file=sys.stderr)  # noqa: T201
        return EngineError.exit_code
    finally:
        sys.argv, engine.run = before
    return 0


def serve(host: str, port: int, cli_args: Any, options: argparse.Namespace) -> NoReturn:
    """Serve until a signal (exit code 0) or a failure of the engine (4), then end the process."""
    logging.getLogger().addFilter(WithoutPrompts())
    cache, why_not = open_cache(options)
    provider = ModelProvider(cli_args, cache, why_not)
    prompt_cache = StoredPromptCache(cli_args.prompt_cache_size, provider)
    if cache is not None:
        cache.on_forget(prompt_cache.forget_soon)
    failures: list[str] = []
    secret = os.environ.get(SECRET_VARIABLE) or None
    server = _listen(host, port, lambda *args: Handler(generator, *args, secret=secret))

    def end(failure: str) -> None:
        failures.append(failure)
        threading.Thread(target=server.shutdown, daemon=True).start()

    generator = ResponseGenerator(provider, prompt_cache, end)
    _on_signals(lambda: threading.Thread(target=server.shutdown, daemon=True).start())
    on_end_of_input(server.shutdown)
    log.info("rewarm: serving at http://%s:%d", host, server.server_address[1])
    server.serve_forever(poll_interval=0.05)
    server.server_close()
    if failures:
        print(f"rewarm mlx-lm: the engine ended: {failures[0]}", file=sys.stderr)  # noqa: T201
    _end(generator, cache, EngineError.exit_code if failures else 0)


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
    path = options.rewarm_dir or (Path(where) if (where := os.environ.get("REWARM_DIR")) else None)
    try:
        cache = rewarm.open(path, limits=rewarm.Limits(**limits) if limits else None)
        if limits:
            # `open` leaves the limits of a folder that was there alone; a flag is an order.
            cache.set_limits(rewarm.Limits(**limits))
    except (OSError, RewarmError) as error:
        why = f"The cache folder cannot be used, so requests are served uncached: {error}"
        log.warning("rewarm: %s", why)
        return None, (Reason.UNAVAILABLE, why)
    log.info("rewarm: keeping KV in %s", cache.root)
    return cache, (Reason.HIT, "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rewarm mlx-lm", add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    group = parser.add_argument_group("rewarm", "Where the KV cache is kept on disk, and how much of it.")
    group.add_argument(
        "--rewarm-dir",
        type=Path,
        metavar="DIR",
        help="folder of the cache (default: $REWARM_DIR, else a folder in the user's cache)",
    )
    group.add_argument("--rewarm-max-bytes", type=_size, metavar="SIZE", help="most bytes to keep, such as 20GiB")
    group.add_argument("--rewarm-max-files", type=int, metavar="N", help="most files to keep")
    group.add_argument("--rewarm-min-free", type=_size, metavar="SIZE", help="bytes to leave free on the disk")
    group.add_argument("--rewarm-off", action="store_true", help="serve without the disk")
    return parser


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _listen(host: str, port: int, handler: Callable[..., Handler]) -> ThreadingHTTPServer:
    """A server that is bound to `host` and `port`.

    Raises:
        OSError: the address is in use, or none of this machine.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    server_class = type("Server", (ThreadingHTTPServer,), {"address_family": family, "request_queue_size": 128})
    server: ThreadingHTTPServer = server_class(address, handler)
    return server


def _on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` at the first SIGTERM or SIGINT; a second one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        return

    def handle(_signal: int, _frame: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def _end(generator: ResponseGenerator, cache: PrefixCache | None, exit_code: int) -> NoReturn:
    """Stop generating, write what is queued, end the process."""
    deadline = time.monotonic() + _SHUTDOWN_S
    generator.stop(_GENERATION_STOP_S)
    if cache is not None:
        cache.close(timeout=max(0.1, deadline - time.monotonic()))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter: an evaluation in progress would hold the process for as long as it takes,
    # and MLX's own threads abort it now and then when they are torn down.
    os._exit(exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
