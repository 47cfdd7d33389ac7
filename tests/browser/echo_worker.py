"""A worker without a model: takes the worker's flags, answers in its shapes, and keeps what it has read on "disk".

A token is a word. The last message of the user chooses the reply: `markdown`, `evil`, `slow`, `crash`, `refuse`;
any other is echoed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MARKDOWN = """Here is what a block is made of:

1. **Keys**: a chain of hashes, so equal prefixes meet.
2. **Rows**: what each layer computed.

| kind | kept for |
|------|----------|
| rows | attention |
| window | sliding attention |

```python
match = cache.find(tokens)
state = cache.restore(match)
```

> A miss has a reason; `find` always gives a match.
"""
OFF = {"cached_tokens": 0, "disk_tokens": 0, "memory_tokens": 0, "reason": "disabled", "detail": ""}
EVIL = (
    "before <img src='http://outside.example/a.png' onerror='window.hacked=1'><script>window.hacked=1</script> "
    "![x](http://outside.example/b.png) <iframe src='http://outside.example/'></iframe> after"
)


def words_of(messages: list[dict[str, str]]) -> list[str]:
    return [word for message in messages for word in (f"<{message['role']}>", *message["content"].split())]


class Worker(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, folder: Path) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.disk = folder / "fake-disk.json"
        self.memory: list[str] = []
        self.secret = os.environ.get("REWARM_WORKER_SECRET")

    def report(self, words: list[str]) -> dict[str, Any]:
        n_memory = shared(words, self.memory)
        on_disk = json.loads(self.disk.read_text()) if self.disk.exists() else []
        n_disk = 0 if n_memory else shared(words, on_disk)
        reason = "nothing_stored" if n_memory or n_disk or not on_disk else "diverged"
        detail = f"The prompt differs from what is stored from token {n_disk} on." if reason == "diverged" else ""
        return {
            "cached_tokens": n_memory + n_disk, "disk_tokens": n_disk, "memory_tokens": n_memory,
            "prompt_tokens": len(words), "reason": reason, "detail": detail, "restore_s": 0.01,
        }  # fmt: skip

    def keep(self, words: list[str]) -> None:
        self.memory = words
        self.disk.write_text(json.dumps(words))


def shared(one: list[str], other: list[str]) -> int:
    n = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        n += 1
    return n if n > 1 else 0


class Handler(BaseHTTPRequestHandler):
    server: Worker

    def do_GET(self) -> None:
        self.answer(200, {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.secret and self.headers["Authorization"] != f"Bearer {self.server.secret}":
            self.answer(401, {"error": {"message": "no", "type": "authentication_error"}})
            return
        asked = body["messages"][-1]["content"]
        if asked.startswith("refuse"):
            self.answer(400, {"error": {"message": "The prompt is longer than the model's context.", "type": "x"}})
            return
        self.stream(asked, words_of(body["messages"]), is_off=self.headers["X-Rewarm-Cache"] == "off")

    def stream(self, asked: str, words: list[str], *, is_off: bool) -> None:
        report = OFF | {"prompt_tokens": len(words)} if is_off else self.server.report(words)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        pause = 0.1 if asked.startswith("slow") else 0.005
        for done in range(0, len(words), max(1, len(words) // 4)):
            self.send(f": keepalive {done}/{len(words)}")
            time.sleep(5 * pause)
        reply = {"markdown": MARKDOWN, "evil": EVIL}.get(asked.split()[0], f"You said: {asked}.")
        if asked.startswith("slow"):
            reply = " ".join(f"word{n}" for n in range(200))
        for number, piece in enumerate(reply.split(" ")):
            if asked.startswith("crash") and number == 2:
                os._exit(3)
            self.event({"choices": [{"index": 0, "delta": {"content": (" " if number else "") + piece}}]})
            time.sleep(pause)
        if not is_off:
            self.server.keep([*words, "<assistant>", *reply.split()])
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": len(words), "completion_tokens": 9, "total_tokens": len(words) + 9}
        self.event({"choices": [], "usage": usage, "rewarm": report})
        self.send("data: [DONE]")

    def event(self, data: dict[str, Any]) -> None:
        self.send("data: " + json.dumps({"object": "chat.completion.chunk", **data}))

    def send(self, line: str) -> None:
        self.wfile.write(f"{line}\n\n".encode())
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
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--rewarm-dir", type=Path)
    options, _ = parser.parse_known_args()
    if "broken" in options.model.name:
        sys.exit("The weights of this model are damaged: model.safetensors ends too early.")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    options.rewarm_dir.mkdir(parents=True, exist_ok=True)
    time.sleep(0.3)
    Worker(options.port, options.rewarm_dir).serve_forever()


if __name__ == "__main__":
    main()
