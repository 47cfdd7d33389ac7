"""`/api/models`: what is offered, how it is run, loading and unloading. Described by `/openapi.json`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from rewarm.cache.description import read_description
from rewarm.errors import EngineError
from rewarm.gateway.disk_cache import DiskCache
from rewarm.gateway.model_options import begins_new_cache, changed
from rewarm.gateway.models import Model, find_models
from rewarm.gateway.problems import Problem, not_started
from rewarm.gateway.settings import Settings
from rewarm.gateway.worker import Worker
from rewarm.gateway.worker_state import State
from rewarm.gateway.workers import Workers


class OptionsReport(BaseModel):
    """How a model is run; null: as its engine does by itself.

    Attributes:
        context_length: tokens; llama.cpp only.
        kv_type: of the KV cache: `f16`, `q8_0` and so on with llama.cpp; `4-bit` or `8-bit` with mlx-lm.
        adapter: a LoRA adapter's folder (mlx-lm) or GGUF file (llama.cpp).
        adapter_scale: how strongly it counts; llama.cpp only.
        draft_model: a smaller model, for speculative decoding.
        flags: further ones of the engine's server.
        caching: whether the disk is used.
    """

    context_length: int | None
    kv_type: str | None
    adapter: str | None
    adapter_scale: float
    draft_model: str | None
    flags: list[str]
    caching: bool


class ModelReport(BaseModel):
    """A model and what its worker does.

    Attributes:
        name: of the model on the API.
        bundled: whether it came with rewarm.
        source: where it was found: `given`, `bundled`, `huggingface`, `lm-studio` or `ollama`.
        format: `safetensors` or `gguf`.
        engine: what runs it: `mlx-lm` or `llama.cpp`.
        path: its folder or file, where known.
        nbytes: of its weights; 0 where that is not known.
        why_not: why it cannot be loaded here; "" when it can.
        state: of its worker.
        message: what it is doing, or why it failed.
        progress: the part done, 0 to 1, where that is known.
        pid: of the worker's process, while there is one.
        memory_bytes: that the worker and its children take, while it runs.
        n_asked: requests that it answers, or that wait for it.
        options: how it is run.
        reload_needed: whether it runs with other options than these.
        log: the last lines that it printed, when it failed.
    """

    name: str
    bundled: bool
    source: str
    format: str
    engine: str
    path: str | None
    nbytes: int
    why_not: str
    state: State
    message: str
    progress: float | None
    pid: int | None
    memory_bytes: int
    n_asked: int
    options: OptionsReport
    reload_needed: bool
    log: list[str]


class ModelList(BaseModel):
    """All models that are offered."""

    models: list[ModelReport]


class OptionsChange(BaseModel):
    """Options to change; those that are not named stay."""

    model_config = ConfigDict(extra="forbid")

    context_length: int | None = None
    kv_type: str | None = None
    adapter: str | None = None
    adapter_scale: float = 1.0
    draft_model: str | None = None
    flags: Annotated[list[str], Field(max_length=200)] = []
    caching: bool = True


class ChangeReport(BaseModel):
    """What a change of options does, or would do.

    Attributes:
        dry_run: whether nothing was changed.
        new_cache: whether what was kept so far cannot be used any more.
        left_bytes: how much of it there is; it stays until it is evicted, or serves again when the change is undone.
        model: after the change, or as it is.
    """

    dry_run: bool
    new_cache: bool
    left_bytes: int
    model: ModelReport


class Loading(BaseModel):
    """Until when models stay loaded: `idle_unload_s` seconds without a request; null: until they are unloaded."""

    idle_unload_s: Annotated[float | None, Field(gt=0, lt=2**31)]


def model_routes(workers: Workers, disk_cache: DiskCache, settings: Settings) -> APIRouter:
    """The routes under `/api/models`."""
    router = APIRouter(prefix="/api", tags=["rewarm"])

    @router.get("/models")
    async def list_models() -> ModelList:
        """All models, and what their workers do."""
        return ModelList(models=[report(worker, workers) for worker in workers])

    @router.post("/models/scan")
    async def scan() -> ModelList:
        """Look for models again."""
        await workers.offer(await asyncio.to_thread(find_models, settings))
        return ModelList(models=[report(worker, workers) for worker in workers])

    @router.post("/models/{name:path}/load")
    async def load(name: str) -> ModelReport:
        """Load a model and wait until it can answer."""
        worker = workers.get(name)
        try:
            await worker.running()
        except EngineError as error:
            raise not_started(str(error)) from error
        return report(worker, workers)

    @router.post("/models/{name:path}/unload")
    async def unload(name: str) -> ModelReport:
        """End a model's worker and wait until it is gone; what it holds is written first."""
        worker = workers.get(name)
        await worker.stop()
        return report(worker, workers)

    @router.get("/models/{name:path}")
    async def get_model(name: str) -> ModelReport:
        """One model, and what its worker does."""
        return report(workers.get(name), workers)

    @router.patch("/models/{name:path}")
    async def change(name: str, wanted: OptionsChange, *, dry_run: Annotated[bool, Query()] = False) -> ChangeReport:
        """Run a model otherwise, from when it is loaded next; with `dry_run`, only say what that would leave."""
        changes = {field: getattr(wanted, field) for field in wanted.model_fields_set}
        return await change_options(workers.get(name), workers, disk_cache, changes, dry_run=dry_run)

    _until_when(router, workers)
    return router


