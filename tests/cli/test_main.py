"""The command line as a whole: it starts without any engine, and says what is missing in words."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

import rewarm
from rewarm.cli.app import app
from rewarm.cli.extras import EXTRAS, needs
from rewarm.errors import EngineError

ROOT = Path(__file__).resolve().parent.parent.parent

HIDING = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
from rewarm.cli.main import main
main()
"""
ENGINES_AND_GATEWAY = sorted({name for extra, names in EXTRAS.items() if extra != "cli" for name in names})


def run(*arguments: str, hidden: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """`rewarm ARGUMENTS` in a process in which the packages `hidden` are not installed."""
    line = [sys.executable, "-c", HIDING.format(hidden=set(hidden)), *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["ls"],
        ["ls", "--json"],
        ["clear", "--yes"],
        ["demo", "--help"],
        ["serve", "--help"],
        ["stats", "--json"],
        ["models"],
        ["config"],
        ["verify"],
        ["repair"],
        ["warm", "--help"],
    ],
    ids=" ".join,
)
def test_it_works_with_no_engine_and_no_gateway_installed(arguments: list[str]) -> None:
    done = run(*arguments, hidden=ENGINES_AND_GATEWAY)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [(["mlx-lm", "--help"], "mlx"), (["llama-server", "--help"], "llama"), (["demo"], "mlx"), (["serve"], "gateway")],
    ids=["mlx-lm", "llama-server", "demo", "serve"],
)
def test_a_command_without_its_extra_says_what_to_install(arguments: list[str], extra: str) -> None:
    done = run(*arguments, hidden=ENGINES_AND_GATEWAY)
    assert done.returncode == EngineError.exit_code
    assert f"pip install 'rewarm[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_its_own_extra_it_says_what_to_install() -> None:
    done = run("--help", hidden=EXTRAS["cli"])
    assert done.returncode == 1
    assert "pip install 'rewarm[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_import_that_fails_for_another_cause_is_not_hidden() -> None:
    with pytest.raises(ModuleNotFoundError, match="ours"), needs("mlx"):
        raise ModuleNotFoundError("ours", name="rewarm.adapters.mlx.gone")


def test_it_names_its_version_and_its_commands() -> None:
    assert run("--version").stdout == f"rewarm {rewarm.__version__}\n"
    words = run("--help").stdout.split()
    for command in ("serve", "mlx-lm", "llama-server", "ls", "clear", "demo"):
        assert command in words


def test_python_dash_m_is_the_same() -> None:
    done = subprocess.run([sys.executable, "-m", "rewarm", "--version"], capture_output=True, text=True)
    assert done.stdout == f"rewarm {rewarm.__version__}\n"


def test_a_wrong_option_is_exit_code_2() -> None:
    done = run("ls", "--no-such-option")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_every_command_and_option_is_documented() -> None:
    sections = {
        part.split("\n", 1)[0]: part for part in (ROOT / "docs" / "cli.md").read_text().split("\n## rewarm ")[1:]
    }
    commands = dict(_commands(typer.main.get_group(app)))
    assert set(sections) == set(commands)
    for name, command in commands.items():
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("-"):
                    assert f"`{option}" in sections[name], f"{name} {option}"


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its name, those of groups too."""
    for name, command in group.commands.items():
        yield f"{before}{name}", command
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")


def test_the_flags_of_the_mlx_lm_worker_are_documented() -> None:
    done = run("mlx-lm", "--help")
    assert done.returncode == 0, done.stderr
    ours = set(re.findall(r"--rewarm-[a-z-]+", done.stdout))
    assert ours
    assert ours == set(re.findall(r"--rewarm-[a-z-]+", (ROOT / "docs" / "cli.md").read_text()))
    assert "--prompt-cache-size" in done.stdout, "mlx-lm's own flags are passed through"
