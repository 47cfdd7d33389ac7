"""What requests ask of the cache, and what the gateway orders: on a real mlx-lm server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import Server, messages

import rewarm

pytestmark = pytest.mark.engine

Serve = Callable[..., Server]

TEXT = "Tell me a story about a fox and a hen, please, and let it end well."


def ask(server: Server, text: str = TEXT, max_tokens: int = 4, **headers: str) -> dict[str, Any]:
    """A completion with headers; `_` in their names stand for `-`."""
    body = {"messages": messages(text), "max_tokens": max_tokens, "temperature": 0.0}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    status, _, answer = server.request("POST", "/v1/chat/completions", body, **given)
    assert status == 200, answer
    return json.loads(answer)


def order(server: Server, method: str, route: str, body: Any = None) -> tuple[int, Any]:
    status, _, answer = server.request(method, f"/rewarm/{route}", body)
    return status, json.loads(answer)


def written(server: Server) -> int:
    """Bytes of records written so far, those that wait included."""
    assert order(server, "GET", "stats")[1]["cache"]["queue_bytes"] == 0
    return order(server, "GET", "stats")[1]["cache"]["bytes_written"]


def entries(folder: Path) -> list[Any]:
    with rewarm.open(folder) as cache:
        return [entry for entry in cache.entries() if entry.boundary == "assistant"]


def test_off_neither_reads_nor_writes(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with serve(tiny_model, "--rewarm-dir", str(folder)) as server:
        for _ in range(2):
            answer = ask(server, X_Rewarm_Cache="off")
            assert answer["rewarm"]["cached_tokens"] == 0
            assert answer["rewarm"]["reason"] == "disabled"
        # Nothing of it is left for others, in memory either.
        first = ask(server)
        assert first["rewarm"]["cached_tokens"] == 0
        assert ask(server)["rewarm"]["memory_tokens"] > 0
        assert ask(server, X_Rewarm_Cache="off")["rewarm"]["cached_tokens"] == 0
        server.terminate()
    assert len(entries(folder)) == 1


def test_read_only_reads_and_does_not_write(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with serve(tiny_model, "--rewarm-dir", str(folder)) as server:
        assert ask(server, X_Rewarm_Cache="read-only")["rewarm"]["cached_tokens"] == 0
        assert ask(server, X_Rewarm_Cache="read-only")["rewarm"]["cached_tokens"] == 0
        ask(server)
        assert ask(server, X_Rewarm_Cache="read-only")["rewarm"]["cached_tokens"] > 0
        ask(server, f"{TEXT} And then?", X_Rewarm_Cache="read-only")
        server.terminate()
    assert len(entries(folder)) == 1


def test_a_conversation_names_its_entry(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with serve(tiny_model, "--rewarm-dir", str(folder)) as server:
        ask(server, X_Rewarm_Conversation="chat-1")
        ask(server, "Something else.", X_Rewarm_Conversation="chat-2")
        server.terminate()
    assert {entry.label for entry in entries(folder)} == {"chat-1", "chat-2"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("X-Rewarm-Cache", "maybe"), ("X-Rewarm-Conversation", "a b"), ("X-Rewarm-Conversation", "x" * 129)],
)
def test_headers_that_make_no_sense_are_refused(tiny_model: Path, serve: Serve, name: str, value: str) -> None:
    with serve(tiny_model) as server:
        body = {"messages": messages(TEXT), "max_tokens": 1}
        status, _, answer = server.request("POST", "/v1/chat/completions", body, **{name: value})
        assert status == 400
        assert name in json.loads(answer)["error"]["message"]


def test_tenants_share_nothing(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    with serve(tiny_model, "--rewarm-dir", str(tmp_path / "kv"), secret="s3cret") as server:
        first = ask(server, X_Rewarm_Tenant="aa")
        assert ask(server, X_Rewarm_Tenant="bb")["rewarm"]["cached_tokens"] == 0
        assert ask(server)["rewarm"]["cached_tokens"] == 0
        assert ask(server, X_Rewarm_Tenant="aa")["rewarm"]["memory_tokens"] > 0
        server.terminate()
    with serve(tiny_model, "--rewarm-dir", str(tmp_path / "kv"), secret="s3cret") as server:
        assert ask(server, X_Rewarm_Tenant="cc")["rewarm"]["cached_tokens"] == 0
        again = ask(server, X_Rewarm_Tenant="aa")
        assert again["rewarm"]["disk_tokens"] > 0
        assert again["choices"] == first["choices"]
    with serve(tiny_model, "--rewarm-dir", str(tmp_path / "kv")) as server:
        # Without a gateway nobody speaks for a tenant: the header is no more than any other.
        ask(server, "Hello there.", X_Rewarm_Tenant="aa")
        assert ask(server, "Hello there.", X_Rewarm_Tenant="bb")["rewarm"]["memory_tokens"] > 0
        assert ask(server, "Hello.", X_Rewarm_Tenant="not hex")["choices"]


def test_tenants_at_once_are_served_one_after_the_other(tiny_model: Path, serve: Serve) -> None:
    """Nobody learns from a batch what others ask; each gets the reply that it would get alone."""
    texts = [f"{TEXT} {i}" for i in range(4)]
    with serve(tiny_model, secret="s3cret") as server:
        wanted = [ask(server, text, max_tokens=12, X_Rewarm_Cache="off")["choices"] for text in texts]
        found: dict[int, Any] = {}

        def work(i: int) -> None:
            found[i] = ask(server, texts[i], max_tokens=12, X_Rewarm_Tenant=("aa", "bb")[i % 2])["choices"]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(4)] == wanted


def test_what_was_saved_is_told(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    with serve(tiny_model, "--rewarm-dir", str(tmp_path / "kv"), secret="s3cret") as server:
        assert ask(server)["rewarm"]["saved_s"] == 0
        told = ask(server)["rewarm"]
        assert told["memory_tokens"] > 16
        assert 0 <= told["saved_s"] < 10
        server.terminate()
    with serve(tiny_model, "--rewarm-dir", str(tmp_path / "kv"), secret="s3cret") as server:
        # What prefill takes is known from before.
        told = ask(server)["rewarm"]
        assert told["disk_tokens"] > 16
        with rewarm.open(tmp_path / "kv") as cache:
            assert [name for name in cache.store.usage() if name.startswith("prefill_us:")]


def test_the_cache_can_be_paused_and_goes_on(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with rewarm.open(folder) as cache, serve(tiny_model, "--rewarm-dir", str(folder)) as server:
        cache.set_policy(rewarm.Policy(paused=True))
        time.sleep(1.5)  # a process reads the rules anew every second
        assert ask(server)["rewarm"]["reason"] == "disabled"
        cache.set_policy(rewarm.Policy(load="always"))
        time.sleep(1.5)
        ask(server, "Another one.")
        server.terminate()
    assert len(entries(folder)) == 1


@pytest.mark.parametrize("when", ["idle", "unload"])
def test_states_are_handed_over_when_the_rule_says(tiny_model: Path, serve: Serve, tmp_path: Path, when: Any) -> None:
    folder = tmp_path / "kv"
    with rewarm.open(folder, policy=rewarm.Policy(save_at=when)):
        pass
    with serve(tiny_model, "--rewarm-dir", str(folder), secret="s3cret") as server:
        before = written(server)  # the probe of the engine's version
        ask(server)
        assert written(server) == before
        deadline = time.monotonic() + 15
        if when == "idle":
            while written(server) == before:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        else:
            time.sleep(3)
            assert written(server) == before
        server.terminate()
    assert len(entries(folder)) == 1


def test_orders_are_the_gateways(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    with serve(tiny_model, "--rewarm-dir", str(tmp_path / "kv")) as server:
        assert server.request("GET", "/rewarm/stats")[0] == 404
        assert server.request("POST", "/rewarm/cache", {"dir": None})[0] == 404


def test_another_folder_takes_the_place_of_the_present_one(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with serve(tiny_model, "--rewarm-dir", str(first), secret="s3cret") as server:
        ask(server)
        assert order(server, "POST", "flush") == (200, {"flushed": True})
        assert order(server, "POST", "cache", {"dir": None}) == (200, {"dir": None, "unwritten": 0})
        assert ask(server, "While there is none.")["rewarm"]["reason"] == "disabled"
        assert order(server, "GET", "stats")[1]["cache"] is None
        assert order(server, "POST", "cache", {"dir": str(second)})[1]["dir"] == str(second)
        ask(server, "In the second one.")
        stats = order(server, "GET", "stats")[1]
        assert stats["memory_bytes"] > 10 * 2**20
        assert stats["engine_memory"]["entries"] > 0
        assert stats["requests"] == {"running": 0, "waiting": 0}
        blocked = tmp_path / "file"
        blocked.write_text("not a folder")
        for body in ({"dir": str(blocked)}, {"dir": 5}, {}, [], {"dir": ""}):
            status, answer = order(server, "POST", "cache", body)
            assert status == 409
            assert "stays as it is" in answer["error"]["message"]
        assert order(server, "GET", "nothing")[0] == 404
        server.terminate()
    assert len(entries(first)) == 1
    assert len(entries(second)) == 1


def test_a_worker_without_a_cache_is_given_one(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    with serve(tiny_model, "--rewarm-off", secret="s3cret") as server:
        ask(server)
        assert order(server, "POST", "cache", {"dir": str(tmp_path / "kv")})[0] == 200
        ask(server, "Kept.")
        server.terminate()
    assert len(entries(tmp_path / "kv")) == 1
