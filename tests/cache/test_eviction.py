"""Limits: what is evicted, in which order, and that every limit holds on the disk itself after each flush."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rewarm.cache.prefix_cache import open_cache
from rewarm.state.reason import Dropped, Reason
from rewarm.store.settings import Limits
from rewarm.testing.driver import ROOMY, Driver, header_of, holes, on_disk
from rewarm.testing.fake_engine import FakeEngine, Layer, pair, recurrent, window

LAYERS: dict[str, tuple[Layer, ...]] = {
    "rows": (pair(),),
    "window": (pair(1, 2), window(6, 1)),
    "hybrid": (pair(1, 2), recurrent()),
}


def driver_of(tmp_path: Path, max_files: int = 10**6, max_bytes: int = 2**40, kind: str = "rows") -> Driver:
    limits = Limits(max_bytes=max_bytes, max_files=max_files, min_free_bytes=0)
    return Driver(tmp_path / "kv", FakeEngine(layers=LAYERS[kind]), limits=limits, lossy=True)


def chat(i: int, n: int = 9) -> list[int]:
    """The tokens of conversation `i`: two blocks and a tail, three records."""
    return list(range(1000 * i, 1000 * i + n))


def is_there(driver: Driver, i: int) -> bool:
    """Whether all of conversation `i` is found, without a trace of the look."""
    with driver.cache.store.looking(1.0):
        pass
    return driver.namespace().find([*chat(i), 1]).n_tokens == 9


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("max_files", [0, 1, 2, 3, 5, 9])
def test_b075_b080_the_limit_of_files_holds_after_every_flush(tmp_path: Path, kind: str, max_files: int) -> None:
    driver = driver_of(tmp_path, max_files, kind=kind)
    for i in range(12):
        for n in (2, 4, 9, 17):
            driver.save(chat(i, n))
            driver.flush()
            assert on_disk(driver.root).n_files <= max_files
        driver.restore([*chat(i, 17), 1])
    driver.assert_in_order()
    driver.close()


@pytest.mark.parametrize("kind", LAYERS)
def test_b080_the_limit_of_bytes_counts_index_and_log(tmp_path: Path, kind: str) -> None:
    max_bytes = 4 * 2**20
    driver = driver_of(tmp_path, max_bytes=max_bytes, kind=kind)
    for i in range(150):
        driver.save(chat(i, 17))
        driver.flush()
        if i % 10 == 0:
            found = on_disk(driver.root)
            assert found.nbytes <= max_bytes
    stats = driver.cache.stats()
    assert stats["evicted_files"]
    assert stats["bytes_used"] <= max_bytes  # type: ignore[operator]
    driver.assert_in_order()
    driver.close()
    assert on_disk(driver.root).nbytes <= max_bytes


def test_b085_never_more_is_evicted_than_needed(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, max_files=12)
    for i in range(4):
        driver.save(chat(i))
    driver.flush()
    assert on_disk(driver.root).n_files == 12
    driver.save(chat(9, 1))
    driver.flush()
    assert on_disk(driver.root).n_files == 12
    assert driver.cache.stats()["evicted_files"] == 1
    driver.close()


def test_b128_a_restore_refreshes_recency(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, max_files=9)
    for i in range(3):
        driver.save(chat(i))
        driver.flush()
    assert driver.restore([*chat(0), 1]).n_tokens == 9
    driver.flush()
    driver.save(chat(3))
    driver.flush()
    assert [is_there(driver, i) for i in range(4)] == [True, False, True, True]
    driver.close()


def test_b128_a_touch_refreshes_recency(tmp_path: Path) -> None:
    """What the engine's own memory served counts as used."""
    driver = driver_of(tmp_path, max_files=9)
    for i in range(3):
        driver.save(chat(i))
        driver.flush()
    match = driver.namespace().find([*chat(0), 1])
    driver.namespace().restore(match)
    for i in (1, 2):
        driver.restore([*chat(i), 1])
        driver.flush()
    driver.cache.touch(match)
    driver.flush()
    driver.save(chat(3))
    driver.flush()
    assert [is_there(driver, i) for i in range(4)] == [True, False, True, True]
    driver.close()


