"""Runs a command and ends it when standard input ends: no engine outlives whoever started it.

`python -m rewarm.adapters.llama.leash COMMAND...`; for programs that do not watch over this themselves. Works
where the kernel cannot tie a child to its parent, and when the parent is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

GRACE_S = 3.0


def main(command: list[str]) -> int:
    """Run `command` to its end, or to the end of standard input; its exit status."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - a list that the user named
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: process.terminate())
    threading.Thread(target=_until_input_ends, args=(process,), daemon=True).start()
    code = process.wait()
    # As a shell does: a signal's number is told by an exit status above 128.
    return 128 - code if code < 0 else code


def _until_input_ends(process: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
