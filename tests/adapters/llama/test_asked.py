"""What a request asks of the cache by its headers, and what a gateway orders, before a fake engine."""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llama_worker import FakeWorker, cached, messages, reply

import rewarm
from rewarm.adapters.asked import Asked, Mode, read_headers
from rewarm.adapters.llama.face import Access
from rewarm.adapters.llama.slot_files import RawFile
from rewarm.state.reason import Dropped
from waiting import until

SYSTEM = "You are the guide of a museum, and answer in one sentence. " * 3
FIRST = "What is the capital of France?"
SECOND = "And of Italy?"
GATEWAY = Access(secret="s3cret")


def ask(worker: FakeWorker, *texts: str, system: str | None = SYSTEM, headers: dict[str, str]) -> dict[str, Any]:
    body = {"messages": messages(*texts, system=system), "max_tokens": 4, "temperature": 0}
    status, _, raw = worker.request("POST", "/v1/chat/completions", body, **headers)
    assert status == 200, raw
    found: dict[str, Any] = json.loads(raw)
    return found


# Off, read-only, on.


def test_off_reads_nothing_writes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    off = {"X-Rewarm-Cache": "off"}
    with FakeWorker(tmp_path, "--parallel", "1") as worker:
        known = worker.chat(FIRST, system=SYSTEM)
        worker.settle()
        n = len(worker.cache.entries())
        hidden = ask(worker, FIRST, headers=off)
        assert (cached(hidden), hidden["rewarm"]["reason"]) == (0, "disabled")
        assert reply(hidden) == reply(known)
        worker.wait_for_pause()
        slots = worker.runner.engine.ask("GET", "/slots")
        assert [slot["n_prompt_tokens"] for slot in slots] == [0], "the slot still holds it"
        ask(worker, "A secret of mine. " * 20, headers=off)
        worker.settle()
        assert len(worker.cache.entries()) == n
        after = worker.chat("A secret of mine. " * 20, system=SYSTEM)
        assert after["rewarm"]["memory_tokens"] == 0
        assert cached(after) <= len(f"<system>{SYSTEM}</><user>") + 1, "what was off was served to another"


def test_read_only_reads_and_writes_nothing(tmp_path: Path) -> None:
    read_only = {"X-Rewarm-Cache": "read-only"}
    with FakeWorker(tmp_path) as worker:
        first = worker.chat(FIRST, system=SYSTEM)
    with FakeWorker(tmp_path) as worker:
        n = len(worker.cache.entries())
        more = ask(worker, FIRST, reply(first), SECOND, headers=read_only)
        assert more["rewarm"]["disk_tokens"] == cached(more) > 0
        worker.settle()
        ask(worker, "Something quite different.", headers=read_only)
        worker.settle()
        assert len(worker.cache.entries()) == n
        assert worker.actions().count("save") == 0


def test_what_was_unsaved_is_saved_before_a_request_that_writes_nothing(tmp_path: Path) -> None:
    for i, header in enumerate(("read-only", "off")):
        (tmp_path / str(i)).mkdir()
        with FakeWorker(tmp_path / str(i), "--parallel", "1", memory=tmp_path / "none") as worker:
            worker.chat(FIRST, system=SYSTEM)
            worker.wait_for_pause()
            ask(worker, FIRST, "a", SECOND, headers={"X-Rewarm-Cache": header})
            worker.settle(at_hand_over=True)
            assert [entry.boundary for entry in worker.cache.entries()].count("assistant") == 1, header


@pytest.mark.parametrize(
    "headers",
    [{"X-Rewarm-Cache": "no"}, {"X-Rewarm-Conversation": ""}, {"X-Rewarm-Conversation": "a b"},
     {"X-Rewarm-Conversation": "x" * 129}],
    ids=str,
)  # fmt: skip
def test_headers_that_make_no_sense_are_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    with FakeWorker(tmp_path) as worker:
        status, _, raw = worker.request("POST", "/v1/chat/completions", {"messages": messages(FIRST)}, **headers)
        assert (status, json.loads(raw)["error"]["type"]) == (400, "invalid_request_error")
        assert "X-Rewarm-" in json.loads(raw)["error"]["message"]


