"""A worker without a model, but with a real cache: a token is a word, the state is `FakeEngine`'s.

Answers a stream with "You said: ...", or with a call of the first tool, restores and saves as a seam does, and takes
`POST /rewarm/cache`, unless
its model's name has "stubborn" in it: then it knows no such request.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from blake3 import blake3

import rewarm
from rewarm.adapters.reports import explain
from rewarm.testing import FakeEngine

SECRET = os.environ.get("REWARM_WORKER_SECRET", "")
ENGINE = FakeEngine()
HEAD = {"id": "fake-1", "object": "chat.completion.chunk", "created": 1, "model": "fake"}


def tokens_of(messages: list[dict[str, Any]]) -> list[int]:
    words = [word for message in messages for word in (f"<{message['role']}>", *text_of(message).split())]
    return [int.from_bytes(blake3(word.encode()).digest(4), "little") for word in words]


def text_of(message: dict[str, Any]) -> str:
    calls = [f"call {call['function']['name']}" for call in message.get("tool_calls") or ()]
    return " ".join([message.get("content") or "", *calls])


def call_of(body: dict[str, Any]) -> dict[str, Any] | None:
    """The call of the first tool that is offered, when a person spoke last."""
    if not body.get("tools") or body["messages"][-1]["role"] != "user":
        return None
    function = {"name": body["tools"][0]["function"]["name"], "arguments": "{}"}
    return {"index": 0, "id": "call-1", "type": "function", "function": function}


class Worker(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, name: str, folder: Path | None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.name = name
        self.lock = threading.Lock()
        self.cache: rewarm.PrefixCache | None = None
        self.use(folder)

    def use(self, folder: Path | None) -> int:
        with self.lock:
            left = self.cache.close().unwritten if self.cache else 0
            self.cache = rewarm.open(folder) if folder else None
            return left

    def serve(self, messages: list[dict[str, str]], reply: str, headers: Any) -> dict[str, Any]:
        tokens = tokens_of(messages)
        report = {"cached_tokens": 0, "disk_tokens": 0, "memory_tokens": 0, "prompt_tokens": len(tokens)}
        with self.lock:
            if self.cache is None or self.cache.policy().paused:
                return {
                    **report,
                    "reason": "disabled",
                    "detail": "The disk cache is off.",
                    "restore_s": 0,
                    "saved_s": 0,
                }
            tenant = bytes.fromhex(headers["X-Rewarm-Tenant"] or "") or None
            space = self.cache.namespace(rewarm.Identity({"fake": self.name}, name=self.name), tenant=tenant)
            match = space.find(tokens)
            n = space.restore(match).n_tokens
            whole = tokens_of([*messages, {"role": "assistant", "content": reply}])
            space.save(whole, ENGINE.state(whole), "assistant", headers["X-Rewarm-Conversation"])
            self.cache.flush()
        counts = {"cached_tokens": n, "disk_tokens": n}
        return {
            **report,
            **counts,
            "reason": match.reason,
            "detail": explain(match.reason, match.detail),
            "restore_s": 0.01,
            "saved_s": n * 0.25,
        }


class Handler(BaseHTTPRequestHandler):
    server: Worker

    def do_GET(self) -> None:
        self.answer(200, {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {SECRET}":
            self.answer(401, {"error": {"message": "no"}})
        elif self.path == "/rewarm/cache" and "stubborn" not in self.server.name:
            left = self.server.use(Path(body["dir"]) if body["dir"] else None)
            self.answer(200, {"dir": body["dir"], "unwritten": left})
        elif self.path.startswith("/v1/"):
            self.stream(body)
        else:
            self.answer(404, {"error": {"message": "unknown"}})

    def stream(self, body: dict[str, Any]) -> None:
        call = call_of(body)
        reply = f"You said: {body['messages'][-1]['content']}" if call is None else f"call {call['function']['name']}"
        report = self.server.serve(body["messages"], reply, self.headers)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        if not report["cached_tokens"]:
            time.sleep(0.05)
        said = {"content": reply} if call is None else {"tool_calls": [call]}
        self.event({"choices": [{"index": 0, "delta": {"role": "assistant", **said}}]})
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls" if call else "stop"}]})
        counted = {"prompt_tokens": report["prompt_tokens"], "completion_tokens": 1, "total_tokens": 1}
        usage = {**counted, "prompt_tokens_details": {"cached_tokens": report["cached_tokens"]}}
        self.event({"choices": [], "usage": usage, "rewarm": report})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps({**HEAD, **data})}\n\n".encode())
        self.wfile.flush()

    def answer(self, status: int, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--rewarm-dir", type=Path)
    parser.add_argument("--rewarm-off", action="store_true")
    options, _ = parser.parse_known_args()
    server = Worker(options.port, options.model.name, options.rewarm_dir)

    def end(*_: object) -> None:
        server.use(None)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
