"""Eight clients, two hundred requests, two tiny models, memory for one: no error, no wrong answer, no growth."""

from __future__ import annotations

import gc
import importlib.util
import json
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from gateway_server import Running

from rewarm.gateway.settings import Settings
from waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp, which is not installed"),
]

N_CLIENTS, N_REQUESTS, N_PHASES = 8, 25, 5
MODELS = ("tiny-llama", "tiny-lfm2")
ACTIONS = ("whole", "stream", "leave", "give_up")
MAX_GROWTH = 48 * 2**20

SHARED = [131 + number * 7 % 128 for number in range(300)]
PROMPTS = [[*SHARED, 131 + number, 140] for number in range(6)] + [[131 + number, 140, 150] for number in range(4)]
"""Token ids; some share a long beginning, so that most requests restore something."""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "adapters" / "llama"))
    import tiny_ggufs

    paths = [tmp_path / f"{name}.gguf" for name in MODELS]
    tiny_ggufs.llama(paths[0])
    tiny_ggufs.lfm2(paths[1])
    settings = Settings(cache_dir=tmp_path / "kv", data_dir=tmp_path / "data", models=paths, bundled=False, discover=[])
    gateway = Running(settings)
    for name in MODELS:
        gateway.client.patch(f"/api/models/{name}", json={"flags": ["--parallel", "4", "--ctx-size", "8192"]})
    yield gateway
    gateway.close()


class Clients:
    """What the clients asked and saw."""

    def __init__(self, running: Running, expected: dict[tuple[str, str], str]) -> None:
        self.running = running
        self.expected = expected
        self.wrong: list[str] = []
        self.n_answers = 0
        self.cached = 0
        self.phase = threading.Barrier(N_CLIENTS)

    def run(self, seed: int) -> None:
        choose = random.Random(seed)
        with httpx.Client(base_url=self.running.url, timeout=240, trust_env=False) as client:
            for number in range(N_REQUESTS):
                if number % (N_REQUESTS // N_PHASES) == 0:
                    self.phase.wait(240)
                model = MODELS[number * N_PHASES // N_REQUESTS % 2]
                action = choose.choices(ACTIONS, [5, 5, 2, 1])[0]
                try:
                    getattr(self, action)(client, model, choose.choice(PROMPTS))
                except (httpx.HTTPError, AssertionError, ValueError, LookupError) as error:
                    self.wrong.append(f"{action}: {error!r}")

    def whole(self, client: httpx.Client, model: str, prompt: list[int]) -> None:
        answer = client.post("/v1/completions", json=body(model, prompt))
        assert answer.status_code == 200, answer.text
        self.check(model, prompt, answer.json()["choices"][0]["text"])
        self.cached += answer.json()["rewarm"]["cached_tokens"] > 0

    def stream(self, client: httpx.Client, model: str, prompt: list[int]) -> None:
        answer = client.post("/v1/completions", json={**body(model, prompt), "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-500:]
        self.check(model, prompt, text_of(answer.text))

    def leave(self, client: httpx.Client, model: str, prompt: list[int]) -> None:
        asked = {**body(model, prompt), "stream": True, "max_tokens": 400}
        with client.stream("POST", "/v1/completions", json=asked) as answer:
            assert answer.status_code == 200
            next(answer.iter_lines())

    def give_up(self, client: httpx.Client, model: str, prompt: list[int]) -> None:
        try:
            client.post("/v1/completions", json={**body(model, prompt), "max_tokens": 400}, timeout=0.05)
        except httpx.TimeoutException:
            return

    def check(self, model: str, prompt: list[int], text: str) -> None:
        self.n_answers += 1
        if text != self.expected[model, str(prompt)]:
            self.wrong.append(f"{model} {prompt[-2:]}: {text!r}, not {self.expected[model, str(prompt)]!r}")


def body(model: str, prompt: list[int]) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}


def text_of(stream: str) -> str:
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_a_load_of_clients_swaps_and_leavers(running: Running) -> None:
    workers = running.gateway.workers
    # Memory for one of the two: each phase asks the other model, and the one before has to go.
    workers._available_nbytes = lambda: 0 if any(worker.pid for worker in workers if worker.is_idle) else 2**40  # type: ignore[method-assign]
    expected = {}
    for model in MODELS:
        for prompt in PROMPTS:
            answer = running.client.post(
                "/v1/completions", json=body(model, prompt), headers={"X-Rewarm-Cache": "off"}, timeout=240
            )
            assert answer.status_code == 200, answer.text
            expected[model, str(prompt)] = answer.json()["choices"][0]["text"]
    process = psutil.Process()
    clients = Clients(running, expected)
    gc.collect()
    before = process.memory_info().rss
    threads = [threading.Thread(target=clients.run, args=(seed,)) for seed in range(N_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clients.wrong == []
    assert clients.n_answers > N_CLIENTS * N_REQUESTS / 2
    assert clients.cached > 10
    until(lambda: all(worker.n_asked == 0 for worker in workers), 60)
    gc.collect()
    grown = process.memory_info().rss - before
    print(f"{clients.n_answers} answers, {clients.cached} whole ones restored, {grown / 2**20:.1f} MiB grown")
    assert grown < MAX_GROWTH
    told = running.client.get("/metrics").text
    assert 'rewarm_replies_total{model="tiny-llama",served="disk"}' in told
