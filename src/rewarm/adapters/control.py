"""What the gateway orders of a worker, under `/rewarm/`: another cache folder, a flush, figures.

Routes and their answers; each engine's seam does what is ordered. Whoever asks must be the gateway: that is the
caller's to check.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, Protocol

from rewarm.errors import RewarmError

PREFIX = "/rewarm/"
FLUSH_S = 30.0


class Worker(Protocol):
    """What carries the orders out."""

    def use_folder(self, folder: str | None) -> dict[str, Any]:
        """Let the cache in a folder take the place of the present one; None: serve uncached.

        Returns:
            `dir`, the folder, and `unwritten`, how many saves of the present cache were not written in time.

        Raises:
            OSError, RewarmError: it cannot be done; all is as it was.
        """

    def flush(self, timeout_s: float) -> bool:
        """Have everything written that is to be kept; whether it is, within `timeout_s`."""

    def stats(self) -> dict[str, Any]:
        """The cache's counters, memory in bytes, requests."""


def answer(method: str, route: str, body: bytes, worker: Worker) -> tuple[HTTPStatus, dict[str, Any]]:
    """Carry an order out; the status, and what to answer as JSON."""
    try:
        if (method, route) == ("POST", "/rewarm/cache"):
            return HTTPStatus.OK, worker.use_folder(_folder(body))
        if (method, route) == ("POST", "/rewarm/flush"):
            return HTTPStatus.OK, {"flushed": worker.flush(FLUSH_S)}
        if (method, route) == ("GET", "/rewarm/stats"):
            return HTTPStatus.OK, worker.stats()
    except (OSError, RewarmError, ValueError) as error:
        message = f"This cannot be done: {error}. The cache in use stays as it is."
        return HTTPStatus.CONFLICT, _error(message, "invalid_request_error")
    return HTTPStatus.NOT_FOUND, _error("There is no such order.", "not_found_error")


def _folder(body: bytes) -> str | None:
    found = json.loads(body)
    folder = found.get("dir", 0) if isinstance(found, dict) else 0
    if folder is not None and (not isinstance(folder, str) or not folder or "\0" in folder):
        raise ValueError('the body must be {"dir": "PATH"} or {"dir": null}')
    return folder


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