def test_a_save_of_what_is_there_refreshes_recency(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, max_files=9)
    for i in range(3):
        driver.save(chat(i))
        driver.flush()
    driver.save(chat(0))
    driver.flush()
    driver.save(chat(3))
    driver.flush()
    assert [is_there(driver, i) for i in range(4)] == [True, False, True, True]
    driver.close()


def test_recency_survives_a_restart(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, max_files=9)
    for i in range(3):
        driver.save(chat(i))
        driver.flush()
    driver.restore([*chat(0), 1])
    driver.reopen()
    driver.save(chat(3))
    driver.flush()
    assert [is_there(driver, i) for i in range(4)] == [True, False, True, True]
    driver.close()


def test_a_find_alone_spares_what_it_found_for_a_while(tmp_path: Path) -> None:
    """B129: making room for one conversation never takes what another is about to load."""
    driver = driver_of(tmp_path, max_files=9)
    for i in range(3):
        driver.save(chat(i))
        driver.flush()
    match = driver.namespace().find([*chat(0), 1])
    for i in (1, 2):
        driver.restore([*chat(i), 1])
    driver.flush()
    driver.save(chat(3))
    driver.flush()
    state = driver.namespace().restore(match)
    assert state.n_tokens == 9
    driver.engine.check(state, chat(0))
    driver.close()


def test_what_was_found_goes_when_nothing_else_can(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, max_files=6)
    for i in range(2):
        driver.save(chat(i))
    driver.flush()
    matches = [driver.namespace().find([*chat(i), 1]) for i in range(2)]
    driver.save(chat(7))
    driver.flush()
    assert is_there(driver, 7)
    for i, match in enumerate(matches):
        state = driver.namespace().restore(match)
        driver.engine.check(state, [*chat(i), 1])
        assert state.n_tokens < 9 or state.reason is Reason.HIT
    driver.close()


@pytest.mark.parametrize("kind", LAYERS)
def test_b132_tails_go_first_and_no_chain_has_a_hole(tmp_path: Path, kind: str) -> None:
    driver = driver_of(tmp_path, max_files=14, kind=kind)
    shared = list(range(8))
    driver.save(shared, "system")
    driver.flush()
    for i in range(15):
        driver.save([*shared, 100 + i, *range(5)])
        driver.flush()
        assert holes(driver.root) == []
        assert driver.restore([*shared, 999]).n_tokens >= 4
    driver.assert_in_order()
    driver.close()


def test_b127_a_full_store_keeps_its_hit_rate_for_a_sliding_workload(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, max_files=9)
    hits = 0
    for i in range(30):
        driver.save(chat(i))
        driver.flush()
        hits += driver.restore([*chat(i), 1]).n_tokens == 9
        if i:
            hits += driver.restore([*chat(i - 1), 1]).n_tokens == 9
    assert hits == 59
    driver.close()


def test_b109_b136_a_conversation_larger_than_the_limit_is_not_admitted(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, max_files=6)
    driver.save(chat(0))
    driver.flush()
    report = driver.save(chat(1, 41))
    driver.flush()
    assert report.reason is Dropped.TOO_LARGE
    assert driver.cache.stats()["dropped_saves"] == {"too_large": 1}
    # And nobody else had to go for it.
    assert is_there(driver, 0)
    driver.close()


def test_b109_a_growing_conversation_stops_at_the_limit(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, max_bytes=3 * 2**20)
    tokens: list[int] = []
    for _ in range(60):
        tokens += range(len(tokens), len(tokens) + 40)
        driver.save(tokens)
        driver.flush()
        assert on_disk(driver.root).nbytes <= 3 * 2**20
    assert driver.cache.stats()["dropped_saves"]
    driver.restore([*tokens, 1])
    driver.close()


