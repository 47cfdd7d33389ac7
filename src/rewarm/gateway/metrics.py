"""`/metrics`, for Prometheus: what the cache did and holds, what the models do. Holds no text and no tokens.

Counters of replies are kept here, from what workers tell of each; those of the folder are the store's own, and
those of a worker are asked of it when they are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from rewarm.gateway.disk_cache import DiskCache
from rewarm.gateway.routes_models import memory_nbytes
from rewarm.gateway.worker import Worker
from rewarm.gateway.worker_state import State
from rewarm.gateway.workers import Workers
from rewarm.state.reason import Reason

_ASK_S = 2.0
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256)
_BYPASSED = frozenset({Reason.DISABLED.value, Reason.TOO_SHORT.value, Reason.NOT_WORTH_LOADING.value})
_REASONS = frozenset(reason.value for reason in Reason)

_FOLDER_COUNTERS = {
    "bytes_read": "Bytes of records that were read",
    "bytes_written": "Bytes of records that were written",
    "evictions": "Records that were evicted to make room",
    "evicted_records": "Records that were evicted to make room",
}
"""Counters of the folder that grow for ever; every other number of it is told as a gauge."""


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """A worker's figures when they were asked for.

    Attributes:
        worker: whose.
        stats: what `GET /rewarm/stats` told; empty where it does not, or none runs.
    """

    worker: Worker
    stats: Mapping[str, Any]


class Metrics:
    """The figures of one gateway.

    Args:
        workers: the models' workers; their replies are counted from now on.
        disk_cache: the folder.
    """

    def __init__(self, workers: Workers, disk_cache: DiskCache) -> None:
        self._workers = workers
        self._disk_cache = disk_cache
        self._registry = CollectorRegistry(auto_describe=False)
        label = ["model"]
        self._replies = Counter(
            "rewarm_replies", "Replies, by what served them", [*label, "served"], registry=self._registry
        )
        self._misses = Counter(
            "rewarm_misses", "Replies of which nothing was reused", [*label, "reason"], registry=self._registry
        )
        self._tokens = Counter(
            "rewarm_prompt_tokens", "Prompt tokens, by where from", [*label, "source"], registry=self._registry
        )
        self._restore_s = Counter(
            "rewarm_restore_seconds", "Seconds of finding and restoring", label, registry=self._registry
        )
        self._saved_s = Counter(
            "rewarm_saved_seconds", "Seconds of prefill saved, estimated", label, registry=self._registry
        )
        self._ttft = Histogram(
            "rewarm_ttft_seconds",
            "To the first token of a stream",
            [*label, "restored"],
            buckets=_TTFT_S,
            registry=self._registry,
        )
        workers.on_reply(self.note)

    def note(self, model: str, report: Mapping[str, Any], ttft_s: float | None) -> None:
        """Count a reply; see `Worker.note_reply`."""
        prompt, disk, memory = (_number(report.get(f"{name}_tokens")) for name in ("prompt", "disk", "memory"))
        reason = str(report.get("reason") or "")
        served = "disk" if disk else "memory" if memory else "bypass" if reason in _BYPASSED else "prefill"
        self._replies.labels(model, served).inc()
        if served == "prefill":
            self._misses.labels(model, reason if reason in _REASONS else "other").inc()
        for source, n_tokens in (("disk", disk), ("memory", memory), ("prefill", max(0.0, prompt - disk - memory))):
            self._tokens.labels(model, source).inc(n_tokens)
        self._restore_s.labels(model).inc(_number(report.get("restore_s")))
        self._saved_s.labels(model).inc(_number(report.get("saved_s")))
        if ttft_s is not None:
            self._ttft.labels(model, "yes" if disk else "no").observe(ttft_s)

    async def text(self) -> bytes:
        """All figures, as Prometheus reads them."""
        figures = await asyncio.gather(*(_figures(worker) for worker in self._workers))
        return await asyncio.to_thread(self._text, figures)

    def _text(self, figures: Iterable[WorkerFigures]) -> bytes:
        # Made for this one reading: what was asked of the workers belongs to it.
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Now([*_of_folder(self._disk_cache.report()), *_of_workers(figures)]))
        return generate_latest(self._registry) + generate_latest(registry)


class _Now(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def metrics_routes(metrics: Metrics) -> APIRouter:
    """`/metrics`."""
    router = APIRouter(tags=["rewarm"])

    @router.get("/metrics")
    async def read() -> Response:
        """All figures, for Prometheus."""
        return Response(await metrics.text(), media_type=_TYPE)

    return router


async def _figures(worker: Worker) -> WorkerFigures:
    stats: dict[str, Any] = {}
    if worker.status.state is State.READY:
        try:
            running = await worker.running()
            said = await running.client.get("/rewarm/stats", timeout=_ASK_S)
            found = said.json() if said.status_code == 200 else {}
            stats = found if isinstance(found, dict) else {}
        except (httpx.HTTPError, RuntimeError, ValueError):
            stats = {}
    return WorkerFigures(worker, stats)


def _of_folder(report: Mapping[str, Any]) -> Iterator[Metric]:
    yield GaugeMetricFamily("rewarm_cache_usable", "Whether the cache folder can be used", float(report["usable"]))
    for name, value in report["limits"].items():
        if isinstance(value, int):
            yield GaugeMetricFamily(f"rewarm_limit_{name}", f"The folder's limit {name}", value)
    for name, value in report["counters"].items():
        if isinstance(value, dict):
            family = CounterMetricFamily(f"rewarm_cache_{name}", f"Of the folder: {name}, by reason", labels=["reason"])
            for reason, number in value.items():
                family.add_metric([str(reason)], _number(number))
            yield family
        elif isinstance(value, int | float):
            kind = CounterMetricFamily if name in _FOLDER_COUNTERS else GaugeMetricFamily
            yield kind(f"rewarm_cache_{name}", _FOLDER_COUNTERS.get(name, f"Of the folder: {name}"), value=float(value))


def _of_workers(figures: Iterable[WorkerFigures]) -> Iterator[Metric]:
    up = GaugeMetricFamily("rewarm_model_loaded", "Whether the model is loaded", labels=["model"])
    memory = GaugeMetricFamily("rewarm_model_memory_bytes", "Memory of the model's worker", labels=["model"])
    asked = GaugeMetricFamily("rewarm_model_requests", "Requests in the model's worker", labels=["model", "state"])
    held = GaugeMetricFamily("rewarm_model_held_bytes", "KV that the engine holds in memory", labels=["model"])
    queue = GaugeMetricFamily("rewarm_model_queue_bytes", "KV that waits to be written", labels=["model"])
    speed = GaugeMetricFamily("rewarm_model_bandwidth", "Bytes per second, measured", labels=["model", "what"])
    for one in figures:
        name = one.worker.model.name
        up.add_metric([name], float(one.worker.status.state is State.READY))
        memory.add_metric([name], float(memory_nbytes(one.worker.pid)))
        requests, engine, cache = (_part(one.stats, key) for key in ("requests", "engine_memory", "cache"))
        for state in ("running", "waiting"):
            asked.add_metric([name, state], _number(requests.get(state)))
        held.add_metric([name], _number(engine.get("nbytes")))
        queue.add_metric([name], _number(cache.get("queue_bytes")))
        for what, number in cache.items():
            if what.endswith(("_per_s", "_bandwidth", "_bytes_per_s")):
                speed.add_metric([name, what], _number(number))
    yield from (up, memory, asked, held, queue, speed)


def _part(stats: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = stats.get(key)
    return part if isinstance(part, dict) else {}


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return max(0.0, float(value)) if is_number else 0.0
