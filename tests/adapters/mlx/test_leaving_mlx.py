"""A client of mlx-lm's server that leaves while nothing is written to it: what it asked for ends."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from serving import Server

Serve = Callable[..., Server]


@pytest.mark.engine
def test_a_whole_reply_that_nobody_waits_for_ends(tiny_model: Path, serve: Serve) -> None:
    with serve(tiny_model) as server:
        server.chat("Hello!", max_tokens=4)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"messages": [{"role": "user", "content": "Tell me."}], "max_tokens": 1_000_000, "temperature": 0}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(1)
        connection.close()
        # Else it would go on for hours.
        process = psutil.Process(server.process.pid)
        deadline = time.monotonic() + 60
        while True:
            before = process.cpu_times().user
            time.sleep(0.5)
            if process.cpu_times().user - before < 0.1:
                break
            assert time.monotonic() < deadline, server.text()[-2000:]
        assert server.chat("Hello!", max_tokens=4)["usage"]["completion_tokens"] == 4
