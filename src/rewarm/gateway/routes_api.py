"""`/api`: what is not there is told in JSON. What is there: `routes_models`, `routes_cache`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from rewarm.gateway.problems import Problem
from rewarm.gateway.routes_openai import METHODS


def api_routes() -> APIRouter:
    """The rest of `/api`; included last."""
    router = APIRouter(prefix="/api", tags=["rewarm"])

    @router.api_route("/{rest:path}", methods=METHODS, include_in_schema=False)
    async def others(request: Request, rest: str) -> Response:
        raise Problem(404, f"There is no {request.method} /api/{rest[:200]} here.", "unknown_url")

    return router