def _until_when(router: APIRouter, workers: Workers) -> None:
    @router.get("/loading")
    async def loading() -> Loading:
        """Until when models stay loaded."""
        return Loading(idle_unload_s=workers.idle_unload_s)

    @router.put("/loading")
    async def set_loading(wanted: Loading) -> Loading:
        """Have models stay loaded for another time; takes effect at once, and survives a restart."""
        try:
            await asyncio.to_thread(workers.options.put_idle_unload, wanted.idle_unload_s)
        except OSError as error:
            raise _unwritten(error) from error
        return Loading(idle_unload_s=workers.idle_unload_s)


async def change_options(
    worker: Worker, workers: Workers, disk_cache: DiskCache, changes: dict[str, Any], *, dry_run: bool
) -> ChangeReport:
    """Run a model otherwise, from when it is loaded next.

    Raises:
        Problem: 400, the options make no sense; 500, they cannot be written. Nothing was changed.
    """
    before = workers.options.get(worker.model.name)
    try:
        after = changed(before, changes, worker.model)
    except ValueError as error:  # msgspec's ValidationError is one
        raise Problem(400, f"Nothing was changed: {error}.", "invalid_options") from None
    is_new = begins_new_cache(before, after, worker.model)
    left = await asyncio.to_thread(kept_nbytes, disk_cache, worker.path or worker.model.path) if is_new else 0
    if not dry_run:
        try:
            await asyncio.to_thread(workers.options.put, worker.model.name, after)
        except OSError as error:
            raise _unwritten(error) from error
    return ChangeReport(dry_run=dry_run, new_cache=is_new, left_bytes=left, model=report(worker, workers))


def kept_nbytes(disk_cache: DiskCache, path: Path | None) -> int:
    """Bytes that the cache folder holds of the model at `path` as it was run last."""
    if path is None:
        return 0
    try:
        with disk_cache.use() as cache:
            kept = {each.hex(): (cache.store.description(each), nbytes) for each, _, nbytes in cache.store.namespaces()}
            matched = {entry.fingerprint: 0.0 for entry in cache.entries()}
            for entry in cache.entries():
                matched[entry.fingerprint] = max(matched[entry.fingerprint], entry.matched_s)
    except Problem:
        return 0
    found: list[tuple[float, float, int]] = []
    for fingerprint, (description, nbytes) in kept.items():
        said = read_description(description)
        if said is not None and said.path and _is_same(Path(said.path), path):
            found.append((matched.get(fingerprint, 0.0), said.last_seen_s, nbytes))
    return max(found)[2] if found else 0


def report(worker: Worker, workers: Workers) -> ModelReport:
    """What is to tell of a model."""
    model: Model = worker.model
    status, options = worker.status, workers.options.get(model.name)
    path = worker.path or model.path
    is_running = worker.pid is not None
    return ModelReport(
        name=model.name,
        bundled=model.is_bundled,
        source=model.source,
        format=model.format,
        engine=model.engine,
        path=str(path) if path is not None else None,
        nbytes=worker.nbytes,
        why_not=model.why_not,
        state=status.state,
        message=status.message,
        progress=status.progress,
        pid=worker.pid,
        memory_bytes=memory_nbytes(worker.pid),
        n_asked=worker.n_asked,
        options=OptionsReport(**{**_DEFAULTS, **msgspec.to_builtins(options)}),
        reload_needed=is_running and worker.loaded_with != options,
        log=worker.log_tail if status.state is State.FAILED else [],
    )


_DEFAULTS: dict[str, Any] = OptionsChange().model_dump()


def memory_nbytes(pid: int | None) -> int:
    """Bytes of memory that a process and its children hold; 0 when it is gone."""
    if pid is None:
        return 0
    try:
        process = psutil.Process(pid)
        return sum(_rss(one) for one in (process, *process.children(recursive=True)))
    except psutil.Error:
        return 0


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _is_same(one: Path, other: Path) -> bool:
    return one == other or one.resolve() == other.resolve()


def _unwritten(error: OSError) -> Problem:
    return Problem(
        500, f"The gateway's data folder cannot be written ({error.strerror or error}). Nothing was changed."
    )
