"""What a client is told when something cannot be done, in the shape that OpenAI's clients read."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    501: "not_supported_error",
}


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

    def body_at(self, path: str) -> dict[str, Any]:
        """The body in the shape of the API at `path`: Anthropic's for `/v1/messages`, else OpenAI's."""
        if not path.startswith("/v1/messages"):
            return self.body()
        kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> JSONResponse:
        """The HTTP response of the API at `path`."""
        return JSONResponse(self.body_at(path), self.status)


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


def no_key() -> Problem:
    """401: the request bears no key that is known."""
    return Problem(401, "This gateway asks for an API key: send it as 'Authorization: Bearer KEY'.", "invalid_api_key")


def not_offered(path: str, engine: str) -> Problem:
    """501: the model's engine does not have this part of the API."""
    message = f"{path} is not offered by the engine of this model ({engine}); models in GGUF files have it."
    return Problem(501, message, "not_offered_by_engine")