@pytest.mark.parametrize("kind", LAYERS)
def test_b075_lowering_a_limit_evicts_at_once_and_no_more_than_needed(tmp_path: Path, kind: str) -> None:
    driver = driver_of(tmp_path, kind=kind)
    for i in range(6):
        driver.save(chat(i))
    driver.flush()
    before = on_disk(driver.root).n_files
    removed = driver.cache.set_limits(Limits(max_files=7))
    assert on_disk(driver.root).n_files == 7
    assert removed.n_files == before - 7
    assert driver.cache.settings().limits == Limits(max_files=7, max_bytes=driver.limits.max_bytes, min_free_bytes=0)
    driver.assert_in_order()
    assert driver.cache.set_limits(Limits(max_files=0)).n_files == 7
    assert on_disk(driver.root).n_files == 0
    driver.close()


def test_b075_b079_files_of_earlier_runs_count(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, max_files=9)
    for i in range(3):
        driver.save(chat(i))
    driver.reopen()
    assert driver.cache.stats()["files_used"] == 9
    driver.save(chat(4))
    driver.flush()
    assert on_disk(driver.root).n_files == 9
    driver.close()


def test_b075_a_limit_that_was_lowered_meanwhile_holds_from_the_start(tmp_path: Path) -> None:
    """By hand, in `store.json`, or by another process."""
    driver = driver_of(tmp_path, max_files=9)
    for i in range(3):
        driver.save(chat(i))
    driver.close()
    path = driver.root / "store.json"
    path.write_text(path.read_text().replace('"max_files": 9', '"max_files": 6'))
    driver.open()
    assert on_disk(driver.root).n_files == 6
    assert driver.restore([*chat(2), 1]).n_tokens == 9
    driver.assert_in_order()
    driver.close()


def test_b076_namespaces_of_models_that_are_gone_count_and_go(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, max_files=9)
    for seed in range(3):
        driver.save(chat(seed), owner=(seed, b""))
        driver.flush()
    driver.reopen()
    for i in range(3):
        driver.save(chat(10 + i), owner=(7, b""))
        driver.flush()
    assert on_disk(driver.root).n_files == 9
    assert all(driver.restore([*chat(10 + i), 1], owner=(7, b"")).n_tokens == 9 for i in range(3))
    driver.close()


@pytest.mark.parametrize("how", ["repair", "reopen"])
def test_what_hangs_from_nothing_goes_first_after_a_rebuild(tmp_path: Path, how: str) -> None:
    """Nobody can find it before the hole is closed; `repair` leaves it, and it makes room before anything else."""
    driver = driver_of(tmp_path, max_files=9)
    for i in range(3):
        driver.save(chat(i))
    driver.flush()
    for path in on_disk(driver.root).records:
        if header_of(path).token_ids[0] == chat(1)[0]:
            path.unlink()
    if how == "repair":
        driver.cache.repair()
    else:
        driver.close()
        for leftover in driver.root.glob("index.db*"):
            leftover.unlink()
        driver.open()
    assert on_disk(driver.root).n_files == 8
    driver.save(chat(7))
    driver.flush()
    assert on_disk(driver.root).n_files == 9
    assert holes(driver.root) == []
    assert [driver.find([*chat(i), 1]).n_tokens for i in (0, 1, 2, 7)] == [9, 0, 9, 9]
    driver.assert_in_order()
    driver.close()


def test_quarantine_counts_and_goes_first(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, max_files=9)
    for i in range(3):
        driver.save(chat(i))
        driver.flush()
    path = next(path for path in on_disk(driver.root).records if path.suffix == ".point")
    path.write_bytes(b"bad")
    for i in range(3):
        driver.restore([*chat(i), 1])
    driver.flush()
    assert len(list((driver.root / "quarantine").iterdir())) == 1
    assert on_disk(driver.root).n_files == driver.cache.stats()["files_used"] == 9
    driver.save(chat(8, 1))
    driver.flush()
    assert list((driver.root / "quarantine").iterdir()) == []
    assert driver.cache.stats()["evicted_files"] == 0
    driver.close()


