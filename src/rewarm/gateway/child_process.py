"""A child process: started on a leash, heard line by line, ended. Knows nothing of what it is or says.

Its end is the end of the process itself. asyncio's own `Process.wait` waits for its output as well, in some
versions of Python, and a child of the child may hold that open for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import cast

_LINE_BYTES = 2000
_SILENCE_S = 0.5


class Child(asyncio.SubprocessProtocol):
    """A process that runs, or ran. Belongs to the event loop that started it; made by `start`.

    Args:
        on_line: called with each line that it prints, standard error included; long ones are cut.
        leash: our end of the pipe that is its standard input; never written.

    Attributes:
        pid: of the process.
        returncode: None while it runs; negative for a signal.
    """

    def __init__(self, on_line: Callable[[bytes], None], leash: int) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.leash = leash
        self._on_line = on_line
        self._rest = b""
        self._has_exited = asyncio.Event()
        self._is_silent = asyncio.Event()
        self._transport: asyncio.SubprocessTransport
        self._is_closed = False

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str], on_line: Callable[[bytes], None]) -> Child:
        """Start `command`.

        Raises:
            OSError: it cannot be started.
        """
        # Held open and never written: its end tells the child that this process is gone, however it went.
        # Not asyncio's own, which is a socket on some systems, and a worker watches a pipe only.
        input_, leash = os.pipe()
        child = cls(on_line, leash)
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: child,
                *command,
                stdin=input_,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(env),
                # A Ctrl-C in the terminal is for this process, which then ends its children in order.
                start_new_session=True,
            )
        except BaseException:
            os.close(leash)
            raise
        finally:
            os.close(input_)
        return child

    async def wait(self) -> int:
        """Wait until it ended; its return code."""
        await self._has_exited.wait()
        return cast(int, self.returncode)

    async def until_silent(self) -> None:
        """Wait until its last words are heard, or for a moment when another process holds its output open."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SILENCE_S):
                await self._is_silent.wait()

    async def end(self, timeout_s: float) -> None:
        """End it and wait until it is gone: SIGTERM, and SIGKILL when it does not go within `timeout_s`."""
        with contextlib.suppress(ProcessLookupError):
            self._transport.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
        await self.until_silent()
        self.close()

    def kill(self) -> None:
        """End it at once."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._transport.kill()

    def close(self) -> None:
        """Let go of its input and output; once it ended."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self.leash)
            self._transport.close()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It runs."""
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self.pid = self._transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """It printed something. In pieces, since a line may be longer than any buffer."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LINE_BYTES:]
        for line in lines:
            self._on_line(line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Nobody can print any more."""
        self._on_line(self._rest)
        self._rest = b""
        self._is_silent.set()

    def process_exited(self) -> None:
        """It ended."""
        self.returncode = self._transport.get_returncode()
        self._has_exited.set()
