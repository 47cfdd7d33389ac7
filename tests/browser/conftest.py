"""A gateway as `rewarm serve` starts it, with echoing workers, and Chromium before it.

Every test ends with: no error in the console, and no request to another host.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nicegui", reason="needs the gateway's packages")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")

sync_api.expect.set_options(timeout=30_000)  # for two slow cores that do other things as well

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ECHO = [sys.executable, str(Path(__file__).with_name("echo_worker.py"))]


class Served:
    """A gateway process; may be stopped and started again over the same folders."""

    def __init__(self, folder: Path, models: list[Path], worker: list[str] | None) -> None:
        self._models = models
        self._environment = {
            **os.environ,
            "REWARM_DATA_DIR": str(folder / "data"),
            "REWARM_DIR": str(folder / "kv"),
            "REWARM_BUNDLED": "false",
            **({"REWARM_WORKER_COMMAND": json.dumps(worker)} if worker else {}),
        }
        self._log = folder / "serve.log"
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, at the same port as before, and return when it listens."""
        options = [part for path in self._models for part in ("--model", str(path))]
        command = [sys.executable, "-m", "rewarm", "serve", "--port", str(self.port), *options]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                command, env=self._environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        line = self._process.stdout.readline()
        found = re.search(r":(\d+)\s*$", line)
        assert found, f"{line}\n{self._log.read_text()}"
        self.port = int(found[1])

    def stop(self) -> None:
        """End it as Ctrl-C does."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise
        finally:
            self._process = None
        said = self._log.read_text()
        assert "Traceback" not in said, said


class Page:
    """The chat page in a browser, by what a person sees of it."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.input = page.get_by_role("textbox", name="Message")
        self.replies = page.get_by_role("article", name="Reply")
        self.mine = page.get_by_role("article", name="Your message")
        self.notes = page.locator(".rw-note-words")
        self.chip = page.locator(".rw-chip")

    def open(self, at: str = "/") -> Page:
        self.page.goto(self.url + at)
        if at == "/":
            self.page.locator(".rw-input").wait_for()
        self.wired()
        return self

    def go(self, name: str) -> None:
        """Follow the link of that name at the top, and return when the page it leads to works."""
        link = self.page.get_by_role("link", name=name, exact=True)
        link.click()
        sync_api.expect(link).to_have_attribute("aria-current", "page")
        self.wired()

    def wired(self) -> None:
        """Wait for the page's socket: until it is there, the page shows and does nothing."""
        self.page.wait_for_function("window.did_handshake === true")

    def press(self, field: Any, *keys: str, words: str = "") -> None:
        """Type and then press keys in a field that the page itself focuses; before it does, they would go nowhere."""
        self.wired()
        sync_api.expect(field).to_be_focused()
        self.page.keyboard.type(words)
        for key in keys:
            self.page.keyboard.press(key)

    def say(self, words: str) -> None:
        """Type a message where the page has put the focus, and send it."""
        self.press(self.input, "Enter", words=words)
        sync_api.expect(self.mine.last).to_have_text(words)

    def ask(self, words: str) -> str:
        """Say it, wait until the reply has ended, and give the quiet line under it."""
        n_before = self.replies.count()
        self.say(words)
        sync_api.expect(self.replies).to_have_count(n_before + 1)
        self.at_rest()
        return self.notes.last.inner_text()

    def at_rest(self) -> None:
        """Wait until no reply is being made."""
        sync_api.expect(self.page.locator(".rw-composer:not(.rw-busy)")).to_be_visible(timeout=60_000)

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=re.compile(name)).locator("visible=true")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium of the machine. No longer than a module: Playwright keeps an event loop running on this
    thread, and other tests run loops of their own.
    """
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is installed")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts a gateway: `serve(model_folders)` with real workers, `serve(model_folders, ECHO)` without."""
    started: list[Served] = []

    def start(models: list[Path], worker: list[str] | None = None) -> Served:
        gateway = Served(tmp_path, models, worker)
        started.append(gateway)
        gateway.start()
        return gateway

    yield start
    for gateway in started:
        gateway.stop()


@pytest.fixture
def served(tmp_path: Path, serve: Callable[..., Served]) -> Served:
    """A gateway with the models `echo` and `broken`."""
    models = [tmp_path / "models" / name for name in ("echo", "broken")]
    for folder in models:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").touch()
    return serve(models, ECHO)


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Page]]:
    """Opens the page of a gateway in a browser profile of its own; keywords as for a Playwright context."""
    contexts: list[Any] = []
    errors: list[str] = []
    hosts: set[str] = set()
    allowed: set[str] = set()

    def opened(gateway: Served, *, at: str = "/", may_lose_server: bool = False, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        if not may_lose_server:
            page.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        context.on("request", lambda request: hosts.add(request.url.split("?")[0]))
        page.on("websocket", lambda socket: hosts.add(socket.url.split("?")[0]))
        allowed.update({gateway.url, gateway.url.replace("http", "ws")})
        return Page(page, gateway.url).open(at)

    yield opened
    for context in contexts:
        context.close()
    assert errors == []
    outside = [url for url in hosts if not url.startswith((*allowed, "data:", "blob:"))]
    assert outside == []
