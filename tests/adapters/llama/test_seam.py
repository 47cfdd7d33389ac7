"""The seam before a fake engine whose text depends on every byte of its KV: a wrong state is a wrong reply."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from llama_worker import FakeWorker, cached, messages, reply, said, write_gguf

from waiting import until

SYSTEM = "You are the guide of a museum, and answer in one sentence. " * 3
FIRST = "What is the capital of France?"
SECOND = "And of Italy?"


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        cold = worker.chat(FIRST, system=SYSTEM)
        assert cached(cold) == 0
        worker.settle()
        live = worker.chat(FIRST, reply(cold), SECOND, system=SYSTEM)
        assert live["rewarm"]["disk_tokens"] == 0, "the live slot held it all"
        assert worker.actions().count("restore") == 0
    with FakeWorker(tmp_path) as worker:
        again = worker.chat(FIRST, reply(cold), SECOND, system=SYSTEM)
        assert again["rewarm"]["disk_tokens"] == cached(again) >= cold["usage"]["prompt_tokens"]
        assert reply(again) == reply(live)
        assert worker.actions().count("restore") == 1


def test_a_second_conversation_shares_the_system_prompt_after_a_restart(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        worker.chat(FIRST, system=SYSTEM)
        cold = worker.chat("How high is Mont Blanc?", system=SYSTEM, cache_prompt=False)
        worker.settle()
        worker.cache.forget(next(e for e in worker.cache.entries() if e.boundary == "assistant"))
        assert [entry.boundary for entry in worker.cache.entries()] == ["system"]
    with FakeWorker(tmp_path) as worker:
        other = worker.chat("How high is Mont Blanc?", system=SYSTEM)
        n_system = len(f"<system>{SYSTEM}</><user>") + 1
        assert cached(other) == n_system
        assert other["rewarm"]["reason"] in ("diverged", "evicted", "nothing_stored")
        assert reply(other) == reply(cold)


def test_only_new_tokens_are_written_each_turn(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        first = worker.chat("A long story. " * 100)
        worker.settle()
        before = worker.cache.stats()["bytes_written"]
        worker.chat("A long story. " * 100, reply(first), "Go on.")
        worker.settle()
        after = worker.cache.stats()["bytes_written"]
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after - before < before / 3


def test_two_conversations_at_once_never_see_each_other(tmp_path: Path) -> None:
    texts = [f"Conversation {i}, which is about {'rivers' if i % 2 else 'mountains'}. SLOW" for i in range(6)]
    (tmp_path / "a").mkdir()
    with FakeWorker(tmp_path / "a", behaviour={"slow_s": 0.0}) as worker:
        alone = [reply(worker.chat(text, system=SYSTEM, cache_prompt=False)) for text in texts]
    (tmp_path / "b").mkdir()
    for _ in range(2):  # cold, then restored
        with FakeWorker(tmp_path / "b", "--parallel", "2", behaviour={"slow_s": 0.03}) as worker:
            with ThreadPoolExecutor(6) as threads:
                together = list(threads.map(lambda text: reply(worker.chat(text, system=SYSTEM)), texts))
            worker.settle()
        assert together == alone


def test_a_stream_passes_and_tells_the_usage(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        whole = worker.chat(FIRST, system=SYSTEM)
        worker.settle()
        chunks = worker.stream(FIRST)
        assert chunks[-1]["rewarm"]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"]
        assert [chunk for chunk in chunks[:-1] if "rewarm" in chunk] == []
        bare = worker.stream(FIRST, usage=False)
        assert [chunk for chunk in bare if "rewarm" in chunk or "usage" in chunk] == []
        assert said(bare) == said(chunks) != reply(whole)


def test_text_completions_and_the_engines_own_route(tmp_path: Path) -> None:
    prompt = "Once upon a time there was a river. " * 4
    with FakeWorker(tmp_path) as worker:
        status, _, raw = worker.request("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 3})
        cold = json.loads(raw)
        assert (status, cached(cold)) == (200, 0)
    with FakeWorker(tmp_path) as worker:
        again = json.loads(worker.request("POST", "/completion", {"prompt": prompt, "n_predict": 3})[2])
        tokens = [256, *prompt.encode()]
        assert again["rewarm"]["disk_tokens"] == len(tokens) - 1
        assert again["content"] == cold["choices"][0]["text"]
        told = json.loads(worker.request("POST", "/completion", {"prompt": tokens, "n_predict": 3})[2])
        assert told["rewarm"]["memory_tokens"] == len(tokens) - 1


def test_an_engine_that_dies_in_a_reply_is_an_error_and_then_a_fresh_one(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        good = worker.chat(FIRST, system=SYSTEM)
        worker.settle()
        body = {"messages": messages("DIE"), "max_tokens": 4}
        status, _, raw = worker.request("POST", "/v1/chat/completions", body)
        assert (status, json.loads(raw)["error"]["type"]) == (502, "server_error")
        chunks = worker.stream("DIE")
        assert "error" in chunks[-1]
        again = worker.chat(FIRST, reply(good), SECOND, system=SYSTEM)
        assert again["rewarm"]["disk_tokens"] == cached(again) > 0
        assert worker.runner.engine.generation == 3


@pytest.mark.parametrize("moment", ["restore", "prefill", "save", "erase"])
def test_b091_an_engine_that_dies_at_any_moment_leaves_the_store_whole(tmp_path: Path, moment: str) -> None:
    trap = tmp_path / "trap"
    with FakeWorker(tmp_path) as worker:
        first = worker.chat(FIRST, system=SYSTEM)
    with FakeWorker(tmp_path, "--parallel", "1", behaviour={"dies_once": {moment: str(trap)}}) as worker:
        before = [entry.id for entry in worker.cache.entries()]
        trap.touch()
        body = {"messages": messages(FIRST, reply(first), SECOND, system=SYSTEM), "max_tokens": 4}
        off = {"X-Rewarm-Cache": "off"} if moment == "erase" else {}
        status, _, raw = worker.request("POST", "/v1/chat/completions", body, **off)
        if moment in ("restore", "prefill"):
            assert (status, json.loads(raw)["error"]["type"]) == (502, "server_error")
        else:
            assert status == 200, "the reply was given before"
            until(lambda: not trap.exists())
            worker.runner.engine.settle()
        again = worker.chat(FIRST, reply(first), SECOND, system=SYSTEM)
        assert again["rewarm"]["disk_tokens"] == cached(again) > 0
        assert worker.runner.engine.generation == 2
        worker.settle()
        assert set(before) <= {entry.id for entry in worker.cache.entries()}
        assert not worker.cache.verify().damaged


def test_a_killed_engine_is_replaced_at_the_next_request(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        os.kill(int(worker.runner.engine.ask("GET", "/fake/pid")), signal.SIGKILL)
        worker.runner.engine.settle()
        assert worker.request("GET", "/v1/models")[0] == 200


def test_a_flipped_bit_is_a_miss_and_the_right_answer(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        cold = worker.chat(FIRST, system=SYSTEM)
        live = worker.chat(FIRST, reply(cold), SECOND, system=SYSTEM)
        worker.settle()
    for path in (*(tmp_path / "kv").rglob("*.block"), *(tmp_path / "kv").rglob("*.point")):
        raw = bytearray(path.read_bytes())
        raw[-9] ^= 1
        path.write_bytes(raw)
    with FakeWorker(tmp_path) as worker:
        again = worker.chat(FIRST, reply(cold), SECOND, system=SYSTEM)
        assert (cached(again), again["rewarm"]["reason"]) == (0, "corrupt")
        assert reply(again) == reply(live)
        assert worker.actions().count("restore") == 0, "damaged bytes reached the engine"


def test_other_weights_are_a_miss(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        worker.chat(FIRST, system=SYSTEM)
        worker.settle()
    write_gguf(tmp_path / "model.gguf", b"other weights")
    with FakeWorker(tmp_path) as worker:
        again = worker.chat(FIRST, system=SYSTEM)
        assert (cached(again), again["rewarm"]["reason"]) == (0, "identity_changed")


def test_a_model_that_changes_under_the_engine_is_not_saved(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        write_gguf(tmp_path / "model.gguf", b"replaced while it runs")
        worker.chat(FIRST, system=SYSTEM)
        worker.settle()
        assert worker.cache.entries() == []


@pytest.mark.parametrize("taint", [{"lora": [{"id": 0, "scale": 0.5}]}, {"n_cache_reuse": 64}], ids=["lora", "reuse"])
def test_b023_a_tainted_slot_is_never_saved_and_erased_before_other_use(
    tmp_path: Path, taint: dict[str, object]
) -> None:
    with FakeWorker(tmp_path, "--parallel", "1") as worker:
        answer = worker.chat(FIRST, system=SYSTEM, **taint)
        assert (cached(answer), answer["rewarm"]["reason"]) == (0, "disabled")
        worker.settle()
        assert "save" not in worker.actions()
        assert worker.cache.entries() == []
        after = worker.chat(FIRST, system=SYSTEM)
        assert cached(after) == 0, "cells of another identity were reused"
        actions = worker.actions()
        last = len(actions) - 1 - actions[::-1].index("/v1/chat/completions")
        assert actions[last - 1] == "erase"


def test_after_the_lora_scales_were_changed_nothing_is_kept(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        worker.chat(FIRST)
        worker.settle()
        n = len(worker.cache.entries())
        assert worker.request("POST", "/lora-adapters", [{"id": 0, "scale": 0.0}])[0] == 200
        assert worker.chat(FIRST, "a", SECOND)["rewarm"]["reason"] == "disabled"
        worker.settle()
        assert len(worker.cache.entries()) == n


def test_a_request_whose_slot_the_server_chooses_makes_it_unknown(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, memory=tmp_path / "none") as worker:
        worker.chat(FIRST, system=SYSTEM)
        worker.wait_for_pause()
        assert worker.request("POST", "/infill", {"input_prefix": "x"})[0] == 200
        assert worker.actions()[-2:] == ["save", "/infill"], "what the server may overwrite was saved before"
        worker.settle()
        again = worker.chat(FIRST, system=SYSTEM)
        assert again["rewarm"]["disk_tokens"] > 0, again["rewarm"]


def test_a_forgotten_conversation_is_erased_from_its_slot_too(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, "--parallel", "1") as worker:
        first = worker.chat(FIRST)
        worker.settle()
        (entry,) = worker.cache.entries()
        worker.cache.forget(entry)
        until(lambda: worker.actions()[-1] == "erase")
        assert worker.cache.entries() == []
        again = worker.chat(FIRST, reply(first), SECOND)
        assert cached(again) == 0
        worker.settle()
        assert [entry.boundary for entry in worker.cache.entries()] == ["assistant"], "sent again, it is a new one"


def test_a_conversation_that_is_forgotten_during_a_reply_is_not_saved_by_it(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, "--parallel", "1") as worker, ThreadPoolExecutor(1) as threads:
        first = worker.chat(FIRST)
        worker.settle()
        (entry,) = worker.cache.entries()
        more = threads.submit(worker.chat, FIRST, reply(first), "SLOW", max_tokens=8)
        while worker.runner.ensure().pool.n_held == 0:
            time.sleep(0.01)
        time.sleep(0.2)
        worker.cache.forget(entry)
        more.result()
        worker.settle()
        assert worker.cache.entries() == []


def test_b041_a_restore_that_the_server_refuses_is_served_and_leaves_nothing(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        cold = worker.chat(FIRST, system=SYSTEM)
        worker.settle()
    with FakeWorker(tmp_path, behaviour={"refuses_restore": True}) as worker:
        again = worker.chat(FIRST, system=SYSTEM)
        assert (cached(again), again["rewarm"]["reason"]) == (0, "busy")
        assert "no room" in again["rewarm"]["detail"]
        assert reply(again) == reply(cold)


def test_idle_slots_give_up_their_cells_for_a_restore(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        cold = worker.chat(FIRST, system=SYSTEM)
    with FakeWorker(tmp_path, "--parallel", "2", behaviour={"shares_cells": True}) as worker:
        worker.chat("Quite another conversation, of mountains.")
        worker.wait_for_pause()
        again = worker.chat(FIRST, reply(cold), SECOND, system=SYSTEM)
        assert again["rewarm"]["disk_tokens"] == cached(again) > 0
        actions = [action for action in worker.actions() if action != "save"]
        assert actions[-4:] == ["restore", "erase", "restore", "/v1/chat/completions"]
        worker.settle()
        assert len(worker.cache.entries()) == 3, "what gave way was saved"


def test_a_slot_that_the_server_has_purged_is_restored(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        cold = worker.chat(FIRST, system=SYSTEM)
        worker.settle()
        worker.runner.engine.ask("POST", "/fake/purge", {})
        again = worker.chat(FIRST, reply(cold), SECOND, system=SYSTEM)
        assert again["rewarm"]["disk_tokens"] == cached(again) > 0


def test_a_slot_that_held_less_than_was_thought_is_told(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, "--parallel", "1") as worker:
        cold = worker.chat(FIRST, system=SYSTEM)
        worker.settle()
        worker.runner.engine.ask("POST", "/fake/purge", {})
        again = worker.chat(FIRST, system=SYSTEM)
        assert (cached(again), again["rewarm"]["reason"]) == (0, "unavailable")
        assert reply(again) == reply(cold)


def test_a_restore_without_effect_is_counted(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        cold = worker.chat(FIRST, system=SYSTEM)
        worker.settle()
    with FakeWorker(tmp_path, behaviour={"forgets_restore": True}) as worker:
        again = worker.chat(FIRST, system=SYSTEM)
        assert (cached(again), again["rewarm"]["reason"]) == (0, "unavailable")
        worker.wait_for_pause()
        assert worker.runner.ensure().n_ineffective == 1
        assert reply(again) == reply(cold)


def test_a_slot_that_is_handed_over_unsaved_is_saved_first(tmp_path: Path) -> None:
    no_memory = tmp_path / "none"
    with FakeWorker(tmp_path, "--parallel", "1", memory=no_memory) as worker:
        assert not worker.raw.in_memory
        first = worker.chat(FIRST, system=SYSTEM)
        worker.wait_for_pause()
        time.sleep(0.2)
        assert "save" not in worker.actions(), "on a disk, slots are saved at hand-over and at the end only"
        worker.chat("Something else entirely, of mountains.")
        assert worker.actions()[-2:] == ["save", "/v1/chat/completions"]
        worker.settle(at_hand_over=True)
        back = worker.chat(FIRST, reply(first), SECOND, system=SYSTEM)
        assert back["rewarm"]["disk_tokens"] > 0, json.dumps(back["rewarm"])
    assert list((tmp_path / "raw").iterdir()) == []


def test_a_cancelled_reply_is_saved_as_far_as_it_came(tmp_path: Path) -> None:
    import socket

    with FakeWorker(tmp_path) as worker:
        body = json.dumps({"messages": messages("SLOW LONG", system=SYSTEM), "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", worker.port)) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            assert b"200" in client.recv(64)
        until(worker.cache.entries)


@pytest.mark.parametrize(
    "flag", [("--context-shift",), ("--cache-reuse", "256"), ("--swa-full",), ("--model-draft", "x.gguf")], ids=str
)
def test_flags_that_defeat_the_cache_are_named_and_honoured(tmp_path: Path, flag: tuple[str, ...]) -> None:
    with FakeWorker(tmp_path, *flag) as worker:
        answer = worker.chat(FIRST)
        assert answer["rewarm"]["reason"] == "disabled"
        assert flag[0] in answer["rewarm"]["detail"]
        (sent,) = worker.bodies("/v1/chat/completions")
        assert "id_slot" not in sent
        assert "save" not in worker.actions()


def test_images_and_several_replies_are_served_uncached(tmp_path: Path) -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with FakeWorker(tmp_path) as worker:
        for more in ({"messages": [{"role": "user", "content": image}]}, {"n": 2}):
            assert worker.chat(FIRST, **more)["rewarm"]["reason"] == "disabled"
        worker.settle()
        assert worker.cache.entries() == []


def test_a_prompt_that_does_not_fit_is_left_to_the_server(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        answer = worker.chat("x" * 5000)
        assert answer["rewarm"]["reason"] == "disabled"
        assert "id_slot" not in worker.bodies("/v1/chat/completions")[0]


def test_a_client_may_name_its_slot(tmp_path: Path) -> None:
    with FakeWorker(tmp_path, "--parallel", "3") as worker:
        worker.chat(FIRST, id_slot=2)
        assert worker.bodies("/v1/chat/completions")[-1]["id_slot"] == 2


def test_states_are_not_loaded_where_that_is_slower(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        worker.chat(FIRST, system=SYSTEM)
        worker.settle()
    with FakeWorker(tmp_path) as worker:
        worth = worker.runner.ensure()._worth
        worth.prefilled(1000, 0.001)
        worth.restored(1, 1000.0)
        answer = worker.chat(FIRST, system=SYSTEM)
        assert (cached(answer), answer["rewarm"]["reason"]) == (0, "not_worth_loading")


def test_what_every_prompt_begins_with_is_not_loaded(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        worker.chat(FIRST)
    with FakeWorker(tmp_path) as worker:
        answer = worker.chat("Another.")
        assert (cached(answer), answer["rewarm"]["reason"]) == (0, "too_short")
        assert "restore" not in worker.actions()


def test_an_end_may_come_while_its_threads_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, ended = threading.Thread.start, []

    def hasty(thread: threading.Thread) -> None:
        if thread.name == "rewarm-reader":
            worker.runner.close(time.monotonic())
            ended.append(thread)
        start(thread)

    worker = FakeWorker(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", hasty)
    with worker:
        assert len(ended) == 1


def test_slot_files_never_stay(tmp_path: Path) -> None:
    with FakeWorker(tmp_path) as worker:
        worker.chat(FIRST)
        worker.settle()
        assert worker.raw.in_memory == worker.raw.path.is_relative_to("/dev/shm")
        assert worker.raw.path.stat().st_mode & 0o777 == 0o700
        assert [path.name for path in worker.raw.path.iterdir()] == ["lock"]
        folder = worker.raw.path
    assert not folder.exists()


def test_what_is_stored_is_what_the_engine_computed(tmp_path: Path) -> None:
    from fake_llama_server import WIDTH, next_row

    with FakeWorker(tmp_path) as worker:
        worker.chat(FIRST)
        worker.settle()
        tokens = [256, *f"<user>{FIRST}</><assistant>".encode()]
        space = worker.runner.ensure()._stored.space()
        state = space.restore(space.find([*tokens, 97]))
        row, rows = np.zeros(WIDTH, "<f4"), []
        for token in tokens:
            row = next_row(row, token)
            rows.append(row)
        keys = next(tensor.array for name, tensor in state.tensors.items() if ".k." in name)
        assert state.n_tokens == len(tokens)
        assert (np.asarray(keys).view("<f4").reshape(-1, WIDTH) == np.stack(rows)).all()