def test_headers_are_read() -> None:
    given = {"X-Rewarm-Cache": "read-only", "X-Rewarm-Conversation": "a.b:c-1", "X-Rewarm-Tenant": "00ff"}
    assert read_headers(given.get, trusted=True) == Asked(Mode.READ_ONLY, "a.b:c-1", b"\x00\xff")
    assert read_headers(given.get, trusted=False).tenant == b""
    for wrong in ("xyz", "0", "00" * 65):
        with pytest.raises(ValueError, match="Tenant"):
            read_headers({"X-Rewarm-Tenant": wrong}.get, trusted=True)


def test_a_conversations_name_becomes_the_entrys_label(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        ask(worker, FIRST, headers={"X-Rewarm-Conversation": "chat-1"})
        worker.settle()
        labels = {entry.boundary: entry.label for entry in worker.cache.entries()}
        assert labels["assistant"] == "chat-1"
        assert not labels["system"], "a system prompt is every conversation's"


# Tenants.


def test_nothing_is_shared_between_tenants(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, "--parallel", "1", access=GATEWAY) as worker:
        for tenant in ("aa", "bb"):
            first = ask(worker, FIRST, headers={"X-Rewarm-Tenant": tenant})
            assert cached(first) == 0, "another tenant's state was served"
            worker.settle()
        assert "erase" in worker.actions()
        back = ask(worker, FIRST, reply(first), SECOND, headers={"X-Rewarm-Tenant": "aa"})
        assert back["rewarm"]["disk_tokens"] == cached(back) > 0, "one's own was not given back"


def test_tenants_at_once_are_kept_apart(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, "--parallel", "2", access=GATEWAY) as worker:
        tenants = ["aa", "bb", "cc", "aa", "bb", "cc"]

        def one(tenant: str) -> dict[str, Any]:
            return ask(worker, f"{FIRST} SLOW", headers={"X-Rewarm-Tenant": tenant})

        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(one, tenants))
        assert len({reply(answer) for answer in answers}) == 1
        assert sum(cached(answer) > 0 for answer in answers) <= 3, "each tenant's first one is cold"
        worker.settle()


def test_a_tenant_that_a_client_names_itself_is_nothing(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, "--parallel", "1") as worker:
        ask(worker, FIRST, headers={"X-Rewarm-Tenant": "aa"})
        again = ask(worker, FIRST, headers={"X-Rewarm-Tenant": "bb"})
        assert cached(again) > 0


def test_where_the_server_chooses_the_slot_it_finds_nothing_of_others(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, "--parallel", "2", access=GATEWAY) as worker:
        ask(worker, FIRST, headers={"X-Rewarm-Tenant": "aa"})
        worker.settle()
        worker.request("POST", "/infill", {"input_prefix": "x"}, **{"X-Rewarm-Tenant": "bb"})
        assert worker.actions()[-3:] == ["erase", "erase", "/infill"]
        worker.request("POST", "/infill", {"input_prefix": "x"}, **{"X-Rewarm-Tenant": "bb", "X-Rewarm-Cache": "off"})
        until(lambda: worker.actions()[-2:] == ["erase", "erase"])


def test_without_a_cache_nothing_of_another_is_reused(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, "--swa-full", "--parallel", "1", access=GATEWAY) as worker:
        ask(worker, FIRST, headers={"X-Rewarm-Tenant": "aa"})
        assert cached(ask(worker, FIRST, headers={"X-Rewarm-Tenant": "bb"})) == 0
        ask(worker, FIRST, headers={"X-Rewarm-Cache": "off"})
        until(lambda: [body["n_predict"] for body in worker.bodies("/completion")][-1:] == [0])
        assert cached(ask(worker, FIRST, headers={})) == 0
        worker.request("POST", "/infill", {"input_prefix": "x"}, **{"X-Rewarm-Cache": "off"})
        until(lambda: worker.actions()[-3:] == ["/completion", "/infill", "/completion"])


