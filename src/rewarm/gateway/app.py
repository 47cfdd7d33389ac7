"""The gateway put together: what it owns, and the web application that serves it. Knows no page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

import rewarm
from rewarm.gateway.cache_admin import CacheAdmin
from rewarm.gateway.disk_cache import DiskCache
from rewarm.gateway.guard import Guard
from rewarm.gateway.keys import Keys
from rewarm.gateway.login import login_routes
from rewarm.gateway.metrics import Metrics, metrics_routes
from rewarm.gateway.models import Model, find_models
from rewarm.gateway.problems import Problem
from rewarm.gateway.routes_api import api_routes
from rewarm.gateway.routes_cache import cache_routes
from rewarm.gateway.routes_models import model_routes
from rewarm.gateway.routes_openai import openai_routes
from rewarm.gateway.settings import Settings, is_loopback
from rewarm.gateway.titles import Titles
from rewarm.gateway.workers import Workers


class Gateway:
    """Everything that one gateway process owns.

    Args:
        settings: how it starts.
        models: what it offers; found by `settings` when None.
    """

    def __init__(self, settings: Settings, models: list[Model] | None = None) -> None:
        self.settings = settings
        self.workers = Workers(find_models(settings) if models is None else models, settings)
        self.disk_cache = DiskCache(settings)
        self.workers.on_reply(self.disk_cache.replies.note)
        self.metrics = Metrics(self.workers, self.disk_cache)
        self.cache_admin = CacheAdmin(self.disk_cache, self.workers, Titles(settings.data_dir / "chats"))
        self.keys = Keys(settings.keys())
        self._closers: list[Callable[[], Awaitable[None]]] = []

    def before_close(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Have `closer` awaited at the end, while the workers still run."""
        self._closers.append(closer)

    async def close(self) -> None:
        """End what was put above the workers, then every worker; give the cache folder back."""
        for closer in self._closers:
            await closer()
        await self.cache_admin.close()
        await self.workers.close()
        self.disk_cache.close()


def create_app(gateway: Gateway) -> FastAPI:
    """The API. The gateway is closed when the application's lifespan ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(gateway.workers.unload_idle())
        try:
            yield
        finally:
            watching.cancel()
            await gateway.close()

    app = FastAPI(
        title="rewarm",
        version=rewarm.__version__,
        description="OpenAI's API over local models whose KV cache is kept on disk.",
        lifespan=lifespan,
        # The pages that show these would load their scripts from another host.
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(
        Guard,
        max_body_bytes=gateway.settings.max_body_bytes,
        keys=gateway.keys,
        is_loopback_only=is_loopback(gateway.settings.host),
    )
    app.include_router(openai_routes(gateway.workers))
    app.include_router(login_routes(gateway.keys))
    app.include_router(cache_routes(gateway.cache_admin))
    app.include_router(model_routes(gateway.workers, gateway.disk_cache, gateway.settings))
    app.include_router(metrics_routes(gateway.metrics))
    app.include_router(api_routes())
    _tell_problems(app)
    return app


def _tell_problems(app: FastAPI) -> None:
    """Have every error told in the API's shape."""

    @app.exception_handler(Problem)
    async def tell_problem(_: Request, problem: Problem) -> JSONResponse:
        return problem.response()

    @app.exception_handler(RequestValidationError)
    async def tell_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return Problem(400, f"The request makes no sense: {wrong}").response()

    @app.exception_handler(HTTPException)
    async def tell_refusal(_: Request, error: HTTPException) -> JSONResponse:
        return Problem(error.status_code, str(error.detail)).response()

    @app.exception_handler(Exception)
    async def tell_fault(_: Request, error: Exception) -> JSONResponse:
        # The trace goes to the log by itself; its words might quote what was sent, so the client gets the kind only.
        return Problem(500, f"The gateway failed at this request: {type(error).__name__}.").response()
