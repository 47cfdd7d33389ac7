"""`/api` on what is kept, over a real connection: workers with a real cache and no model beneath it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the gateway's packages")

from gateway_server import Running, model_folder

from rewarm.gateway.settings import Settings
from rewarm.testing.driver import ROOMY, Driver
from waiting import until

WORKER = (sys.executable, str(Path(__file__).with_name("cache_worker.py")))
MIB = 2**20


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts a gateway over the test's folders; may be called again once the one before is closed."""
    started: list[Running] = []

    def run(*models: str, **more: Any) -> Running:
        folders = [tmp_path / "models" / name for name in models or ("alpha",)]
        for folder in folders:
            if not folder.exists():
                model_folder(folder)
        given = {"cache_dir": tmp_path / "kv", **more}
        settings = Settings(
            data_dir=tmp_path / "data",
            models=folders,
            bundled=False,
            worker_command=WORKER,
            stop_timeout_s=5,
            **{name: value for name, value in given.items() if value is not None},
        )
        gateway = Running(settings)
        started.append(gateway)
        return gateway

    yield run
    for gateway in started:
        if gateway._thread.is_alive():
            gateway.close()


def filled(root: Path, n: int = 12) -> None:
    """Conversations that share a prefix of eight tokens, and a system prompt; 4 tokens to a block."""
    driver = Driver(root, limits=ROOMY)
    driver.save([1, 2, 3, 4, 5, 6, 7, 8], "system")
    for number in range(n):
        driver.save([1, 2, 3, 4, 5, 6, 7, 8, *range(100 * number + 100, 100 * number + 107)], label=f"chat-{number}")
    driver.close()


def say(gateway: Running, words: str, model: str = "alpha", label: str = "talk") -> None:
    body = {"model": model, "messages": [{"role": "user", "content": words}], "stream": True}
    reply = gateway.client.post("/v1/chat/completions", json=body, headers={"X-Rewarm-Conversation": label})
    assert reply.status_code == 200 and "[DONE]" in reply.text, reply.text


