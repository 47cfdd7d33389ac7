"""A real llama-server in a process of its own, for tests of slot files.

As a program: `slot_server.py MODEL FOLDER name=value...` serves until its standard input ends.
"""

from __future__ import annotations

import ast
import enum
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class SlotServer:
    """`with SlotServer(model, folder, n_parallel=2) as server:`; settings are those of `CommonParams`."""

    def __init__(self, model: Path, folder: Path, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        pairs = [f"{name}={value!r}" for name, value in settings.items()]
        self.n_slots = int(settings.get("n_parallel", 1))
        with (folder / "log.txt").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(model), str(folder), *pairs],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        line = self.process.stdout.readline().decode() if self.process.stdout else ""
        if not line.startswith("http"):
            raise AssertionError("the server did not start: " + (folder / "log.txt").read_text()[-2000:])
        self.url = line.strip()

    def __enter__(self) -> SlotServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                found: dict[str, Any] = json.load(reply)
        except urllib.error.HTTPError as error:
            found = json.load(error)
        return found

    def complete(self, tokens: Sequence[int], n: int = 0, slot: int = 0, **more: Any) -> dict[str, Any]:
        """Evaluate `tokens` and generate `n` more, at temperature 0."""
        body = {"prompt": list(tokens), "n_predict": n, "temperature": 0, "id_slot": slot, "cache_prompt": True}
        reply = self.post("/completion", {**body, "return_tokens": True, "ignore_eos": True, **more})
        assert "error" not in reply, reply
        return reply

    def save(self, slot: int = 0, name: str = "slot.bin") -> bytes:
        reply = self.post(f"/slots/{slot}?action=save", {"filename": name})
        assert "error" not in reply, reply
        return (self.folder / name).read_bytes()

    def restore(self, data: bytes, slot: int = 0, name: str = "restore.bin") -> dict[str, Any]:
        (self.folder / name).write_bytes(data)
        return self.post(f"/slots/{slot}?action=restore", {"filename": name})

    def erase(self, slot: int = 0) -> None:
        self.post(f"/slots/{slot}?action=erase", {})


def _serve(model: str, folder: str, *pairs: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    defaults = {"n_ctx": 2048, "n_parallel": 1, "cache_ram_mib": 0, "cache_idle_slots": False, "ctx_shift": False}
    defaults |= {"slot_save_path": folder + "/", "warmup": False, "port": 0, "n_gpu_layers": 0}
    for name, value in {**defaults, **dict(_pair(pair) for pair in pairs)}.items():
        current = getattr(params, name)
        setattr(params, name, type(current)[value] if isinstance(current, enum.Enum) else value)
    params.cpuparams.n_threads = 2
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


def _pair(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, ast.literal_eval(value)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
