"""A gateway on a real port, with fake workers beneath it: its API is tested over real connections."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from rewarm.gateway.app import Gateway, create_app
from rewarm.gateway.settings import Settings
from waiting import until

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


class Running:
    """A gateway that runs in a thread of its own, as `rewarm serve` runs it but for the pages."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.gateway = Gateway(settings)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(create_app(self.gateway), log_config=None, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.client = httpx.Client(base_url=self.url, timeout=30, trust_env=False)
        until(lambda: self._server.started)

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._socket.close()

    def chat(self, text: str, model: str = "alpha", **more: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
        return self.client.post("/v1/chat/completions", json=body)

    def state(self, model: str = "alpha") -> dict[str, Any]:
        models = self.client.get("/api/models").json()["models"]
        return next(one for one in models if one["name"] == model)

    def asked(self) -> list[dict[str, Any]]:
        """What the workers were asked, oldest first."""
        file = self.settings.cache_dir / "asked.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def is_alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def model_folder(path: Path, **behave: str) -> Path:
    """A folder that passes for a model's."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").touch()
    (path / "behave.json").write_text(json.dumps(behave))
    return path
