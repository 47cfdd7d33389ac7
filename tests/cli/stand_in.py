"""A worker without a model, for tests: the worker's HTTP face, an echo, and faults on demand.

    stand_in.py FAULT FOLDER|off --host HOST --port PORT

Its "cache" is a file in FOLDER that holds the text of all turns so far; a token is a word.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

FAULT, FOLDER = sys.argv[1:3]
HOST, PORT = sys.argv[4], int(sys.argv[6])
SECRET = os.environ["REWARM_WORKER_SECRET"]
FIRST_TEXT_DELAY_S = 0.05
written_here: list[str] = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200 if self._known() else 401, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._known():
            self._answer(401, {"error": {"message": "no secret"}})
        elif FAULT == "refuse":
            self._answer(503, {"error": {"message": "the model is on holiday"}})
        else:
            self._stream(body)

    def _stream(self, body: dict) -> None:
        assert body["temperature"] == 0
        assert body["stream_options"] == {"include_usage": True}
        prompt = " ".join(message["content"] for message in body["messages"])
        cached = _cached(prompt)
        text = f"reply {len(body['messages'])}"
        if FAULT == "drift" and cached and not written_here:
            text += " differs"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        if FAULT == "hang":
            Path(os.environ["STAND_IN_PID"]).write_text(str(os.getpid()))
            time.sleep(3600)
        if FAULT == "die":
            print("out of memory, says the stand-in", file=sys.stderr, flush=True)
            os._exit(9)
        time.sleep(FIRST_TEXT_DELAY_S)
        for piece in [] if FAULT == "silent" else text.split(" "):
            self._event({"choices": [{"delta": {"content": piece}}]})
        if FAULT == "error":
            self._event({"error": {"message": "prefill failed"}})
        if FAULT != "no-usage":
            usage = {"prompt_tokens": len(prompt.split()), "prompt_tokens_details": {"cached_tokens": cached}}
            self._event({"choices": [], "usage": usage})
        if FOLDER != "off":
            Path(FOLDER).mkdir(exist_ok=True)
            (Path(FOLDER) / "turns").write_text(prompt)
            written_here.append(prompt)
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _known(self) -> bool:
        return self.headers["Authorization"] == f"Bearer {SECRET}"

    def _answer(self, status: int, body: dict) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


def _cached(prompt: str) -> int:
    turns = Path(FOLDER) / "turns"
    stored = turns.read_text() if FOLDER != "off" and turns.exists() else ""
    return len(stored.split()) if stored and prompt.startswith(stored) else 0


if FAULT == "early":
    print("line 1\nno such model, says the stand-in", file=sys.stderr)
    sys.exit(5)
if FAULT == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if pids := os.environ.get("STAND_IN_PIDS"):
    with Path(pids).open("a") as file:
        file.write(f"{os.getpid()}\n")
HTTPServer((HOST, PORT), Handler).serve_forever()