def get(gateway: Running, path: str, **query: Any) -> dict[str, Any]:
    reply = gateway.client.get(f"/api/{path}", params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_entries_are_searched_sorted_and_paged(start: Callable[..., Running], tmp_path: Path) -> None:
    filled(tmp_path / "kv")
    gateway = start()
    page = get(gateway, "entries", limit=5)
    assert (len(page["entries"]), page["n_found"], page["n_all"]) == (5, 13, 13)
    assert page["entries"][0]["title"] == "chat-11" and page["entries"][0]["model"] == "fake"
    assert page["entries"][0]["fork_tokens"] == 8 and page["entries"][0]["parent"]
    assert get(gateway, "entries", offset=10)["entries"][-1]["title"] == "System prompt"
    assert [each["title"] for each in get(gateway, "entries", search="CHAT-7")["entries"]] == ["chat-7"]
    assert get(gateway, "entries", search="fake chat")["n_found"] == 12
    assert get(gateway, "entries", search="nowhere")["n_found"] == 0
    titles = [each["title"] for each in get(gateway, "entries", sort="title", order="asc", limit=3)["entries"]]
    assert titles == ["chat-0", "chat-1", "chat-10"]
    assert get(gateway, "entries", sort="tokens", order="asc")["entries"][0]["n_tokens"] == 8
    for sort in ("model", "size", "own", "matched", "hits", "pinned"):
        assert get(gateway, "entries", sort=sort)["n_found"] == 13
    assert gateway.client.get("/api/entries", params={"sort": "weight"}).status_code == 400
    assert gateway.client.get("/api/entries", params={"limit": 201}).status_code == 400


def test_an_entry_is_pinned_and_forgotten(start: Callable[..., Running], tmp_path: Path) -> None:
    filled(tmp_path / "kv")
    gateway = start()
    entry = get(gateway, "entries", search="chat-3")["entries"][0]
    assert gateway.client.post(f"/api/entries/{entry['id']}/pin").json() == {"id": entry["id"], "pinned": True}
    assert get(gateway, "entries", sort="pinned")["entries"][0]["id"] == entry["id"]
    assert gateway.client.post(f"/api/entries/{entry['id']}/unpin").json()["pinned"] is False
    dry = gateway.client.delete(f"/api/entries/{entry['id']}", params={"dry_run": True}).json()
    assert dry["dry_run"] and dry["nbytes"] == entry["own_nbytes"] > 0
    assert get(gateway, "entries")["n_all"] == 13
    assert gateway.client.delete(f"/api/entries/{entry['id']}").json() == {**dry, "dry_run": False}
    assert get(gateway, "entries", search="chat-3")["n_found"] == 0
    for path in (f"entries/{entry['id']}/pin", f"entries/{'0' * 32}/unpin"):
        assert gateway.client.post(f"/api/{path}").status_code == 404
    assert gateway.client.delete(f"/api/entries/{entry['id']}").status_code == 404
    for name in ("..%2f..%2fstore.json", "xyz", "0" * 31, "0" * 64):
        assert gateway.client.delete(f"/api/entries/{name}").status_code in (400, 404)


def test_a_lower_limit_says_what_it_evicts_and_survives_a_restart(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    filled(tmp_path / "kv")
    gateway = start()
    used = get(gateway, "stats")["counters"]["files_used"]
    changed = gateway.client.patch("/api/settings", json={"max_files": used - 3}).json()
    assert changed["evicted"]["n_files"] == 3 and changed["evicted"]["nbytes"] >= 3 * 4096
    assert changed["limits"]["max_files"] == used - 3
    assert get(gateway, "stats")["counters"]["files_used"] == used - 3
    gateway.close()
    again = start()
    assert get(again, "settings")["limits"]["max_files"] == used - 3
    assert get(again, "settings")["limits_at_start"] == []
    again.close()
    ordered = get(start(max_files=used - 5), "settings")
    assert ordered["limits"]["max_files"] == used - 5 and ordered["limits_at_start"] == ["max_files"]


def test_it_is_described(start: Callable[..., Running]) -> None:
    paths = start().client.get("/openapi.json").json()["paths"]
    told = {f"{method} {path}" for path, methods in paths.items() for method in methods}
    assert {
        "get /api/entries",
        "post /api/entries/{entry_id}/pin",
        "delete /api/entries/{entry_id}",
        "patch /api/settings",
        "post /api/move",
        "get /api/move",
        "post /api/clear",
        "post /api/explain",
        "get /api/stats",
    } <= told


def test_rules_are_changed_one_by_one_and_refused_as_a_whole(start: Callable[..., Running]) -> None:
    gateway = start()
    before = get(gateway, "settings")
    changed = gateway.client.patch("/api/settings", json={"min_tokens": 64, "keep_days": 30, "save_at": "idle"}).json()
    assert changed["policy"] == {**before["policy"], "min_tokens": 64, "keep_days": 30, "save_at": "idle"}
    assert changed["limits"] == before["limits"] and changed["evicted"]["n_files"] == 0
    assert gateway.client.patch("/api/settings", json={"keep_days": None}).json()["policy"]["keep_days"] is None
    for nonsense in (
        {"min_tokens": -1},
        {"save_at": "never"},
        {"colour": 1},
        {"max_bytes": "lots"},
        {"max_files": 1.5},
    ):
        reply = gateway.client.patch("/api/settings", json={"second_sight": True, **nonsense})
        assert reply.status_code == 400, reply.text
        assert get(gateway, "settings")["policy"]["second_sight"] is False


def test_b155_clear_says_first_what_it_would_erase(start: Callable[..., Running]) -> None:
    gateway = start()
    say(gateway, "one two three")
    dry = gateway.client.post("/api/clear", json={}).json()
    assert dry["dry_run"] and dry["n_files"] > 0
    assert get(gateway, "entries")["n_all"] == 1
    assert gateway.client.post("/api/clear", json={"dry_run": False}).json() == {**dry, "dry_run": False}
    assert get(gateway, "entries")["n_all"] == 0
    say(gateway, "one two three")
    assert get(gateway, "stats")["misses"][0]["prompt_tokens"] == 4
    assert gateway.client.post("/api/clear", json={"fingerprint": "ab"}).status_code == 400


def test_what_the_cache_did_is_told_with_its_reasons(start: Callable[..., Running]) -> None:
    gateway = start()
    say(gateway, "one two three")
    say(gateway, "one two three")
    told = get(gateway, "stats")
    assert told["replies"]["n_replies"] == 2 and told["replies"]["n_misses"] == 1
    assert told["replies"]["disk_tokens"] == 3 and told["replies"]["saved_s"] == 0.75
    assert told["replies"]["ttft_restored_s"] > 0 and told["replies"]["ttft_prefilled_s"] >= 0.05
    assert [miss["reason"] for miss in told["misses"]] == ["nothing_stored"]
    assert [use["name"] for use in told["models"]] == ["alpha"]
    assert told["counters"]["saved_ms"] == 750
    until(lambda: get(gateway, "stats")["counters"]["hits"] == 1)


def test_b150_a_paused_cache_is_no_miss(start: Callable[..., Running]) -> None:
    gateway = start()
    say(gateway, "one two three")
    gateway.client.patch("/api/settings", json={"paused": True})
    until(lambda: get(gateway, "settings")["policy"]["paused"])
    until(lambda: say(gateway, "four five") or get(gateway, "stats")["replies"]["n_bypassed"] > 0)
    n_misses = get(gateway, "stats")["replies"]["n_misses"]
    say(gateway, "six seven")
    assert get(gateway, "stats")["replies"]["n_misses"] == n_misses


def test_a_prompt_is_explained(start: Callable[..., Running], tmp_path: Path) -> None:
    filled(tmp_path / "kv")
    gateway = start()
    fingerprint = get(gateway, "entries")["entries"][0]["fingerprint"]
    asked = {"fingerprint": fingerprint, "tokens": [1, 2, 3, 4, 5, 6, 7, 8, 5, 5]}
    told = gateway.client.post("/api/explain", json=asked).json()
    assert (told["restorable_tokens"], told["reason"], told["detail"]["at"]) == (8, "diverged", 8)
    assert "At token 8" in told["sentence"]
    assert gateway.client.post("/api/explain", json={**asked, "fingerprint": "0" * 64}).status_code == 404
    assert gateway.client.post("/api/explain", json={**asked, "tokens": [2**70]}).status_code == 400


@pytest.mark.parametrize("records", ["move", "leave"])
def test_the_folder_is_changed_under_running_workers(
    start: Callable[..., Running], tmp_path: Path, records: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gateway = start("alpha", "stubborn", cache_dir=None)
    old, new = tmp_path / "cache" / "rewarm" / "kv", tmp_path / "elsewhere" / "kv"
    gateway.client.patch("/api/settings", json={"max_files": 321, "keep_days": 9})
    say(gateway, "one two three")
    say(gateway, "one two three", "stubborn", "other")
    pid = gateway.state("alpha")["pid"]
    reply = gateway.client.post("/api/move", json={"path": str(new), "records": records})
    assert reply.status_code == 200 and reply.json()["stage"] == "closing", reply.text
    until(lambda: get(gateway, "move")["stage"] in ("done", "failed"))
    told = get(gateway, "move")
    assert told["stage"] == "done" and told["unloaded"] == ["stubborn"], told
    assert gateway.state("alpha")["pid"] == pid and gateway.state("stubborn")["state"] == "stopped"
    assert (old / "store.json").exists() == (records == "leave")
    assert get(gateway, "entries")["n_all"] == (2 if records == "move" else 0)
    settings = get(gateway, "settings")
    assert settings["folder"] == str(new) and settings["folder_forced_by"] == ""
    assert settings["limits"]["max_files"] == 321 and settings["policy"]["keep_days"] == 9
    for model, label in (("alpha", "talk"), ("stubborn", "other")):
        say(gateway, "one two three", model, label)
    assert get(gateway, "stats")["replies"]["disk_tokens"] == (6 if records == "move" else 0)
    gateway.close()
    again = start("alpha", "stubborn", cache_dir=None)
    assert get(again, "settings")["folder"] == str(new)
    assert get(again, "entries")["n_all"] == 2


def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_done(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    filled(tmp_path / "kv")
    filled(tmp_path / "other")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    gateway = start()
    bad = {
        "relative/path": "whole path",
        str(tmp_path / "kv"): "where the cache is",
        str(tmp_path / "kv" / "inside"): "inside the cache folder",
        str(tmp_path): "folder of its own",
        str(tmp_path / "full"): "other files",
        str(tmp_path / "other"): "holds a cache already",
        "/proc/nowhere": "be written",
    }
    for path, why in bad.items():
        reply = gateway.client.post("/api/move", json={"path": path})
        assert reply.status_code == 400 and why in reply.json()["error"]["message"], reply.text
    told = gateway.client.post("/api/move", json={"path": str(tmp_path / "new"), "dry_run": True}).json()
    assert told["problem"] == "" and told["free_bytes"] > 0 and told["needed_bytes"] > 0
    assert not (tmp_path / "new").exists()
    assert get(gateway, "move")["stage"] == "none"
    assert get(gateway, "entries")["n_all"] == 13
    assert (tmp_path / "full" / "letter.txt").read_text() == "mine"


def test_a_move_that_fails_leaves_the_cache_in_use_where_it_was(start: Callable[..., Running], tmp_path: Path) -> None:
    filled(tmp_path / "kv")
    gateway = start()
    holder = Driver(tmp_path / "kv", lossy=True)  # another program has it open
    gateway.client.post("/api/move", json={"path": str(tmp_path / "new")})
    until(lambda: get(gateway, "move")["stage"] in ("done", "failed"))
    told = get(gateway, "move")
    assert told["stage"] == "failed" and "in use by" in told["message"], told
    assert get(gateway, "entries")["n_all"] == 13
    assert get(gateway, "settings")["folder"] == str(tmp_path / "kv")
    assert "--dir" in get(gateway, "settings")["folder_forced_by"]
    say(gateway, "one two three")
    assert get(gateway, "stats")["replies"]["n_misses"] == 1
    holder.close()


def test_without_a_usable_folder_every_request_says_so(start: Callable[..., Running], tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    gateway = start()
    for method, path in (("get", "entries"), ("get", "settings"), ("post", "clear")):
        reply = gateway.client.request(method, f"/api/{path}", json={} if method == "post" else None)
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "cache_unavailable"
    assert get(gateway, "stats")["usable"] is False
