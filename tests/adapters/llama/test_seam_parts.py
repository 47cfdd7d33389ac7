"""The seam's parts by themselves: flags, identity, slots, the raw folder, the facts of a GGUF file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llama_worker import write_gguf

from rewarm.adapters.llama import flags, gguf_facts
from rewarm.adapters.llama.flags import UnusableFlags
from rewarm.adapters.llama.identity import Before, Resolved
from rewarm.adapters.llama.raw_folder import RawFolder
from rewarm.adapters.llama.slot_file import UnknownLayout, parse_tokens
from rewarm.adapters.llama.slots import NO_TOKENS, Point, Slot, SlotPool, n_common
from rewarm.adapters.worth import Worth


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


# Flags.


def test_flags_are_read_by_any_of_their_names() -> None:
    given = flags.parse(["-m", "a.gguf", "-c", "4096", "--temp", "-0.5", "--no-warmup", "--lora-scaled", "l", "0.5"])
    assert given.value("--model") == "a.gguf"
    assert given.number("--ctx-size", 0) == 4096
    assert given.value("--temp") == "-0.5"
    assert given.switched("warmup") is False
    assert given.last("--lora-scaled").values == ("l", "0.5")


def test_the_command_line_goes_before_the_environment() -> None:
    given = flags.parse(["-c", "1024"], {"LLAMA_ARG_CTX_SIZE": "2048", "LLAMA_ARG_CACHE_REUSE": "64", "HOME": "/"})
    assert given.number("--ctx-size", 0) == 1024
    assert "--cache-reuse 64" in flags.what_defeats(flags.parse(["-m", "x"], {"LLAMA_ARG_CACHE_REUSE": "64"}))


def test_address_and_keys_never_reach_the_engine() -> None:
    given = flags.parse(["-m", "x", "--port", "1", "--host", "0.0.0.0", "--api-key", "a,b", "-np", "2"])
    assert given.passed_on() == ["--model", "x", "--parallel", "2"]
    assert given.api_keys == {"a", "b"}


def test_what_the_cache_needs_is_added_where_the_build_knows_it() -> None:
    known = frozenset({"--no-context-shift", "--cache-ram", "--ctx-checkpoints"})
    assert flags.added(flags.parse(["-m", "x"]), known) == [
        *("--no-context-shift", "--cache-ram", "0", "--ctx-checkpoints", "4")
    ]
    kept = flags.parse(["-m", "x", "-cram", "100", "-ctxcp", "16"])
    assert flags.added(kept, known) == ["--no-context-shift"]
    assert [word.split(":")[0] for word in flags.warnings(kept)] == ["--cache-ram", "--ctx-checkpoints 16"]


@pytest.mark.parametrize(
    "words",
    [
        ["--context-shift"],
        ["--cache-reuse", "1"],
        ["--swa-full"],
        ["-md", "draft.gguf"],
        ["--spec-type", "ngram-mod"],
        ["--no-cache-prompt"],
        ["--slot-save-path", "/x"],
        ["--embeddings"],
    ],
    ids=lambda words: words[0],
)
def test_flags_that_defeat_the_cache(words: list[str]) -> None:
    assert flags.what_defeats(flags.parse(["-m", "x", *words])).startswith(flags.ALIASES.get(words[0], words[0]))


def test_flags_that_do_not() -> None:
    harmless = ["-m", "x", "--no-context-shift", "--cache-reuse", "0", "-ngl", "99", "-fa", "on", "--no-swa-full"]
    assert flags.what_defeats(flags.parse(harmless)) == ""
    assert "--model" in flags.what_defeats(flags.parse([]))


def test_a_word_that_is_no_flag_is_refused() -> None:
    with pytest.raises(UnusableFlags, match="stray"):
        flags.parse(["stray"])


# Identity.


def fingerprint(model: Path, *words: str, build: str = "b1", attention: str = "on", n_ctx: int = 512) -> str:
    before = Before(flags.parse(["-m", str(model), *words]))
    identity = before.identity(Resolved(build, attention, n_ctx))
    assert identity.wait(20), identity.error
    assert identity.fingerprint is not None
    return identity.fingerprint


def test_what_changes_the_kv_changes_the_identity(tmp_path: Path) -> None:
    model, lora = write_gguf(tmp_path / "m.gguf"), write_gguf(tmp_path / "l.gguf", b"lora")
    seen = {
        fingerprint(model),
        fingerprint(write_gguf(tmp_path / "other.gguf", b"others")),
        fingerprint(model, build="b2"),
        fingerprint(model, attention="off"),
        fingerprint(model, "--cache-type-k", "q8_0"),
        fingerprint(model, "-ctv", "q8_0"),
        fingerprint(model, "--rope-freq-base", "10000"),
        fingerprint(model, "--yarn-orig-ctx", "4096"),
        fingerprint(model, "--override-kv", "llama.rope.freq_base=float:5"),
        fingerprint(model, "--lora", str(lora)),
        fingerprint(model, "--lora-scaled", f"{lora}:0.5"),
        fingerprint(model, "--lora", str(lora), "--lora", str(model)),
        fingerprint(model, "--lora", str(model), "--lora", str(lora)),
        fingerprint(model, "--control-vector", str(lora)),
        fingerprint(model, "--mmproj", str(lora)),
        fingerprint(model, "--a-flag-of-a-later-build", "1"),
    }
    assert len(seen) == 16


@pytest.mark.parametrize("flag", ["--lora", "--control-vector", "--mmproj"])
def test_b026_a_file_beside_the_model_that_is_overwritten_is_another_model(tmp_path: Path, flag: str) -> None:
    model, path = write_gguf(tmp_path / "m.gguf"), write_gguf(tmp_path / "beside.gguf", b"one")
    before = fingerprint(model, flag, str(path))
    write_gguf(path, b"two")
    assert fingerprint(model, flag, str(path)) != before


def test_what_does_not_change_it_is_left_out(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf")
    moved = write_gguf(tmp_path / "moved.gguf")
    same = {
        fingerprint(model),
        fingerprint(moved),
        fingerprint(model, "-c", "4096", n_ctx=4096),
        fingerprint(model, "-b", "64", "-ub", "32", "-t", "1", "-np", "4", "--port", "1"),
        fingerprint(model, "--temp", "0", "--seed", "1", "--jinja", "--alias", "x", "--no-warmup"),
    }
    assert len(same) == 1


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf")
    before = Before(flags.parse(["-m", str(model)]))
    assert before.unchanged()
    write_gguf(model, b"other")
    assert not before.unchanged()


def test_facts_of_a_header(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    out = gguf.GGUFWriter(tmp_path / "w.gguf", "gemma3")
    out.add_context_length(4096)
    out.add_sliding_window(512)
    out.add_token_list(["a", "b"])
    out.add_array("numbers", [1, 2, 3])
    out.add_tensor("blk.0.rope_factors_long.weight", np.zeros(2, np.float32))
    out.add_tensor("rope_factors_long.weight", np.zeros(2, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    assert gguf_facts.read(tmp_path / "w.gguf") == gguf_facts.Facts("gemma3", 512, 4096, True)
    raw = (tmp_path / "w.gguf").read_bytes()
    for cut in (3, 10, 30, 100):
        (tmp_path / "torn.gguf").write_bytes(raw[:cut])
        with pytest.raises(ValueError, match="GGUF|header"):
            gguf_facts.read(tmp_path / "torn.gguf")


# Slots.


def hold(pool: SlotPool, *ids: int, n_stored: int = 0) -> Slot:
    """Have a slot serve a prompt."""
    slot = pool.take(tokens(*ids), n_stored, timeout_s=1)
    slot.live = tokens(*ids)
    pool.release(slot)
    return slot


def test_the_slot_that_fits_best_goes_on() -> None:
    pool = SlotPool(3)
    first, second = hold(pool, 1, 2, 3), hold(pool, 7, 8, 9)
    assert first is not second, "an empty slot goes before one that holds another conversation"
    assert hold(pool, 1, 2, 3, 4) is first
    assert hold(pool, 7, 8, 9, 9) is second


def test_another_conversation_is_spared_where_the_store_has_as_much() -> None:
    pool = SlotPool(2)
    long = hold(pool, *range(100))
    assert hold(pool, *range(20), 555, n_stored=20) is not long
    pool = SlotPool(2)
    long = hold(pool, *range(100))
    assert hold(pool, *range(20), 555, n_stored=0) is long, "memory has more than the store"


def test_the_least_recently_used_slot_is_taken_when_none_fits() -> None:
    pool = SlotPool(2)
    first, second = hold(pool, 1, 2), hold(pool, 5, 6)
    assert hold(pool, 1, 2, 3) is first
    assert hold(pool, 9, 9) is second


def test_a_slot_is_held_by_one_request() -> None:
    pool = SlotPool(1)
    slot = pool.take(NO_TOKENS, 0)
    with pytest.raises(TimeoutError):
        pool.take(NO_TOKENS, 0, timeout_s=0.01)
    with pool.saving(slot) as free:
        assert not free
    pool.release(slot)
    with pool.saving(slot) as free:
        assert free
        with pytest.raises(TimeoutError):
            pool.take(NO_TOKENS, 0, timeout_s=0.01)
    assert pool.take(NO_TOKENS, 0, timeout_s=1) is slot


def test_a_state_that_cannot_be_cut_is_usable_at_its_points() -> None:
    slot = Slot(0, live=tokens(*range(10)), points=(Point(3, 3), Point(6, 7)))
    assert slot.usable(tokens(*range(12)), False) == 10
    assert slot.usable(tokens(*range(10)), False) == 6, "one token is evaluated, and nothing can be cut"
    assert slot.usable(tokens(*range(10)), True) == 9
    assert slot.usable(tokens(*range(8), 99), False) == 6
    assert slot.usable(tokens(*range(7), 99), False) == 6
    assert slot.usable(tokens(*range(6), 99), False) == 3, "the server asks for more than the point's length"
    assert slot.usable(tokens(*range(7)), False) == 3
    assert slot.usable(tokens(*range(4)), False) == 3
    assert slot.usable(tokens(*range(3)), False) == 0
    assert slot.usable(tokens(*range(8), 99), True) == 8
    assert slot.usable(tokens(99), False) == 0
    assert n_common(tokens(1, 2), tokens(1, 2, 3)) == 2


# The raw folder.


def test_the_raw_folder_is_private_and_goes(tmp_path: Path) -> None:
    raw = RawFolder(tmp_path / "disk", memory=tmp_path)
    assert raw.in_memory
    assert raw.path.stat().st_mode & 0o777 == 0o700
    name = raw.new_name()
    assert raw.write(name, [b"ab", memoryview(b"c")]) == 3
    assert (raw.path / name).stat().st_mode & 0o777 == 0o600
    (raw.path / f"{name}.ckpt").write_bytes(b"")
    raw.remove(name)
    assert [path.name for path in raw.path.iterdir()] == ["lock"]
    raw.close()
    raw.close()
    assert not raw.path.exists()


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from rewarm.adapters.llama.raw_folder import RawFolder\n"
    code += "raw = RawFolder(Path(sys.argv[1]), Path(sys.argv[1])); raw.write(raw.new_name(), [b'x']); os._exit(1)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    in_use = RawFolder(tmp_path, tmp_path)
    assert not left.exists()
    other = RawFolder(tmp_path, tmp_path)
    assert in_use.path.exists()
    in_use.close()
    other.close()


# Odds and ends.


def test_the_token_list_of_a_file_that_is_not_understood() -> None:
    def file(*words: int) -> memoryview:
        head = np.array([0x67677371, 9, len(words)], "<u4").tobytes()
        return memoryview(head + np.array(words, "<i4").tobytes() + b"unknown")

    assert parse_tokens(file(5, 6, 7)).tolist() == [5, 6, 7]
    assert parse_tokens(file(-1, 1, 3, 5, 6, 7, 0)).tolist() == [5, 6, 7]
    for damaged in (file(-1, 1, 3, 5, -1, 7, 1), file(-1, 2, 3, 5, 6, 7, 0), memoryview(b"short")):
        with pytest.raises(UnknownLayout):
            parse_tokens(damaged)


def test_loading_is_tried_until_both_speeds_are_known() -> None:
    worth = Worth()
    assert worth.is_worth(1, 10**12)
    worth.prefilled(1000, 1.0)
    assert worth.is_worth(1, 10**12)
    worth.restored(10**7, 1.0)
    assert worth.is_worth(2000, 10**7)
    assert not worth.is_worth(500, 10**7)
    assert worth.prefill_s(2000) == pytest.approx(2.0)


def test_a_small_restore_says_nothing_of_large_ones() -> None:
    worth = Worth()
    worth.prefilled(1000, 1.0)
    worth.restored(64, 0.02)
    assert not worth.is_worth(10, 64), "the overhead alone takes longer"
    assert worth.is_worth(100, 10**9)
