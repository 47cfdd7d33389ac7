"""Moves the cache folder while the gateway runs: workers let go of it, it is moved or left, and all go on with the new.

Requests are answered meanwhile, without the cache. Lives in the gateway's event loop; the records are moved on a
thread. However it ends, the cache is whole in one of the two folders, and that one is used.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import httpx

import rewarm
from rewarm.cache.move import Location, abandon_move, describe_location, move_root
from rewarm.errors import EngineError, RewarmError
from rewarm.gateway.disk_cache import DiskCache
from rewarm.gateway.problems import Problem
from rewarm.gateway.worker import Worker
from rewarm.gateway.worker_state import State
from rewarm.gateway.workers import Workers

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 60.0
"""How long a worker may take to write what it holds and close its cache, or to open the other one."""

Records = Literal["move", "leave"]


class Stage(enum.StrEnum):
    """How far a change of the folder is."""

    NONE = "none"
    CLOSING = "closing"
    MOVING = "moving"
    OPENING = "opening"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_going_on(self) -> bool:
        """Whether it has begun and not ended."""
        return self in (Stage.CLOSING, Stage.MOVING, Stage.OPENING)


@dataclass(frozen=True, slots=True)
class Progress:
    """A change of the folder, as far as it is.

    Attributes:
        stage: how far.
        source, target: from which folder to which.
        done_bytes, total_bytes: of the records that are moved.
        message: what happened, for a person; "" while nothing is to be said.
        unloaded: models that were unloaded, since their workers cannot change the folder.
        left_behind: files in the old folder that are not rewarm's, or could not be removed.
    """

    stage: Stage = Stage.NONE
    source: str = ""
    target: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    message: str = ""
    unloaded: tuple[str, ...] = ()
    left_behind: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checked:
    """A folder that somebody wants to use.

    Attributes:
        path: absolute, links followed.
        problem: why it cannot be used, or "".
        warnings: what speaks against it.
        free_bytes: that may still be written there, or None.
        total_bytes: of its disk, or None.
        holds_cache: whether there is a cache already: records can be left, not moved there.
        needed_bytes: that the records take which would be moved.
    """

    path: Path
    problem: str
    warnings: tuple[str, ...] = ()
    free_bytes: int | None = None
    total_bytes: int | None = None
    holds_cache: bool = False
    needed_bytes: int = 0


@dataclass(slots=True)
class _Job:
    source: Path
    target: Path
    records: Records
    stop: threading.Event = field(default_factory=threading.Event)


class Relocation:
    """Changes of the cache folder of one gateway, one at a time."""

    def __init__(self, disk_cache: DiskCache, workers: Workers) -> None:
        self._disk_cache = disk_cache
        self._workers = workers
        self._task: asyncio.Task[None] | None = None
        self._job: _Job | None = None
        self.progress = Progress()

    def check(self, path: str) -> Checked:
        """What `path` is like as the cache folder. Waits for the disk."""
        if not path.strip():
            return Checked(self._disk_cache.folder, "Name a folder.")
        wanted = Path(path.strip()).expanduser()
        if "\0" in path or not wanted.is_absolute():
            return Checked(wanted, "Give the whole path, from the root of the disk or from ~ on.")
        place = describe_location(wanted)
        used = self._disk_cache.report()["counters"].get("bytes_used", 0)
        holds_cache = (place.path / "store.json").is_file()
        problem = self._problem(place.path, is_writable=place.writable)
        if not problem and not holds_cache and place.exists and not (place.path / "moving.json").is_file():
            problem = _full(place.path)
        return Checked(place.path, problem, place.warnings, place.free_bytes, place.total_bytes, holds_cache, int(used))

    def here(self) -> Location:
        """What the folder of now is like. Waits for the disk."""
        return describe_location(self._disk_cache.folder)

    def _problem(self, path: Path, *, is_writable: bool) -> str:
        now = self._disk_cache.folder.absolute().resolve()
        if path == now:
            return "This is where the cache is."
        if now in path.parents:
            return "This is inside the cache folder."
        if path in now.parents:
            return "The cache folder is inside this one. Choose a folder of its own."
        return "" if is_writable else "Nothing can be written there."

    async def start(self, path: str, records: Records) -> Progress:
        """Begin to use `path`; returns when it has begun.

        Args:
            path: absolute, or from ~ on.
            records: brought over, or left where they are: then the new folder begins with what it holds.

        Raises:
            Problem: 400, the folder cannot be used; 409, a change goes on.
        """
        if self.progress.stage.is_going_on:
            raise Problem(409, "The cache folder is being changed already.", "move_in_progress")
        source = self._disk_cache.folder
        self.progress = Progress(Stage.CLOSING, str(source), path)
        try:
            checked = await asyncio.to_thread(self.check, path)
            if checked.problem:
                raise Problem(400, f"{checked.path}: {checked.problem} Nothing was changed.", "bad_location", "path")
            if records == "move" and checked.holds_cache and not (checked.path / "moving.json").is_file():
                told = "It holds a cache already. Leave the records, or choose another folder. Nothing was changed."
                raise Problem(400, f"{checked.path}: {told}", "bad_location", "path")
        except Problem:
            self.progress = Progress()
            raise
        self._job = _Job(source, checked.path, records)
        self.progress = Progress(Stage.CLOSING, str(source), str(checked.path))
        self._task = asyncio.create_task(self._run(self._job))
        return self.progress

    async def stop(self) -> None:
        """Have records that are being moved stay where they were; nothing happens when none are."""
        if self._job is not None:
            self._job.stop.set()

    async def close(self) -> None:
        """End a change that goes on, and wait for it: the cache is whole afterwards."""
        await self.stop()
        if self._task is not None:
            await asyncio.wait([self._task])

    # What it takes.

    async def _run(self, job: _Job) -> None:
        try:
            self._workers.use_folder(None)
            await self._tell_workers(None)
            await asyncio.to_thread(self._disk_cache.close, f"The cache is being moved to {job.target}.")
            self._set(stage=Stage.MOVING)
            folder, ended = await asyncio.to_thread(self._settle, job)
            self._set(stage=Stage.OPENING)
            await asyncio.to_thread(self._disk_cache.open, folder)
            self._workers.use_folder(folder)
            await self._tell_workers(folder)
            self._set(stage=ended)
        except Exception as error:  # a fault of ours must not leave the gateway without its cache
            log.exception("changing the cache folder failed")
            folder = job.source if (job.source / "store.json").is_file() else job.target
            await asyncio.to_thread(self._disk_cache.open, folder)
            self._workers.use_folder(folder)
            await self._tell_workers(folder)
            self._set(stage=Stage.FAILED, message=f"Changing the folder failed: {type(error).__name__}: {error}")

    def _settle(self, job: _Job) -> tuple[Path, Stage]:
        """Move the records, or leave them; the folder to use from now on, and how it ended. On a thread."""
        try:
            if job.records == "leave":
                self._begin(job)
                self._disk_cache.place.remember(job.target)
                self._set(message=f"The cache is in {job.target}. What was kept before is still in {job.source}.")
                return job.target, Stage.DONE
            report = move_root(
                job.source,
                job.target,
                lambda done, total: self._set(done_bytes=done, total_bytes=total),
                stop=job.stop.is_set,
                switch=lambda: self._disk_cache.place.remember(job.target),
            )
            if not report.finished:
                abandon_move(job.target)
                self._set(message=f"Stopped. The cache is in {job.source}, as before.")
                return job.source, Stage.STOPPED
        except (OSError, RewarmError) as error:
            # The new folder counts only when the old one is a cache no more.
            is_moved = (job.target / "store.json").is_file() and not (job.source / "store.json").is_file()
            self._set(message=str(error))
            return (job.target if is_moved else job.source), Stage.FAILED
        self._set(
            message=f"The cache is in {job.target}: {report.n_files:,} files were moved.",
            left_behind=tuple(report.left_behind),
        )
        return job.target, Stage.DONE

    def _begin(self, job: _Job) -> None:
        """A folder that is none yet begins with the limits and rules of the one that is left."""
        with rewarm.open(job.source) as cache:
            settings = cache.settings()
            policy = cache.policy()
        with rewarm.open(job.target, limits=settings.limits, policy=policy, block_tokens=settings.block_tokens):
            pass

    async def _tell_workers(self, folder: Path | None) -> None:
        """Have every running worker use `folder`; those that cannot change it are unloaded."""
        unloaded = await asyncio.gather(*(self._tell(worker, folder) for worker in self._workers))
        names = [name for name in unloaded if name]
        self._set(unloaded=tuple(dict.fromkeys((*self.progress.unloaded, *names))))

    async def _tell(self, worker: Worker, folder: Path | None) -> str:
        """Tell one worker; its model's name if it had to be unloaded, else ""."""
        state = worker.status.state
        if state is State.STOPPING:
            await worker.stop()
        if state not in (State.LOADING, State.READY):
            return ""  # none runs, or none has been given a folder yet
        if worker.loaded_with is not None and not worker.loaded_with.caching:
            return ""  # it runs without one
        try:
            # One that is being loaded is waited for: whoever asked it something is to get an answer.
            running = await worker.running()
            body = {"dir": None if folder is None else str(folder)}
            said = await running.client.post("/rewarm/cache", json=body, timeout=CONTROL_TIMEOUT_S)
            if said.status_code == 200:
                return ""
        except EngineError:
            return ""
        except (httpx.HTTPError, RuntimeError) as error:
            log.warning("%s did not change its cache folder (%s)", worker.model.name, type(error).__name__)
        await worker.stop()
        return worker.model.name

    def _set(self, **changes: object) -> None:
        self.progress = replace(self.progress, **changes)  # type: ignore[arg-type]


def _full(path: Path) -> str:
    """Why a folder that is no cache cannot become one, or ""."""
    try:
        return "There are other files in it. Choose an empty folder, or name a new one." if any(path.iterdir()) else ""
    except OSError as error:
        return f"It cannot be read ({error.strerror or error})."
