"""A llama-server for tests: its API, slot files that the codec reads, and a model whose text depends on every
byte of its KV. A wrong state gives a wrong reply.

As a program it takes llama-server's flags. In a prompt, `DIE` ends the process in the middle of the reply,
`SLOW` makes each token take a while (`slow_s`), and `LONG` gives 40 tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    # Some hundred of these are started: without the package's own imports it takes a third of the time.
    sys.modules["rewarm"] = types.ModuleType("rewarm")
    sys.modules["rewarm"].__path__ = [str(Path(__file__).parents[3] / "src" / "rewarm")]

from rewarm.adapters.llama import slot_file
from rewarm.adapters.llama.slot_parts import KvSection, Memory, Plane, SlotFile, Stream

FLAGS = "--help --version --model --host --port --parallel --ctx-size --slot-save-path --ctx-checkpoints --cache-ram "
FLAGS += "--no-context-shift --cache-reuse --no-cache-idle-slots --context-shift --alias"
WIDTH = 4
BOS = 256
N_CTX = 4096


def next_row(before: np.ndarray, token: int) -> np.ndarray:
    """The KV of a token: depends on all of what stands before it."""
    digest = hashlib.blake2b(before.tobytes() + token.to_bytes(8, "little"), digest_size=WIDTH * 2).digest()
    return (np.frombuffer(digest, "<u2") / 8).astype("<f4")


class Slot:
    """One slot: tokens and a row of KV for each."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tokens: list[int] = []
        self.rows = np.zeros((0, WIDTH), "<f4")
        self.salt = 0
        self.spoiled = False

    def cut(self, n: int) -> None:
        self.tokens, self.rows = self.tokens[:n], self.rows[:n]

    def evaluate(self, tokens: list[int]) -> None:
        rows = [self.rows[-1] if len(self.rows) else np.full(WIDTH, self.spoiled, "<f4")]
        for token in tokens:
            rows.append(next_row(rows[-1], token + self.salt))
        self.rows = np.concatenate([self.rows, np.stack(rows[1:])]) if tokens else self.rows
        self.tokens = self.tokens + tokens

    def say(self) -> int:
        """The next token: of all bytes of the KV."""
        return 97 + hashlib.blake2b(self.rows.tobytes(), digest_size=1).digest()[0] % 26

    def write(self, path: Path) -> int:
        n = len(self.tokens)
        plane = Plane(0, WIDTH * 4, 0, self.rows.tobytes())
        values = Plane(0, WIDTH * 4, 0, (self.rows + 1).astype("<f4").tobytes())
        stream = Stream(np.arange(n, dtype=np.int32), None, np.zeros(n, np.int32), 0, (0, 0), (plane,), (values,))
        memory = Memory(KvSection((stream if n else None,)), None, None)
        pieces = slot_file.write(SlotFile(4, np.array(self.tokens, np.int32), True, (), memory, None))
        path.write_bytes(b"".join(pieces))
        return path.stat().st_size

    def read(self, path: Path) -> None:
        found = slot_file.parse(memoryview(path.read_bytes()))
        assert found.memory.base is not None
        (stream,) = found.memory.base.streams
        assert stream is not None
        self.tokens = found.tokens.tolist()
        self.rows = np.frombuffer(stream.keys[0].data, "<f4").reshape(-1, WIDTH)


class Server(ThreadingHTTPServer):
    """The whole server."""

    daemon_threads = True

    def __init__(self, flags: dict[str, str]) -> None:
        super().__init__((flags["--host"], int(flags["--port"])), Handler)
        self.slots = [Slot() for _ in range(int(flags.get("--parallel", "2")))]
        self.folder = flags.get("--slot-save-path", "")
        self.key = os.environ.get("LLAMA_API_KEY", "")
        self.behaviour = json.loads(os.environ.get("FAKE_BEHAVIOUR", "{}"))
        self.log: list[Any] = []
        if self.behaviour.get("computes_otherwise"):
            for slot in self.slots:
                slot.salt = 1000


