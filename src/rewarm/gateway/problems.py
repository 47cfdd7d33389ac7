"""What a client is told when something cannot be done, in the shape that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse


class Problem(Exception):
    """A request that cannot be answered, and what to tell the client.

    Args:
        status: of the HTTP response.
        message: what happened and what to do, for a person.
        code: OpenAI's word for it, for programs.
        param: the parameter of the request that is meant.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), self.status)


def unknown_model(name: str, offered: list[str]) -> Problem:
    """404: no model bears that name."""
    known = ", ".join(offered) or "none"
    return Problem(404, f"There is no model {name[:200]!r}. Models offered: {known}.", "model_not_found", "model")


def not_started(message: str) -> Problem:
    """503: the model's worker could not be started."""
    return Problem(503, message, "model_not_started")


def worker_lost(message: str) -> Problem:
    """502: the model's worker ended, or broke off its answer."""
    return Problem(502, message, "worker_failed")
