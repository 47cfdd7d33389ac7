"""A worker without a model: the HTTP face of `rewarm mlx-lm`, answering with words that it is told to say.

Run as `python fake_worker.py --model PATH --host HOST --port PORT --rewarm-dir DIR`. It keeps what it was
asked in `DIR/asked.jsonl`, "restores" prompts that it has seen, and does what a message commands:

    SAY word word     the reply; without it the last message's words backwards
    SLOW              a tenth of a second between words, without end
    HANG              no answer at all until the client leaves, then `DIR/left` appears
    DIE, DIE LATER    the process ends before the answer, or in its middle
    FAIL LATER        the engine fails in the answer's middle, and says so
    REFUSE            400, as mlx-lm says it

The model's folder may hold `behave.json`: {"start": "fail" | "hang"}, {"end": "ignore"}.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SECRET = os.environ["REWARM_WORKER_SECRET"]


class Handler(BaseHTTPRequestHandler):
    home: Path
    model: Path

    def do_GET(self) -> None:
        if self._bears_secret():
            self._json(200 if self.path == "/health" else 404, {"status": "ok"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._bears_secret():
            return
        asked = json.loads(body)
        with (self.home / "asked.jsonl").open("a") as file:
            told = {name: value for name, value in self.headers.items() if name.lower().startswith("x-rewarm-")}
            file.write(json.dumps({"path": self.path, "model_folder": str(self.model), "told": told, **asked}) + "\n")
        try:
            self._answer(asked)
        except ConnectionError:
            (self.home / "left").touch()

    def _answer(self, asked: dict[str, Any]) -> None:
        prompt = asked["prompt"] if "prompt" in asked else "\n".join(m["content"] for m in asked["messages"])
        last = prompt if "prompt" in asked else asked["messages"][-1]["content"]
        if "REFUSE" in last:
            self._json(400, {"error": "max_tokens must be a non-negative integer"})
        elif "HANG" in last:
            self._wait_until_left()
        elif last.startswith("DIE") and "LATER" not in last:
            os._exit(9)
        elif asked.get("stream"):
            self._stream(asked, prompt, last)
        else:
            words = " ".join(reply_to(last))
            key, value = ("text", words) if "prompt" in asked else ("message", {"role": "assistant", "content": words})
            choice = {"index": 0, key: value, "finish_reason": "stop"}
            self._json(200, {**self._head(asked), "choices": [choice], **self._usage(prompt)})

    def _stream(self, asked: dict[str, Any], prompt: str, last: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        n_tokens = len(prompt.split())
        self._write(f": keepalive {n_tokens // 2}/{n_tokens}\n\n")
        for word in reply_to(last):
            self._chunk(asked, {"content": word + " "}, None)
            if "DIE LATER" in last:
                os._exit(9)
            if "FAIL LATER" in last:
                self._write('data: {"error": {"message": "The engine failed: RuntimeError: no memory"}}\n\n')
                return
            if "SLOW" in last:
                time.sleep(0.1)
        self._chunk(asked, {}, "stop")
        if (asked.get("stream_options") or {}).get("include_usage"):
            self._write(f"data: {json.dumps({**self._head(asked), 'choices': [], **self._usage(prompt)})}\n\n")
        self._write("data: [DONE]\n\n")

    def _chunk(self, asked: dict[str, Any], delta: dict[str, Any], finish_reason: str | None) -> None:
        said = {"text": delta.get("content", "")} if "prompt" in asked else {"delta": delta}
        choice = {"index": 0, **said, "finish_reason": finish_reason}
        self._write(f"data: {json.dumps({**self._head(asked), 'choices': [choice]})}\n\n")

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def _head(self, asked: dict[str, Any]) -> dict[str, Any]:
        kind = "text_completion" if "prompt" in asked else f"chat.completion{'.chunk' if asked.get('stream') else ''}"
        return {"id": "fake-1", "object": kind, "created": 1, "model": asked["model"]}

    def _usage(self, prompt: str) -> dict[str, Any]:
        """As many words of the prompt are "cached" as it shares with a prompt seen before, by any process."""
        seen = self.home / "seen.jsonl"
        words = prompt.split()
        before = [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []
        n_cached = max((n_shared(words[:-1], one["words"]) for one in before), default=0)
        from_memory = any(one["pid"] == os.getpid() for one in before)
        with seen.open("a") as file:
            file.write(json.dumps({"words": words, "pid": os.getpid()}) + "\n")
        report = {
            "cached_tokens": n_cached,
            "disk_tokens": 0 if from_memory else n_cached,
            "memory_tokens": n_cached if from_memory else 0,
            "prompt_tokens": len(words),
            "reason": "nothing_stored",
            "detail": "Nothing more is stored for this prompt.",
            "restore_s": 0.01,
        }
        details = {"prompt_tokens_details": {"cached_tokens": n_cached}}
        usage = {"prompt_tokens": len(words), "completion_tokens": 3, "total_tokens": len(words) + 3, **details}
        return {"usage": usage, "rewarm": report}

    def _wait_until_left(self) -> None:
        while not select.select([self.connection], [], [], 0.05)[0]:
            pass
        (self.home / "left").touch()

    def _bears_secret(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {SECRET}":
            return True
        self._json(401, {"error": {"message": "no secret", "type": "authentication_error"}})
        return False

    def _json(self, status: int, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        print(f"fake worker: {format % args}", flush=True)


def reply_to(last: str) -> list[str]:
    if "SLOW" in last:
        return [f"w{number}" for number in range(10_000)]
    _, said, words = last.partition("SAY ")
    return words.split() if said else last.split()[::-1]


def n_shared(one: list[str], other: list[str]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def end_with_input(end: Any) -> None:
    while os.read(0, 4096):
        pass
    end()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--host", "--rewarm-dir"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    Handler.home, Handler.model = Path(options.rewarm_dir), Path(options.model)
    behaviour = Handler.model / "behave.json"
    behave = json.loads(behaviour.read_text()) if behaviour.exists() else {}
    print(f"fake worker: loading {options.model}", flush=True)
    # A worker that prints its secret: it must reach no log.
    print(f"fake worker: secret {SECRET}", flush=True)
    if behave.get("start") == "fail":
        sys.exit("fake worker: the weights do not fit")
    if behave.get("start") == "hang":
        time.sleep(600)
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    server.daemon_threads = True

    def end(*_: Any) -> None:
        (Handler.home / f"ended-{os.getpid()}").touch()
        os._exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if behave.get("end") == "ignore" else end)
    threading.Thread(target=end_with_input, args=(end,), daemon=True).start()
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