def test_the_reason_of_what_was_evicted(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, max_files=3)
    driver.save(chat(0))
    driver.flush()
    driver.save(chat(1))
    driver.flush()
    match = driver.namespace().find([*chat(0), 1])
    assert match.n_tokens == 0
    assert match.reason in (Reason.EVICTED, Reason.NOTHING_STORED, Reason.DIVERGED)
    driver.close()


def test_an_entry_whose_end_was_evicted_stands_shortened(tmp_path: Path) -> None:
    driver = driver_of(tmp_path)
    driver.save(chat(0, 14))
    driver.flush()
    assert [e.n_tokens for e in driver.cache.entries()] == [14]
    for left, n_tokens in ((3, [12]), (2, [8]), (1, [4]), (0, [])):
        driver.cache.set_limits(Limits(max_files=left))
        assert [e.n_tokens for e in driver.cache.entries()] == n_tokens
        assert driver.restore([*chat(0, 14), 1]).n_tokens == (n_tokens or [0])[0]
    driver.close()


@pytest.mark.parametrize("field", ["max_bytes", "max_files", "min_free_bytes"])
@pytest.mark.parametrize("value", [-1, 1.5, "1 GB", True, 2**63])
def test_limits_that_make_no_sense_are_wrong_calls(tmp_path: Path, field: str, value: object) -> None:
    driver = driver_of(tmp_path)
    before = driver.cache.settings()
    make: Callable[..., Limits] = Limits
    with pytest.raises(ValueError, match=field):
        driver.cache.set_limits(make(**{field: value}))
    assert driver.cache.settings() == before
    driver.close()


def test_limits_of_an_existing_root_stay_as_they_are(tmp_path: Path) -> None:
    driver = driver_of(tmp_path, max_files=9)
    driver.close()
    other = Driver(tmp_path / "kv", limits=ROOMY)
    assert other.cache.settings().limits.max_files == 9
    assert other.cache.block_tokens == 4
    other.close()


@pytest.mark.parametrize("value", [-1, 2**63, 2**70, 1.5, True, "1", float("nan")])
@pytest.mark.parametrize("name", ["max_bytes", "max_files", "min_free_bytes"])
def test_limits_out_of_range_are_refused_everywhere(tmp_path: Path, name: str, value: object) -> None:
    limits = Limits(**{name: value})  # type: ignore[arg-type]
    said = f"{name} must be a whole number from 0 to"
    with pytest.raises(ValueError, match=said):
        open_cache(tmp_path / "new", limits)
    assert not (tmp_path / "new").exists()
    driver = Driver(tmp_path / "kv")
    before = (driver.root / "store.json").read_bytes()
    with pytest.raises(ValueError, match=said):
        driver.cache.set_limits(limits)
    assert (driver.root / "store.json").read_bytes() == before
    driver.cache.set_limits(Limits(**{name: 2**63 - 1}))  # type: ignore[arg-type]
    driver.close()


def test_a_limit_that_leaves_no_room_is_said_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(tmp_path / "kv", lossy=True)
    assert driver.cache.store.cautions() == []
    assert caplog.text == ""
    driver.cache.set_limits(Limits(max_bytes=10_000))
    assert "leaves no room for any record" in caplog.text
    caplog.clear()
    driver.reopen()
    assert "leaves no room for any record" in caplog.text
    driver.cache.set_limits(Limits(max_bytes=2**40, max_files=0))
    assert ["files" in said for said in driver.cache.store.cautions()] == [True]
    driver.cache.set_limits(Limits(max_files=9, min_free_bytes=2**62))
    assert ["stay free" in said for said in driver.cache.store.cautions()] == [True]
    driver.close()