# Rules.


def test_a_paused_cache_is_neither_read_nor_written(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        first = worker.chat(FIRST, system=SYSTEM)
        worker.settle()
        n = len(worker.cache.entries())
        worker.cache.set_policy(rewarm.Policy(paused=True))
    with FakeWorker(tmp_path) as worker:
        again = worker.chat(FIRST, reply(first), SECOND, system=SYSTEM)
        assert (cached(again), again["rewarm"]["reason"]) == (0, "disabled")
        worker.settle()
        assert len(worker.cache.entries()) == n
        worker.cache.set_policy(rewarm.Policy())
        back = worker.chat(FIRST, system=SYSTEM)
        assert cached(back) > 0


@pytest.mark.parametrize("when", ["idle", "unload"])
def test_when_states_are_handed_over(tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rewarm.adapters.llama import runner

    monkeypatch.setattr(runner, "_IDLE_S", 0.3)
    rewarm.open(tmp_path / "kv", policy=rewarm.Policy(save_at=when), block_tokens=16).close()
    with FakeWorker(tmp_path, "--parallel", "1") as worker:
        worker.chat(FIRST, system=SYSTEM)
        worker.wait_for_pause()
        time.sleep(0.15)
        assert worker.actions().count("save") == 0, "at once, though something may follow"
        if when == "idle":
            until(lambda: worker.actions().count("save") == 1)
        else:
            time.sleep(0.6)
            assert worker.actions().count("save") == 0
    with FakeWorker(tmp_path) as worker:
        assert "assistant" in [entry.boundary for entry in worker.cache.entries()], "not saved at the end"


# What saving costs.


def test_the_pause_that_a_save_costs_others_is_told(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, "--parallel", "2", behaviour={"saves_slowly": True}) as worker:
        worker.chat(FIRST, system=SYSTEM)
        until(lambda: any(slot.saving for slot in worker.runner.ensure().pool.all()))
        slow = worker.chat("SLOW something else", max_tokens=10)
        assert slow["rewarm"]["stall_s"] > 0
        worker.settle()
        saves = worker.runner.stats()["saves"]
        assert saves["n"] >= 2
        assert 0 < saves["longest_s"] <= saves["stall_s"]
        assert worker.chat(FIRST, system=SYSTEM)["rewarm"]["stall_s"] >= 0


def test_seconds_saved_are_told_and_counted(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        first = worker.chat(FIRST, system=SYSTEM)
        assert first["rewarm"]["saved_s"] == 0
    with FakeWorker(tmp_path) as worker:
        worker.chat("Something else, so that the speed of prefill is known. " * 8)
        again = worker.chat(FIRST, reply(first), SECOND, system=SYSTEM)
        assert again["rewarm"]["disk_tokens"] > 0
        assert 0 < again["rewarm"]["saved_s"] < 1, "1 ms a token, less what the restore took"


def test_a_save_that_a_full_queue_refused_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeWorker(tmp_path) as worker:
        space = worker.runner.ensure()._stored.space()
        save, refusals = space.save, iter([True, True, True])

        def refusing(*arguments: Any, **more: Any) -> Any:
            if next(refusals, False):
                report = save(*arguments, **more)
                report.reason, report.nbytes = Dropped.QUEUE_FULL, 1
                return report
            return save(*arguments, **more)

        monkeypatch.setattr(space, "save", refusing)
        first = worker.chat(FIRST, system=SYSTEM)
        worker.settle()
        assert worker.runner.stats()["saves"]["n_waited"] >= 1
        assert "assistant" in [entry.boundary for entry in worker.cache.entries()]
    with FakeWorker(tmp_path) as worker:
        assert cached(worker.chat(FIRST, reply(first), SECOND, system=SYSTEM)) > 0


def test_a_torn_slot_file_is_not_stored(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        files = worker.runner.ensure()._stored.files
        name = worker.raw.new_name()
        worker.runner.engine.ask("POST", "/completion", {"prompt": "Hello, hello.", "id_slot": 0})
        answer = worker.runner.engine.ask("POST", "/slots/0?action=save", {"filename": name})
        path = worker.raw.path / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        torn = RawFile(name, int(answer["n_saved"]), int(answer["n_written"]), 0.0)
        assert files.read(torn) is None
        assert not path.exists()


# Orders of a gateway.


def order(worker: FakeWorker, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    status, _, raw = worker.request(method, f"/rewarm/{path}", body, **headers)
    return status, json.loads(raw)


def test_a_gateway_may_change_the_cache(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, "--parallel", "1", access=GATEWAY) as worker:
        first = worker.chat(FIRST, system=SYSTEM)
        status, told = order(worker, "POST", "cache", {"dir": str(tmp_path / "other")})
        assert (status, told) == (200, {"dir": str(tmp_path / "other"), "unwritten": 0})
        live = worker.chat(FIRST, reply(first), SECOND, system=SYSTEM)
        assert live["rewarm"]["memory_tokens"] == cached(live) > 0, "the slot still holds it"
        assert order(worker, "POST", "flush") == (200, {"flushed": True})
        status, told = order(worker, "GET", "stats")
        assert status == 200 and told["cache"]["bytes_used"] > 0 and told["memory_bytes"] > 0
        assert told["engine_memory"]["entries"] == 1 and told["engine_memory"]["nbytes"] > 0
        assert told["requests"]["running"] == told["requests"]["waiting"] == 0

        assert order(worker, "POST", "cache", {"dir": None})[1] == {"dir": None, "unwritten": 0}
        assert order(worker, "GET", "stats")[1]["cache"] is None
        off = worker.chat(FIRST, system=SYSTEM)
        assert off["rewarm"]["reason"] == "disabled" or off["rewarm"]["disk_tokens"] == 0
        assert order(worker, "POST", "cache", {"dir": str(tmp_path / "kv")})[0] == 200
        back = worker.chat(FIRST, reply(first), "And of Spain?", system=SYSTEM)
        assert back["rewarm"]["disk_tokens"] == cached(back) > 0
        order(worker, "POST", "cache", {"dir": None})
    for name in ("kv", "other"):
        with rewarm.open(tmp_path / name) as cache:
            assert "assistant" in [entry.boundary for entry in cache.entries()], name


def test_orders_are_the_gateways_alone(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, access=GATEWAY) as worker:
        assert order(worker, "GET", "stats", Authorization="Bearer wrong")[0] == 401
        assert order(worker, "GET", "nothing")[0] in (404, 405)
        (tmp_path / "file").write_text("")
        status, told = order(worker, "POST", "cache", {"dir": str(tmp_path / "file")})
        assert status >= 400 and "error" in told
        assert cached(worker.chat(FIRST, system=SYSTEM)) == 0, "it serves on"
    with FakeWorker(tmp_path) as worker:
        assert worker.request("GET", "/rewarm/stats")[0] in (401, 404)


# Prefill progress.


@pytest.mark.parametrize("asks", [False, True])
def test_progress_is_a_comment_unless_the_client_asked_for_it(tmp_path: Path, asks: bool) -> None:
    with FakeWorker(tmp_path, behaviour={"reports_progress": True}) as worker:
        more = {"return_progress": True} if asks else {}
        body = {"messages": messages(FIRST), "max_tokens": 2, "stream": True, **more}
        raw = worker.request("POST", "/v1/chat/completions", body)[2].decode()
        assert (": keepalive " in raw) is not asks
        assert ("prompt_progress" in raw) is asks
        lines = [line for line in raw.splitlines() if line.startswith("data: {")]
        assert all(json.loads(line[6:]) for line in lines)
        assert raw.rstrip().endswith("data: [DONE]")


def test_how_far_a_prefill_has_come_is_in_the_stats(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, behaviour={"reports_progress": True, "slow_s": 0.02}) as worker:
        body = {"messages": messages("SLOW LONG"), "stream": True}
        seen: list[Any] = []
        asking = threading.Thread(target=lambda: worker.request("POST", "/v1/chat/completions", body))
        asking.start()
        while asking.is_alive() and not seen:
            seen += worker.runner.stats()["requests"]["prefills"]
            time.sleep(0.01)
        asking.join()
        assert seen and 0 < seen[0]["done"] <= seen[0]["all"]


# Other APIs.


def test_messages_and_responses_go_the_same_way(tmp_path: Path) -> None:
    said: dict[str, str] = {}
    first = {"system": SYSTEM, "messages": [{"role": "user", "content": [{"type": "text", "text": FIRST}]}]}
    other = {"instructions": SYSTEM, "input": FIRST}
    with FakeWorker(tmp_path, "--parallel", "1") as worker:
        for path, body in (("/v1/messages", first), ("/v1/responses", other)):
            answer = json.loads(worker.request("POST", path, {**body, "max_tokens": 4})[2])
            said[path] = json.dumps(answer["usage"])
            assert answer["rewarm"]["prompt_tokens"] > 100
        worker.settle()
    with FakeWorker(tmp_path, "--parallel", "1") as worker:
        for path, body in (("/v1/messages", first), ("/v1/responses", other)):
            answer = json.loads(worker.request("POST", path, {**body, "max_tokens": 4})[2])
            assert answer["rewarm"]["cached_tokens"] > 100, answer
    with FakeWorker(tmp_path, "--parallel", "2") as worker:
        answer = json.loads(worker.request("POST", "/v1/messages", {**first, "max_tokens": 4})[2])
        assert answer["rewarm"]["reason"] == "disabled" and "slot" in answer["rewarm"]["detail"]
        image = {"type": "image", "source": {"type": "url", "url": "data:,"}}
        body = {"input": [{"role": "user", "content": [image]}]}
        answer = json.loads(worker.request("POST", "/v1/responses", body)[2])
        assert answer["rewarm"]["reason"] == "disabled" and "kind" in answer["rewarm"]["detail"]


# Kinds of builds.


def test_ik_llama_cpp_is_recognised_and_its_states_kept_whole(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, flags="-fmoe -mla") as worker:
        assert worker.runner._program.is_fork
        first = worker.chat(FIRST, system=SYSTEM)
        worker.settle()
    with FakeWorker(tmp_path, flags="-fmoe -mla") as worker:
        again = worker.chat(FIRST, reply(first), SECOND, system=SYSTEM)
        assert again["rewarm"]["disk_tokens"] == cached(again) >= first["usage"]["prompt_tokens"]
        assert not worker.runner.ensure()._stored.cut_anywhere


@pytest.mark.parametrize("computes_the_same", [True, False])
def test_another_build_goes_on_with_what_is_stored_if_it_computes_the_same(
    tmp_path: Path, computes_the_same: bool
) -> None:
    with FakeWorker(tmp_path) as worker:
        first = worker.chat(FIRST, system=SYSTEM)
    behaviour = {} if computes_the_same else {"computes_otherwise": True}
    with FakeWorker(tmp_path, version="version: 2 (fake)", behaviour=behaviour) as worker:
        again = worker.chat(FIRST, reply(first), SECOND, system=SYSTEM)
        if computes_the_same:
            assert again["rewarm"]["disk_tokens"] == cached(again) >= first["usage"]["prompt_tokens"]
        else:
            assert (cached(again), again["rewarm"]["reason"]) == (0, "identity_changed")


def test_a_server_that_cannot_save_is_served_uncached_with_the_reason(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, behaviour={"cannot_save": True}) as worker:
        answer = worker.chat(FIRST)
        assert answer["rewarm"]["reason"] == "disabled"
        assert "cannot save its slots" in answer["rewarm"]["detail"]


# Clients that are not patient.


def test_b161_b162_a_client_that_leaves_at_any_moment_leaves_a_slot_that_is_right(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, "--parallel", "1") as worker:
        want = reply(worker.chat("Tell me of rivers. SLOW", system=SYSTEM, max_tokens=6, cache_prompt=False))
        for wait_s in (0.0, 0.15):
            body = {"messages": messages("Tell me of rivers. SLOW", system=SYSTEM), "max_tokens": 6, "stream": True}
            connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=30)
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            time.sleep(wait_s)
            connection.close()
            assert reply(worker.chat("Tell me of rivers. SLOW", system=SYSTEM, max_tokens=6)) == want


# What went wrong for others.


def test_b067_more_conversations_than_slots_are_all_warm_from_the_second_round_on(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, "--parallel", "2") as worker:
        talks = [
            [f"I am agent {i}, and I ask about {what}. " * 4] for i, what in enumerate(("rivers", "hills", "seas"))
        ]
        for turn in range(3):
            for talk in talks:
                answer = worker.chat(*talk)
                assert (cached(answer) >= 100) is (turn > 0), (turn, answer["rewarm"])
                talk += [reply(answer), f"And then? {turn}"]
                worker.settle()


def test_b093_b094_an_empty_slot_is_neither_saved_nor_restored(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, "--parallel", "1") as worker:
        ask(worker, FIRST, headers={"X-Rewarm-Cache": "off"})
        worker.settle()
        assert worker.runner.flush(5)
        assert set(worker.actions()) <= {"/v1/chat/completions", "erase"}
        files = worker.runner.ensure()._stored.files
        worker.runner.engine.ask("POST", "/slots/0?action=save", {"filename": "empty"})
        path = worker.raw.path / "empty"
        assert files.read(RawFile("empty", 0, path.stat().st_size, 0.0)) is None
        (worker.raw.path / "none").write_bytes(b"")
        assert files.read(RawFile("none", 0, 0, 0.0)) is None
        assert reply(worker.chat(FIRST, system=SYSTEM))


@pytest.mark.parametrize("name", ["кэш 雪 ☃ .", "a" * 200], ids=["letters", "long"])
def test_b101_folders_of_any_name_work_for_slot_files(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    for warm in (False, True):
        with FakeWorker(folder, memory=folder / "none") as worker:
            assert worker.raw.path.is_relative_to(folder)
            assert (cached(worker.chat(FIRST, system=SYSTEM)) > 0) is warm


def test_b151_a_slot_file_that_is_longer_than_the_server_says_is_read(tmp_path: Path) -> None:
    """Some builds leave the restore points out of the size that they tell."""
    with FakeWorker(tmp_path) as worker:
        worker.runner.engine.ask("POST", "/completion", {"prompt": "Hello, hello.", "id_slot": 0})
        answer = worker.runner.engine.ask("POST", "/slots/0?action=save", {"filename": "a"})
        found = worker.runner.ensure()._stored.files.read(RawFile("a", int(answer["n_saved"]), 100, 0.0))
        assert found is not None and found.state.n_tokens == answer["n_saved"]


def test_b027_a_build_without_restore_points_in_slot_files_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fake_slots

    from rewarm.adapters.llama import codec, slot_file
    from rewarm.adapters.llama.slot_files import SlotFiles

    asked: list[int] = []
    with FakeWorker(tmp_path) as worker:
        for points, is_fine in (((), False), ((3, 9), True)):
            shape = fake_slots.Shape(swa=2, points=points)

            def saved(files: SlotFiles, tokens: list[int], shape: fake_slots.Shape = shape) -> Any:
                asked.append(len(tokens))
                found = slot_file.parse(fake_slots.data(shape, range(100, 120)))
                files.has_checkpoints = bool(found.checkpoints)
                return found, codec.to_state(found, shape.n_swa)

            monkeypatch.setattr(worker.runner._prober, "_saved", saved)
            probed = worker.runner._prober._probe(SlotFiles(worker.runner.engine, worker.raw, shape.n_swa))
            assert ("sliding window" in probed.why_not) is not is_fine
    assert asked == [2, 160] * 2, "small states come without restore points, whatever the build"
