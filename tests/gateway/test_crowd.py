"""Many clients at once who ask, leave, unload and kill: each gets an answer or a clear error, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path

import httpx
import pytest
from gateway_server import Running, is_alive

from waiting import until

N_CLIENTS = 8
N_STEPS = 12
MODELS = ["alpha", "beta"]

# A model may be stopped or killed under an answer (502), or stopped while it is being loaded (503).
ANSWERED = {200, 502, 503}
EXPECTED = {"ask": ANSWERED, "stream": ANSWERED, "leave": ANSWERED, "unload": {200}, "kill": {200}}


class Crowd:
    """What the clients did and saw."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.seen: Counter[tuple[str, int]] = Counter()
        self.pids: set[int] = set()
        self.wrong: list[str] = []

    def client(self, seed: int) -> None:
        """One client's whole life."""
        choose = random.Random(seed)
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as client:
            for number in range(N_STEPS):
                action = choose.choices(list(EXPECTED), [6, 6, 3, 1, 1])[0]
                step = getattr(self, action)
                try:
                    self.seen[action, step(client, choose.choice(MODELS), f"r{seed}x{number}")] += 1
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))

    def ask(self, client: httpx.Client, model: str, word: str) -> int:
        answer = client.post("/v1/chat/completions", json=body(model, f"SAY {word}"))
        if answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] != word:
            self.wrong.append(answer.text)
        return answer.status_code

    def stream(self, client: httpx.Client, model: str, word: str) -> int:
        answer = client.post("/v1/chat/completions", json={**body(model, f"SAY {word}"), "stream": True})
        if answer.status_code == 200 and word not in answer.text and '"worker_failed"' not in answer.text:
            self.wrong.append(answer.text)
        return answer.status_code

    def leave(self, client: httpx.Client, model: str, _word: str) -> int:
        with client.stream("POST", "/v1/chat/completions", json={**body(model, "SLOW"), "stream": True}) as answer:
            next(answer.iter_lines(), None)
            return answer.status_code

    def unload(self, client: httpx.Client, model: str, _word: str) -> int:
        return client.post(f"/api/models/{model}/unload").status_code

    def kill(self, client: httpx.Client, model: str, _word: str) -> int:
        answer = client.get("/api/models")
        for one in answer.json()["models"]:
            if one["name"] == model and one["pid"]:
                self.pids.add(one["pid"])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one["pid"], signal.SIGKILL)
        return answer.status_code


def body(model: str, text: str) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at /proc")
def test_a_crowd_leaves_nothing_behind(running: Running) -> None:
    crowd = Crowd(running.url)
    threads = [threading.Thread(target=crowd.client, args=(seed,)) for seed in range(N_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not crowd.wrong
    assert sum(crowd.seen.values()) == N_CLIENTS * N_STEPS
    assert all(status in EXPECTED[action] for action, status in crowd.seen), crowd.seen
    assert crowd.seen["ask", 200] and crowd.seen["stream", 200], crowd.seen
    for model in MODELS:
        assert running.chat("SAY well", model).status_code == 200
        crowd.pids.add(running.state(model)["pid"])
        assert running.client.post(f"/api/models/{model}/unload").json()["state"] == "stopped"
    until(lambda: not any(is_alive(pid) for pid in crowd.pids))
