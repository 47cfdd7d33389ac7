"""`/api`: what the gateway itself can be asked and told. Described by `/openapi.json`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from rewarm.errors import EngineError
from rewarm.gateway.problems import Problem, not_started
from rewarm.gateway.routes_openai import METHODS
from rewarm.gateway.worker import State, Worker
from rewarm.gateway.workers import Workers


class ModelReport(BaseModel):
    """A model and what its worker does.

    Attributes:
        name: of the model on the API.
        bundled: whether it came with rewarm.
        state: of its worker.
        message: what it is doing, or why it failed.
        progress: the part done, 0 to 1, where that is known.
        pid: of the worker's process, while there is one.
        log: the last lines that it printed, when it failed.
    """

    name: str
    bundled: bool
    state: State
    message: str
    progress: float | None
    pid: int | None
    log: list[str]


class ModelList(BaseModel):
    """All models that are offered."""

    models: list[ModelReport]


def api_routes(workers: Workers) -> APIRouter:
    """The routes under `/api`."""
    router = APIRouter(prefix="/api", tags=["rewarm"])

    @router.get("/models")
    async def list_models() -> ModelList:
        """All models, and what their workers do."""
        return ModelList(models=[_report(worker) for worker in workers])

    @router.post("/models/{name}/load")
    async def load(name: str) -> ModelReport:
        """Load a model and wait until it can answer."""
        worker = workers.get(name)
        try:
            await worker.running()
        except EngineError as error:
            raise not_started(str(error)) from error
        return _report(worker)

    @router.post("/models/{name}/unload")
    async def unload(name: str) -> ModelReport:
        """End a model's worker and wait until it is gone; what it holds is written first."""
        worker = workers.get(name)
        await worker.stop()
        return _report(worker)

    @router.api_route("/{rest:path}", methods=METHODS, include_in_schema=False)
    async def others(request: Request, rest: str) -> Response:
        raise Problem(404, f"There is no {request.method} /api/{rest[:200]} here.", "unknown_url")

    return router


def _report(worker: Worker) -> ModelReport:
    status: dict[str, Any] = {
        "state": worker.status.state,
        "message": worker.status.message,
        "progress": worker.status.progress,
    }
    return ModelReport(
        name=worker.model.name,
        bundled=worker.model.is_bundled,
        pid=worker.pid,
        log=worker.log_tail if worker.status.state is State.FAILED else [],
        **status,
    )
