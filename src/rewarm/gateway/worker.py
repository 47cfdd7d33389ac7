"""One model's worker process: started at first use, watched, ended so that no orphan stays.

Knows the worker's face (its flags, `/health`, the secret, SIGTERM) and nothing of engines or of what is
asked. Lives in the gateway's event loop and belongs to it; only `prepare` runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from rewarm.errors import EngineError
from rewarm.gateway.child_process import Child
from rewarm.gateway.discovery import nbytes_of
from rewarm.gateway.model_options import Options, worker_flags
from rewarm.gateway.models import Model
from rewarm.gateway.worker_state import Running, State, Status

T = TypeVar("T")
ReplyListener = Callable[[str, Mapping[str, Any], float | None], None]

SECRET_VARIABLE = "REWARM_WORKER_SECRET"  # noqa: S105
HOST = "127.0.0.1"

_LOG_LINES = 200
_LOG_LINE_CHARS = 500
_TOLD_LINES = 12
_POLL_S = 0.1


@dataclass(slots=True)
class Launch:
    """How workers are started and ended.

    Attributes:
        command: the program; `--model`, `--host`, `--port` and the cache folder are added. None: what the model
            asks for.
        cache_dir: the cache folder of workers that are started from now on; None: they run without.
        start_timeout_s: from the start of the process to the first healthy answer.
        stop_timeout_s: from SIGTERM to SIGKILL.
        options: how the model of a name is run, asked when it is started.
        make_room: awaited before a model is loaded, so that others may go.
    """

    command: Sequence[str] | None
    cache_dir: Path | None
    start_timeout_s: float
    stop_timeout_s: float
    options: Callable[[str], Options]
    make_room: Callable[[Worker], Awaitable[None]]


class Worker:
    """The worker of one model.

    Args:
        model: what it loads.
        launch: how.
        listeners: told of each reply: the model's name, the object `rewarm`, seconds to the first token.

    Attributes:
        path: the model's folder or file, once it was prepared.
        loaded_with: the options that the present process was started with; None when none runs.
        used_at: when a request last came or ended, by `time.monotonic`.
    """

    def __init__(self, model: Model, launch: Launch, listeners: Sequence[ReplyListener] = ()) -> None:
        self.model = model
        self._listeners = listeners
        self.path: Path | None = None
        self.loaded_with: Options | None = None
        self.used_at = time.monotonic()
        self._n_asked = 0
        self._nbytes = 0
        self._launch = launch
        self._status = Status(State.STOPPED)
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self._running: Running | None = None
        self._starting: asyncio.Task[Running] | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def status(self) -> Status:
        """What it is doing now."""
        return self._status

    @property
    def log_tail(self) -> list[str]:
        """The last lines that the process printed; of the last process when none runs."""
        return list(self._log)

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return self._running.process.pid if self._running else None

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded and answers nobody."""
        return self._status.state is State.READY and self._n_asked == 0

    @property
    def n_asked(self) -> int:
        """Requests that are being answered, or wait for it to be loaded."""
        return self._n_asked

    @property
    def nbytes(self) -> int:
        """Bytes of the model's weights; 0 where that is not known. Looked up once: lists ask it often."""
        if not self._nbytes:
            self._nbytes = self.model.nbytes or (nbytes_of(self.path) if self.path is not None else 0)
        return self._nbytes

    def begin(self) -> None:
        """A request has come: until its `end` the model is not unloaded for others' sake."""
        self._n_asked += 1
        self.used_at = time.monotonic()

    def end(self) -> None:
        """A request has ended."""
        self._n_asked -= 1
        self.used_at = time.monotonic()

    async def running(self) -> Running:
        """The running process, which is started if there is none.

        Whoever waits here may be cancelled; the start goes on for the others.

        Raises:
            EngineError: it could not be started; says why, with its last words.
        """
        while (stopping := _going_on(self._stopping)) is not None:
            await asyncio.wait([stopping])
        starting = _going_on(self._starting)
        if starting is None:
            if self._running is not None and self._status.state is State.READY:
                return self._running
            self._starting = starting = asyncio.create_task(self._start())
            starting.add_done_callback(_look_at)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not starting.cancelled() or (task is not None and task.cancelling()):
                raise  # it is the one who waits that was cancelled
            raise EngineError(f"The model {self.model.name} was stopped while it was being loaded.") from None

    def note_reply(self, report: Mapping[str, Any], ttft_s: float | None) -> None:
        """A reply has ended: tell those who listen.

        Args:
            report: the worker's object `rewarm`.
            ttft_s: seconds to the first token, of a stream; else None.
        """
        for listener in self._listeners:
            listener(self.model.name, report, ttft_s)

    async def stop(self) -> None:
        """End the process, if there is one, and wait until it is gone; what it holds is written first."""
        stopping = _going_on(self._stopping)
        if stopping is None:
            if self._running is None and _going_on(self._starting) is None:
                self._set(State.STOPPED)
                return
            self._stopping = stopping = asyncio.create_task(self._stop())
            stopping.add_done_callback(_look_at)
        await asyncio.shield(stopping)

    def kill(self) -> None:
        """End the process at once; for the gateway's last moment, when no event loop runs any more."""
        if self._running is not None:
            self._running.process.kill()

    # Starting.

    async def _start(self) -> Running:
        try:
            await self._give_up()
            self._set(State.PREPARING, "preparing the model", None)
            self.path = await self._prepared()
            self._set(State.LOADING, "making room in memory")
            await self._launch.make_room(self)
            self._set(State.LOADING, "loading the model")
            self._log.clear()
            self._running = running = await self._spawn(self.path)
            await self._until_healthy(running)
            # Its watcher looks after a ready worker only; one that ended in this moment nobody else would see.
            await self._see_that_it_runs(running)
        except (EngineError, OSError) as error:
            await self._give_up()
            self._set(State.FAILED, str(error))
            raise EngineError(str(error)) from error
        except asyncio.CancelledError:
            await asyncio.shield(self._give_up())
            raise
        self.used_at = time.monotonic()
        self._set(State.READY)
        return running

    async def _prepared(self) -> Path:
        """The model's folder. On a daemon thread: the gateway's end does not wait for a conversion."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Path] = loop.create_future()

        def settle(path: Path | None, error: Exception | None) -> None:
            if found.done():
                return
            if path is not None:
                found.set_result(path)
            elif error is not None:
                found.set_exception(error)

        def tell(call: Callable[..., None], *args: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(call, *args)

        def progress(part: float, what: str) -> None:
            tell(self._set, State.PREPARING, what, part)

        def run() -> None:
            try:
                tell(settle, self.model.prepare(progress), None)
            except (EngineError, OSError) as error:
                tell(settle, None, error)
            except Exception as error:  # noqa: BLE001 - told to whoever waits, in its own words
                tell(settle, None, EngineError(f"{type(error).__name__}: {error}"))

        threading.Thread(target=run, name="rewarm-prepare", daemon=True).start()
        return await found

    async def _spawn(self, path: Path) -> Running:
        secret, port = secrets.token_urlsafe(32), _free_port()
        self.loaded_with = options = self._launch.options(self.model.name)
        folder = self._launch.cache_dir if options.caching else None
        command = self._launch.command or (sys.executable, "-m", "rewarm", *self.model.worker)
        process = await Child.start(
            (
                *(*command, "--model", str(path), "--host", HOST, "--port", str(port)),
                *(("--rewarm-dir", str(folder)) if folder is not None else ("--rewarm-off",)),
                *worker_flags(options, self.model),
            ),
            {**os.environ, SECRET_VARIABLE: secret},
            lambda line: self._keep(line, secret),
        )
        client = httpx.AsyncClient(
            base_url=f"http://{HOST}:{port}",
            headers={"Authorization": f"Bearer {secret}"},
            # A prefill takes as long as it takes.
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            # The secret is for this worker and for no proxy.
            trust_env=False,
        )
        running = Running(client, process)
        running.watcher = asyncio.create_task(self._watch(running))
        return running

    async def _until_healthy(self, running: Running) -> None:
        deadline = time.monotonic() + self._launch.start_timeout_s
        while time.monotonic() < deadline:
            await self._see_that_it_runs(running)
            with contextlib.suppress(httpx.HTTPError):
                if (await running.client.get("/health", timeout=5.0)).status_code == 200:
                    return
            await asyncio.sleep(_POLL_S)
        raise EngineError(self._told(f"could not answer within {self._launch.start_timeout_s:.0f} s"))

    async def _see_that_it_runs(self, running: Running) -> None:
        if running.process.returncode is not None:
            await running.process.until_silent()
            raise EngineError(self._told(f"ended before it could answer ({_ending(running.process)})"))

    # Running.

    def _keep(self, line: bytes, secret: str) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._log.append(text.replace(secret, "(secret)")[:_LOG_LINE_CHARS])

    async def _watch(self, running: Running) -> None:
        """Note a process that ends by itself; the next request starts another."""
        await running.process.wait()
        if self._running is running and self._status.state is State.READY:
            await running.process.until_silent()
            if self._running is not running:
                return  # it was stopped in this moment
            self._running = None
            self._set(State.FAILED, self._told(f"ended unexpectedly ({_ending(running.process)})"))
            running.note_end(self._status.message)
            running.process.close()
            await running.client.aclose()

    # Ending.

    async def _stop(self) -> None:
        if (starting := _going_on(self._starting)) is not None:
            starting.cancel()
            await asyncio.wait([starting])
        self._set(State.STOPPING, "writing what it holds, then ending")
        await self._give_up()
        self._set(State.STOPPED)

    async def _give_up(self) -> None:
        """End the process, if any: SIGTERM, so that it writes what it holds, and SIGKILL when it does not go."""
        running, self._running = self._running, None
        if running is None:
            return
        running.note_end("The model was stopped.")
        await running.process.end(self._launch.stop_timeout_s)
        if running.watcher is not None:
            running.watcher.cancel()
        await running.client.aclose()

    def _set(self, state: State, message: str = "", progress: float | None = None) -> None:
        self._status = Status(state, message, progress)

    def _told(self, what: str) -> str:
        lines = self.log_tail[-_TOLD_LINES:]
        words = "\n  ".join(["Its last words:", *lines]) if lines else "It printed nothing."
        return f"The worker of {self.model.name} {what}. {words}"


def _going_on(task: asyncio.Task[T] | None) -> asyncio.Task[T] | None:
    """`task` while it is not done. Asked of the task itself: what its callbacks note comes a moment later."""
    return None if task is None or task.done() else task


def _look_at(task: asyncio.Task[Any]) -> None:
    """Take note of how a task ended that perhaps nobody waits for any more; `status` tells it."""
    if not task.cancelled():
        task.exception()


def _ending(process: Child) -> str:
    code = process.returncode or 0
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _free_port() -> int:
    """A port that was free a moment ago; a worker that finds it taken ends with a message of its own."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
