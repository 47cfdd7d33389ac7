"""`rewarm mlx-lm`: mlx_lm.server as it is, with the disk beneath its prompt cache.

Replaces `mlx_lm.server.run`, which `mlx_lm.server.main` looks up when it is called; every flag of that
server stays. Owns the process: its signals, its exit code, and the prefix cache's opening and closing.
Knows nothing of the gateway but the secret that it may set in the environment.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from typing import Any, NoReturn

import mlx_lm.server as engine

from rewarm.adapters import worker_process
from rewarm.adapters.mlx.handler import Handler, WithoutPrompts
from rewarm.adapters.mlx.memory_tier import StoredPromptCache
from rewarm.adapters.mlx.provider import ModelProvider
from rewarm.adapters.mlx.seam import ResponseGenerator
from rewarm.errors import EngineError

log = logging.getLogger(__name__)

_GENERATION_SHARE = 0.3
"""Part of the time to stop that an evaluation in progress may take; then the process ends without it."""


def main(argv: list[str]) -> int:
    """Run the server with the arguments `argv`; returns an exit code only where it did not begin to serve."""
    parser = worker_process.cache_flags("rewarm mlx-lm")
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
    cache, why_not = worker_process.open_cache(options)
    provider = ModelProvider(cli_args, cache, why_not)
    prompt_cache = StoredPromptCache(cli_args.prompt_cache_size, provider)
    if cache is not None:
        cache.on_forget(prompt_cache.forget_soon)
    failures: list[str] = []
    secret = os.environ.get(worker_process.SECRET_VARIABLE) or None
    server = worker_process.listen(host, port, lambda *args: Handler(generator, *args, secret=secret))

    def end(failure: str) -> None:
        failures.append(failure)
        threading.Thread(target=server.shutdown, daemon=True).start()

    generator = ResponseGenerator(provider, prompt_cache, end)
    worker_process.on_signals(lambda: threading.Thread(target=server.shutdown, daemon=True).start())
    worker_process.on_end_of_input(server.shutdown)
    log.info("rewarm: serving at http://%s:%d", host, server.server_address[1])
    server.serve_forever(poll_interval=0.05)
    server.server_close()
    if failures:
        print(f"rewarm mlx-lm: the engine ended: {failures[0]}", file=sys.stderr)  # noqa: T201
    stop_timeout_s = float(getattr(options, "rewarm_stop_timeout", worker_process.SHUTDOWN_S))
    _end(generator, provider, stop_timeout_s, EngineError.exit_code if failures else 0)


def _end(generator: ResponseGenerator, provider: ModelProvider, stop_timeout_s: float, exit_code: int) -> NoReturn:
    """Stop generating, write what is queued, end the process."""
    deadline = time.monotonic() + stop_timeout_s
    generator.stop(stop_timeout_s * _GENERATION_SHARE)
    cache = provider.cache
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
