"""All models that the gateway offers and their workers, by name: which may run, and for how long.

Owned by the gateway's event loop. Knows no request and no page.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import psutil

from rewarm.gateway.model_options import OptionStore
from rewarm.gateway.models import Model
from rewarm.gateway.problems import unknown_model
from rewarm.gateway.settings import Settings
from rewarm.gateway.worker import Launch, ReplyListener, Worker
from rewarm.gateway.worker_state import State
from rewarm.units import format_bytes

log = logging.getLogger(__name__)

_LOOK_S = 5.0
_MORE_THAN_WEIGHTS = 1.15
"""Memory that a loaded model takes, in sizes of its files: a little for the KV and the engine."""


def _available_nbytes() -> int:
    return int(psutil.virtual_memory().available)


class Workers:
    """One worker per model, started at its first use.

    Args:
        models: what is offered.
        settings: how workers are started.
        available_nbytes: memory that is free now.

    Attributes:
        options: how each model is run.
    """

    def __init__(
        self, models: Iterable[Model], settings: Settings, available_nbytes: Callable[[], int] = _available_nbytes
    ) -> None:
        self.options = OptionStore(settings.data_dir)
        self._launch = Launch(
            settings.worker_command,
            settings.cache_dir,
            settings.start_timeout_s,
            settings.stop_timeout_s,
            self.options.get,
            self._make_room,
        )
        self._available_nbytes = available_nbytes
        self._idle_unload_s = settings.idle_unload_s
        self._listeners: list[ReplyListener] = []
        self._workers = {model.name: self._worker(model) for model in models}

    def __iter__(self) -> Iterator[Worker]:
        """The workers, in the order of the models."""
        return iter(list(self._workers.values()))

    @property
    def names(self) -> list[str]:
        """The names of the models."""
        return list(self._workers)

    def get(self, name: str) -> Worker:
        """The worker of a model.

        Raises:
            Problem: 404, there is no such model.
        """
        worker = self._workers.get(name)
        if worker is None:
            raise unknown_model(name, self.names)
        return worker

    def __contains__(self, name: str) -> bool:
        """Whether there is such a model."""
        return name in self._workers

    def on_reply(self, listener: ReplyListener) -> None:
        """Have `listener` told of each reply; see `Worker.note_reply`."""
        self._listeners.append(listener)

    def use_folder(self, folder: Path | None) -> None:
        """Have workers that are started from now on use the cache folder `folder`; None: none at all."""
        self._launch.cache_dir = folder

    async def offer(self, models: Iterable[Model]) -> None:
        """Offer these models from now on. One that is gone is stopped; one that is as it was goes on."""
        before = self._workers
        self._workers = {
            model.name: before[model.name] if _is_same(before.get(model.name), model) else self._worker(model)
            for model in models
        }
        gone = [worker for name, worker in before.items() if self._workers.get(name) is not worker]
        await asyncio.gather(*(worker.stop() for worker in gone), return_exceptions=True)

    # How long they run.

    @property
    def idle_unload_s(self) -> float | None:
        """Seconds without a request after which a model is unloaded; None: never."""
        kept = self.options.idle_unload_s
        return self._idle_unload_s if isinstance(kept, msgspec.UnsetType) else kept

    async def unload_idle(self) -> None:
        """Unload models that were not asked for long enough, again and again, until cancelled."""
        while True:
            limit_s = self.idle_unload_s
            await asyncio.sleep(_LOOK_S if limit_s is None else min(_LOOK_S, limit_s / 4))
            limit_s = self.idle_unload_s
            if limit_s is None:
                continue
            for worker in self:
                if worker.is_idle and time.monotonic() - worker.used_at >= limit_s:
                    log.info("%s was not asked for %.0f s: it is unloaded", worker.model.name, limit_s)
                    await worker.stop()

    async def _make_room(self, wanted: Worker) -> None:
        """Unload what was not asked for longest, as far as memory is short for `wanted`; never what answers."""
        # What another model that is being loaded takes is not yet taken, as far as the system tells.
        loading = [worker for worker in self if worker is not wanted and worker.status.state is State.LOADING]
        n_needed = int(sum(worker.nbytes for worker in (wanted, *loading)) * _MORE_THAN_WEIGHTS)
        while n_needed > (n_free := self._available_nbytes()):
            idle = [worker for worker in self if worker is not wanted and worker.is_idle]
            if not idle:
                log.warning(
                    "%s takes about %s and %s of memory are free: it is loaded all the same",
                    wanted.model.name,
                    format_bytes(n_needed),
                    format_bytes(n_free),
                )
                return
            oldest = min(idle, key=lambda worker: worker.used_at)
            log.info("%s is unloaded, to make room for %s", oldest.model.name, wanted.model.name)
            await oldest.stop()

    async def close(self) -> None:
        """End every worker, at once, and wait until all are gone."""
        live = [worker.stop() for worker in self if worker.status.state is not State.STOPPED]
        await asyncio.gather(*live, return_exceptions=True)

    def kill(self) -> None:
        """End what may be left, when no event loop runs any more."""
        for worker in self:
            worker.kill()

    def _worker(self, model: Model) -> Worker:
        return Worker(model, self._launch, self._listeners)


def _is_same(worker: Worker | None, model: Model) -> bool:
    """Whether a worker's model is `model`, as far as its place and engine tell."""
    if worker is None:
        return False
    was = worker.model
    return (was.path, was.worker, was.why_not, was.is_bundled) == (
        model.path,
        model.worker,
        model.why_not,
        model.is_bundled,
    )
