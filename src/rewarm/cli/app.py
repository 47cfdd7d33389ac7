"""The table of commands. Every command's file is light to import; what is heavy comes through `extras`."""

from __future__ import annotations

from typing import Annotated

import typer

import rewarm
from rewarm.cli.clear import clear
from rewarm.cli.config import config
from rewarm.cli.demo import demo
from rewarm.cli.doctor import doctor
from rewarm.cli.explain import explain
from rewarm.cli.forget import forget
from rewarm.cli.llama_server import llama_server
from rewarm.cli.ls import ls
from rewarm.cli.mlx_lm import SETTINGS, mlx_lm
from rewarm.cli.models import models
from rewarm.cli.pin import pin, unpin
from rewarm.cli.serve import serve
from rewarm.cli.show import show
from rewarm.cli.stats import stats
from rewarm.cli.verify import repair, verify
from rewarm.cli.warm import warm

app = typer.Typer(
    name="rewarm",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command("serve")(serve)
app.command("mlx-lm", context_settings=SETTINGS)(mlx_lm)
app.command("llama-server", context_settings=SETTINGS)(llama_server)
app.command("models")(models)
app.command("ls")(ls)
app.command("show")(show)
app.command("stats")(stats)
app.command("explain")(explain)
app.command("warm")(warm)
app.command("pin")(pin)
app.command("unpin")(unpin)
app.command("forget")(forget)
app.command("clear")(clear)
app.command("verify")(verify)
app.command("repair")(repair)
app.add_typer(config, name="config")
app.command("doctor")(doctor)
app.command("demo")(demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rewarm {rewarm.__version__}")
        raise typer.Exit


@app.callback()
def _rewarm(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Keep the KV cache of local language models on disk, and give it back."""
