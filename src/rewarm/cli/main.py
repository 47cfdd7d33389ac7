"""Where the command line begins: errors become one message and an exit code."""

from __future__ import annotations

import sys

from rewarm.errors import RewarmError


def main() -> None:
    """Run the command that the arguments name; ends with its exit code."""
    try:
        from rewarm.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "typer"):
            raise
        sys.exit(
            f"The command line needs the Python package {error.name}, which is not installed. "
            "Install it with: pip install 'rewarm[cli]'"
        )
    from rewarm.cli.output import be_safe

    be_safe()
    try:
        app()
    except RewarmError as error:
        sys.stderr.write(f"rewarm: {error}\n")
        sys.exit(error.exit_code)
