"""`rewarm llama-server`: llama-server as it is, with its KV cache kept on disk. Passes every argument on."""

from __future__ import annotations

import typer

from rewarm.cli import extras


def llama_server(context: typer.Context) -> None:
    """Run llama-server with its KV cache on disk.

    Takes every flag of llama-server, flags that say where the cache lives and how large it may grow, and
    --llama-server PATH for your own binary.
    """
    raise typer.Exit(extras.llama_server_main()(context.args))