class Handler(BaseHTTPRequestHandler):
    """Answers as llama-server does."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        found = {
            "/health": {"status": "ok"},
            "/props": {
                "total_slots": len(self.server.slots),
                "default_generation_settings": {"n_ctx": N_CTX},
                "build_info": "fake",
            },
            "/v1/models": {"object": "list", "data": [{"id": "fake"}]},
            "/slots": [{"id": i, "n_prompt_tokens": len(s.tokens)} for i, s in enumerate(self.server.slots)],
            "/fake/log": self.server.log,
            "/fake/pid": os.getpid(),
        }
        if self._is_allowed():
            known = self.path in found
            self._json(200 if known else 404, found.get(self.path, {"error": {"message": "not found", "code": 404}}))

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if not self._is_allowed():
            return
        body = json.loads(raw or b"{}")
        route = self.path.partition("?")[0]
        self._note(route, body)
        if route == "/tokenize":
            self._json(200, {"tokens": tokenise(body["content"], special=body.get("add_special", False))})
        elif route == "/apply-template":
            self._json(200, {"prompt": template(body)})
        elif route.startswith("/slots/"):
            self._slot_action(int(route.rsplit("/", 1)[1]), self.path.partition("action=")[2], body)
        elif route in ("/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"):
            self._complete(route, body)
        elif route == "/v1/embeddings":
            self._json(501, {"error": {"message": "no embeddings", "type": "not_supported_error", "code": 501}})
        else:
            self._json(200, {"echo": body})

    def _note(self, route: str, body: Any) -> None:
        """Keep a request in the log; or do what a test wants of the fake itself."""
        if route == "/fake/purge":
            for slot in self.server.slots:
                slot.cut(0)
        elif route == "/fake/begin":
            self.server.log.clear()
        elif route not in ("/tokenize", "/apply-template"):
            told = {k: v for k, v in body.items() if k != "messages"} if isinstance(body, dict) else body
            self.server.log.append([self.path, told])

    def _is_allowed(self) -> bool:
        if not self.server.key or self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return True
        self._json(401, {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}})
        return False

    def _die_once(self, moment: str) -> None:
        """End in the middle of what the test has named, if that file of its is still there."""
        dies = self.server.behaviour.get("dies_once", {})
        if moment in dies and Path(dies[moment]).exists():
            Path(dies[moment]).unlink()
            os._exit(1)

    def _slot_action(self, number: int, action: str, body: dict[str, Any]) -> None:
        slot = self.server.slots[number]
        self._die_once(action)
        path = Path(self.server.folder + body.get("filename", ""))
        with slot.lock:
            if action == "erase":
                slot.cut(0)
                slot.spoiled = False
                self._json(200, {"id_slot": number, "n_erased": 0})
            elif action == "save" and self.server.behaviour.get("cannot_save"):
                self._json(501, {"error": {"message": "This server does not support slots action.", "code": 501}})
            elif action == "save":
                # True is half a second; the looks at the start are quick.
                if len(slot.tokens) > 64:
                    time.sleep(self.server.behaviour.get("saves_slowly", 0) / 2)
                n = slot.write(path)
                answer = {"n_saved": len(slot.tokens), "n_written": n, "timings": {"save_ms": 0.5}}
                self._json(200, {"id_slot": number, **answer})
            elif self.server.behaviour.get("refuses_restore") or (
                self.server.behaviour.get("shares_cells")
                and any(other.tokens for other in self.server.slots if other is not slot)
            ):
                slot.cut(0)
                slot.spoiled = bool(self.server.behaviour.get("refuses_restore"))
                self._json(400, {"error": {"message": "Unable to restore slot: no room", "code": 400}})
            else:
                slot.read(path)
                n = len(slot.tokens)
                if self.server.behaviour.get("forgets_restore"):
                    slot.cut(0)
                self._json(200, {"id_slot": number, "n_restored": n, "n_read": path.stat().st_size})

    def _complete(self, route: str, body: dict[str, Any]) -> None:
        text = template(as_chat(body)) if "prompt" not in body else body["prompt"]
        tokens = text if isinstance(text, list) else tokenise(text, special=True)
        slot = self.server.slots[body.get("id_slot", 0) % len(self.server.slots)]
        with slot.lock:
            cached = 0
            while cached < min(len(tokens) - 1, len(slot.tokens)) and tokens[cached] == slot.tokens[cached]:
                cached += 1
            if not body.get("cache_prompt", True):
                cached = 0
            slot.cut(cached)
            self._die_once("prefill" if len(tokens) > 2 else "")
            slot.evaluate(tokens[cached:])
            timings = {"cache_n": cached, "prompt_n": len(tokens) - cached, "prompt_ms": 1.0 * (len(tokens) - cached)}
            last = bytes(token for token in tokens[-40:] if token < BOS).decode(errors="replace")
            n = 40 if "LONG" in last else int(body.get("max_tokens") or body.get("n_predict") or 4)
            self._reply(route, body, slot, Reply(n, len(tokens), timings, last))

    def _reply(self, route: str, body: dict[str, Any], slot: Slot, reply: Reply) -> None:
        streams = bool(body.get("stream"))
        if streams:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.send_header("Access-Control-Allow-Origin", "*")
            self.end_headers()
        if streams and body.get("return_progress") and self.server.behaviour.get("reports_progress"):
            for done in (reply.n_prompt // 2, reply.n_prompt):
                told = {"total": reply.n_prompt, "cache": 0, "processed": done, "time_ms": 1}
                self._chunk({"choices": [{"index": 0, "delta": {"content": None}}], "prompt_progress": told})
        said = self._generate(slot, reply, streams=streams)
        usage = {
            "prompt_tokens": reply.n_prompt,
            "completion_tokens": reply.n,
            "prompt_tokens_details": {"cached_tokens": reply.timings["cache_n"]},
        }
        timings = {**reply.timings, "predicted_n": reply.n}
        if streams:
            end: dict[str, Any] = {"choices": [], "timings": timings}
            if (body.get("stream_options") or {}).get("include_usage"):
                end["usage"] = usage
            self._chunk(end)
            self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        elif route in ("/v1/messages", "/v1/responses"):
            n_cached = reply.timings["cache_n"]
            if route == "/v1/messages":
                told = {"cache_read_input_tokens": n_cached, "input_tokens": reply.n_prompt - n_cached}
            else:
                told = {"input_tokens": reply.n_prompt, "input_tokens_details": {"cached_tokens": n_cached}}
            self._json(200, {"content": said, "usage": {**told, "output_tokens": reply.n}})
        elif route == "/completion":
            self._json(200, {"content": said, "stop_type": "limit", "tokens_evaluated": 1, "timings": timings})
        elif route == "/v1/completions":
            self._json(200, {"choices": [{"text": said}], "usage": usage, "timings": timings})
        else:
            choice = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": said}}
            self._json(200, {"choices": [choice], "usage": usage, "timings": timings})

    def _generate(self, slot: Slot, reply: Reply, *, streams: bool) -> str:
        pieces = []
        for i in range(reply.n):
            token = slot.say()
            pieces.append(chr(token))
            if i + 1 < reply.n:
                slot.evaluate([token])
            if streams:
                self._chunk({"choices": [{"index": 0, "delta": {"content": pieces[-1]}}]})
            if "DIE" in reply.last and i == 1:
                os._exit(1)
            if "SLOW" in reply.last:
                time.sleep(self.server.behaviour.get("slow_s", 0.1))
        return "".join(pieces)

    def _chunk(self, chunk: dict[str, Any]) -> None:
        raw = b"data: " + json.dumps(chunk).encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(raw), raw))

    def _json(self, status: int, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


class Reply:
    """What a request will be told."""

    def __init__(self, n: int, n_prompt: int, timings: dict[str, Any], last: str) -> None:
        self.n, self.n_prompt, self.timings, self.last = n, n_prompt, timings, last


def tokenise(text: str, *, special: bool) -> list[int]:
    """One token a byte."""
    return [BOS] * special + list(text.encode())


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """A request of any of the three APIs, as messages."""
    head = body.get("system") or body.get("instructions")
    asked = body.get("messages") or body.get("input")
    rest = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return {"messages": [*([{"role": "system", "content": head}] if head else []), *rest]}


def plain(content: Any) -> str:
    """The text of a content that is one, or of its parts."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def template(body: dict[str, Any]) -> str:
    """The prompt of a conversation."""
    parts = [f"<{message['role']}>{plain(message['content'])}</>" for message in body["messages"]]
    return "".join(parts) + "<assistant>"


def main(arguments: list[str]) -> None:
    if "--version" in arguments:
        print("version: 1 (fake)")
    elif "--help" in arguments:
        print(FLAGS)
    else:
        words = [*arguments, "-"]
        flags = {word: follow for word, follow in itertools.pairwise(words) if word.startswith("--")}
        Server(flags).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
