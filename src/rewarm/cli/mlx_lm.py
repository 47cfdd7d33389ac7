"""`rewarm mlx-lm`: mlx-lm's own server, with its KV cache kept on disk. Passes every argument on."""

from __future__ import annotations

import typer

from rewarm.cli import extras

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Nothing of the arguments is ours, `--help` included."""


def mlx_lm(context: typer.Context) -> None:
    """Run mlx_lm.server with its KV cache on disk.

    Takes every flag of mlx_lm.server, and flags that say where the cache lives and how large it may grow.
    """
    raise typer.Exit(extras.mlx_lm_main()(context.args))
