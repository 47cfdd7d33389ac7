"""`python -m rewarm`: the command line, for where the script `rewarm` is not on the path."""

from __future__ import annotations

from rewarm.cli.main import main

if __name__ == "__main__":
    main()
