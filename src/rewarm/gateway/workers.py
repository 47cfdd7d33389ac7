"""All models that the gateway offers and their workers, by name. Owned by the gateway's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

from rewarm.gateway.models import Model
from rewarm.gateway.problems import unknown_model
from rewarm.gateway.settings import Settings
from rewarm.gateway.worker import Launch, ReplyListener, State, Worker


class Workers:
    """One worker per model, started at its first use.

    Args:
        models: what is offered.
        settings: how workers are started.
    """

    def __init__(self, models: Iterable[Model], settings: Settings) -> None:
        self._launch = Launch(
            settings.worker_command,
            settings.cache_dir,
            settings.start_timeout_s,
            settings.stop_timeout_s,
        )
        self._listeners: list[ReplyListener] = []
        self._workers = {model.name: Worker(model, self._launch, self._listeners) for model in models}

    def __iter__(self) -> Iterator[Worker]:
        """The workers, in the order of the models."""
        return iter(self._workers.values())

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

    async def close(self) -> None:
        """End every worker, at once, and wait until all are gone."""
        live = [worker.stop() for worker in self._workers.values() if worker.status.state is not State.STOPPED]
        await asyncio.gather(*live, return_exceptions=True)

    def kill(self) -> None:
        """End what may be left, when no event loop runs any more."""
        for worker in self._workers.values():
            worker.kill()
