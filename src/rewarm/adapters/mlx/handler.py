"""The worker's HTTP face: mlx-lm's handler, with the secret, true cache reports, and logs without prompts.

Knows the generator's context and nothing of models, caches or the disk.
"""

from __future__ import annotations

import hmac
import io
import json
import logging
import re
from http import HTTPStatus
from pathlib import Path
from typing import Any

import mlx_lm.server as engine

from rewarm.adapters import control, leaving
from rewarm.adapters.asked import Asked, read_headers
from rewarm.adapters.mlx import bodies
from rewarm.adapters.mlx.provider import NoModel
from rewarm.adapters.reports import Report

log = logging.getLogger(__name__)

_DRAIN_BYTES = 1 << 20
"""Read of a refused request's body, so that the client sees the answer and not a broken connection."""

_COMPLETIONS = {"/v1/completions": False, "/v1/chat/completions": True, "/chat/completions": True}
"""Paths that are posted to, and whether the body holds messages."""

_FAILED = "The engine failed in this request; the worker's log says how. Other requests and what is stored are safe."

_TELLING = ("do_POST", "handle_completion", "__call__")
"""Functions of mlx_lm.server that log bodies or generated text, whatever the level."""

_HARMLESS = re.compile(r"Starting (stream|completion):")


class Handler(engine.APIHandler):
    """Answers one connection.

    Args:
        generator: mlx-lm's response generator, or ours.
        secret: when set, every request must bear it, and browsers of other origins are told nothing.
    """

    rfile: Any

    def __init__(self, generator: Any, *args: Any, secret: str | None = None, **kwargs: Any) -> None:
        self._secret = secret
        self._asked = Asked()
        # The base class answers the request inside its constructor.
        super().__init__(_Recorder(generator), *args, **kwargs)

    def parse_request(self) -> bool:
        """Parse the request line and headers; False, with the answer sent, when the secret is missing."""
        if not super().parse_request():
            return False
        if self._secret is None or self._bears_secret(self._secret):
            return True
        self._drain()
        message = "This worker answers the rewarm gateway only: the Authorization header is missing or wrong."
        self._refuse(HTTPStatus.UNAUTHORIZED, message, "authentication_error")
        return False

    def do_POST(self) -> None:  # noqa: N802
        """Answer a completion request, if its body is one that the engine can be given."""
        if self._is_order():
            self._carry_out()
            return
        is_chat = _COMPLETIONS.get(self.path)
        if is_chat is None:
            self._drain()
            self._refuse(HTTPStatus.NOT_FOUND, f"There is no POST {self.path[:200]} here.", "not_found_error")
            return
        length = _length(self.headers.get("Content-Length"))
        if length > bodies.MAX_NBYTES:
            self._drain()
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"A request has at most {bodies.MAX_NBYTES} bytes.")
            return
        try:
            raw = self.rfile.read(length)
            self._asked = read_headers(self.headers.get, trusted=self._secret is not None)
            body = json.dumps(bodies.read(raw, is_chat=is_chat)).encode()
        except bodies.BadRequest as bad:
            self._refuse(HTTPStatus.BAD_REQUEST, str(bad), field=bad.field)
            return
        except ValueError as bad:
            self._refuse(HTTPStatus.BAD_REQUEST, str(bad))
            return
        connection, self.rfile = self.rfile, io.BytesIO(body)
        del self.headers["Content-Length"]
        self.headers["Content-Length"] = str(len(body))
        try:
            super().do_POST()
        finally:
            self.rfile = connection

    def handle_completion(self, request: Any, stop_words: list[str]) -> None:
        """Answer; what goes wrong before or after the engine has begun is told in the API's shape."""
        try:
            self.response_generator.asked = self._asked
            with leaving.watched(self.connection, self.response_generator.leave):
                super().handle_completion(request, stop_words)
        except _NotBegun as failure:
            self._tell_failure(failure.error)
        except ConnectionError:
            log.info("the client went away")
        except Exception:
            log.exception("rewarm: the engine failed in a reply")
            if self.stream:
                body = {"error": _error(_FAILED, "server_error")}
                self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
            else:
                # The status 200 is prepared, not sent.
                self._headers_buffer: list[bytes] = []
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, _FAILED, "server_error")

    def _tell_failure(self, error: Exception) -> None:
        """A request that the engine did not begin. What an error of its own says may name paths: it is logged."""
        if isinstance(error, bodies.BadRequest):
            self._refuse(HTTPStatus.BAD_REQUEST, str(error), field=error.field)
        elif isinstance(error, NoModel):
            self._refuse(HTTPStatus.NOT_FOUND, str(error), "not_found_error", "model")
        else:
            log.error("rewarm: a request failed", exc_info=error)
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, _FAILED, "server_error")

    def handle_models_request(self) -> None:
        """The model of the command line, by its folder's name. Hub models are the gateway's to find."""
        path = self.response_generator.cli_args.model
        data = [{"id": Path(path).name, "object": "model", "created": self.created}] if path else []
        self._send_json(HTTPStatus.OK, {"object": "list", "data": data})

    def generate_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A body or a chunk; bodies tell what the cache did."""
        response: dict[str, Any] = super().generate_response(*args, **kwargs)
        return response if self.stream else self._told(response)

    def completion_usage_response(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The chunk that `stream_options.include_usage` asks for."""
        return self._told(super().completion_usage_response(*args, **kwargs))

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log a request's line, but not the health checks that come several times a second."""
        if self.path != "/health":
            super().log_request(code, size)

    def _told(self, response: dict[str, Any]) -> dict[str, Any]:
        context = self.response_generator.context
        report: Report = getattr(context, "rewarm", None) or Report(prompt_tokens=len(context.prompt))
        response["usage"]["prompt_tokens_details"] = {"cached_tokens": max(0, context.prompt_cache_count)}
        response["rewarm"] = report.as_dict()
        return response

    def _set_cors_headers(self) -> None:
        if self._secret is None:
            super()._set_cors_headers()

    def _bears_secret(self, secret: str) -> bool:
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {secret}".encode())

    def do_GET(self) -> None:  # noqa: N802
        """Answer the gateway's questions, and the engine's own paths."""
        if self._is_order():
            self._carry_out()
        else:
            super().do_GET()

    def _is_order(self) -> bool:
        """Whether the gateway orders something: there is one where there is a secret."""
        return self._secret is not None and self.path.startswith(control.PREFIX)

    def _carry_out(self) -> None:
        length = min(_DRAIN_BYTES, _length(self.headers.get("Content-Length")))
        generator = self.response_generator.generator
        self._send_json(*control.answer(self.command, self.path, self.rfile.read(length), generator))

    def _drain(self) -> None:
        self.rfile.read(min(_DRAIN_BYTES, _length(self.headers.get("Content-Length"))))

    def _refuse(
        self, status: HTTPStatus, message: str, kind: str = "invalid_request_error", field: str | None = None
    ) -> None:
        self._send_json(status, {"error": _error(message, kind, field)})

    def _send_json(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        self._set_completion_headers(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)
        self.wfile.flush()


class _Recorder:
    """The generator as one handler sees it; keeps what is asked and the context of the request that it answers."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.asked = Asked()
        self.context: Any = None
        self._has_left = False

    def leave(self) -> None:
        """Nobody waits for the reply any more."""
        self._has_left = True
        if self.context is not None:
            self.context.stop()

    def generate(self, request: Any, arguments: Any, **kwargs: Any) -> Any:
        arguments.rewarm = self.asked
        try:
            self.context, responses = self.generator.generate(request, arguments, **kwargs)
        except Exception as error:
            # Past the engine's own handler, which would answer 404 with whatever the error says.
            raise _NotBegun(error) from error
        if self._has_left:
            self.context.stop()
        return self.context, responses

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)


class WithoutPrompts(logging.Filter):
    """Keeps request bodies and generated text out of the log, where mlx_lm.server writes them."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop or blank what may hold a person's text."""
        if record.funcName not in _TELLING or Path(record.pathname).parts[-2:] != ("mlx_lm", "server.py"):
            return True
        if record.levelno < logging.WARNING:
            return _HARMLESS.match(record.getMessage()) is not None
        record.msg, record.args = (
            "mlx_lm.server: a request or reply could not be parsed (its text is not logged)",
            None,
        )
        return True


class _NotBegun(BaseException):
    """A request failed before its reply began."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _error(message: str, kind: str, field: str | None = None) -> dict[str, Any]:
    """An error in the shape that OpenAI's clients read."""
    return {"message": message, "type": kind, "param": field, "code": None}


def _length(header: str | None) -> int:
    return int(header) if header and header.isdecimal() else 0
