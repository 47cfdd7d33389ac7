"""Entries: which save moves one on, which makes a new one; pins, forgetting, clearing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import rewarm
from rewarm.store.settings import Limits
from rewarm.testing.driver import Driver, header_of, on_disk
from rewarm.testing.fake_engine import FakeEngine, Layer, pair, recurrent, window

LAYERS: dict[str, tuple[Layer, ...]] = {
    "rows": (pair(),),
    "window": (pair(1, 2), window(6, 1)),
    "hybrid": (pair(1, 2), recurrent()),
}


@pytest.fixture(params=LAYERS)
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=LAYERS[request.param]), lossy=True)
    yield driver
    driver.assert_in_order()
    driver.close()


def save(driver: Driver, tokens: list[int], boundary: str = "assistant", label: str | None = None) -> None:
    driver.save(tokens, boundary, label)
    driver.flush()


def ends(driver: Driver) -> list[tuple[int, str | None, str]]:
    return sorted(((e.n_tokens, e.label, e.boundary) for e in driver.cache.entries()), key=repr)


def test_thirty_turns_are_one_entry(driver: Driver) -> None:
    tokens: list[int] = []
    for turn in range(30):
        tokens += [turn, 1, 2]
        save(driver, tokens)
    assert ends(driver) == [(90, None, "assistant")]


def test_b133_a_regenerated_reply_is_a_second_entry(driver: Driver) -> None:
    save(driver, [1, 2, 3, 4, 5, 6])
    save(driver, [1, 2, 3, 4, 5, 7])
    assert ends(driver) == [(6, None, "assistant"), (6, None, "assistant")]
    assert driver.restore([1, 2, 3, 4, 5, 6, 0]).n_tokens == 6
    assert driver.restore([1, 2, 3, 4, 5, 7, 0]).n_tokens == 6


@pytest.mark.parametrize("n", [3, 4, 8, 9])
def test_a_system_prompt_is_an_entry_of_its_own(driver: Driver, n: int) -> None:
    system = list(range(n))
    save(driver, system, "system")
    save(driver, [*system, 50, 51])
    save(driver, [*system, 60, 61, 62])
    assert ends(driver) == sorted(
        [(n, None, "system"), (n + 2, None, "assistant"), (n + 3, None, "assistant")], key=repr
    )
    # Also where the conversation was there first.
    other = list(range(100, 100 + n))
    save(driver, [*other, 50])
    save(driver, other, "system")
    assert (n, None, "system") in ends(driver)
    assert driver.restore([*other, 9]).n_tokens == n


def test_a_save_that_ends_on_an_entrys_path_changes_no_entry(driver: Driver) -> None:
    save(driver, list(range(12)))
    for n in (12, 5, 8):
        save(driver, list(range(n)))
    assert ends(driver) == [(12, None, "assistant")]


def test_labels_name_entries_and_branches_may_share_one(driver: Driver) -> None:
    save(driver, [1, 2, 3], label="a")
    save(driver, [1, 2, 3, 4, 5], label="a")
    assert ends(driver) == [(5, "a", "assistant")]
    save(driver, [1, 2, 3, 9, 9, 9], label="a")
    assert ends(driver) == [(5, "a", "assistant"), (6, "a", "assistant")]
    save(driver, [1, 2, 3, 4, 5, 6], label="b")
    assert (5, "a", "assistant") in ends(driver)
    assert (6, "b", "assistant") in ends(driver)


def test_the_longest_entry_is_moved_on(driver: Driver) -> None:
    save(driver, [1, 2], "system")
    save(driver, [1, 2, 3, 4])
    save(driver, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert ends(driver) == [(2, None, "system"), (9, None, "assistant")]


def test_an_entrys_end_names_it_in_its_header(driver: Driver) -> None:
    for n in (3, 4, 8):
        save(driver, list(range(100 * n, 100 * n + n)), label=f"l{n}")
    named = {h.label: h.entry.hex() for h in map(header_of, on_disk(driver.root).records) if h.kind == "point"}
    assert named == {entry.label: entry.id for entry in driver.cache.entries()}


def test_entries_survive_a_lost_index(driver: Driver) -> None:
    save(driver, list(range(8)), "system")
    save(driver, list(range(13)), label="x")
    save(driver, [*range(8), 99, 98, 97])
    driver.cache.pin(driver.cache.entries()[0])
    before, pinned = ends(driver), {e.id for e in driver.cache.entries() if e.pinned}
    driver.close()
    for path in driver.root.glob("index.db*"):
        path.unlink()
    driver.open()
    assert ends(driver) == before
    assert {e.id for e in driver.cache.entries() if e.pinned} == pinned


def test_a_restore_is_counted_as_a_hit_of_its_entry(driver: Driver) -> None:
    save(driver, list(range(9)))
    driver.restore(list(range(10)))
    driver.flush()
    (entry,) = driver.cache.entries()
    assert entry.hits == 1


def test_forget_erases_what_only_the_entry_needs(driver: Driver) -> None:
    system = list(range(8))
    save(driver, system, "system")
    save(driver, [*system, *range(100, 110)])
    save(driver, [*system, *range(200, 210)])
    entry = next(e for e in driver.cache.entries() if e.n_tokens == 18)
    told = driver.cache.forget(entry, dry_run=True)
    before = on_disk(driver.root)
    assert told.n_files > 0
    assert ends(driver).count((18, None, "assistant")) == 2
    assert driver.cache.forget(entry) == told
    after = on_disk(driver.root)
    assert before.n_files - after.n_files == told.n_files
    assert sorted(ends(driver)) == sorted([(8, None, "system"), (18, None, "assistant")])
    lengths = sorted(driver.restore([*system, *range(start, start + 10), 1]).n_tokens for start in (100, 200))
    assert lengths == [8, 18]
    assert driver.restore([*system, 77]).n_tokens == 8


@pytest.mark.parametrize("n", [5, 8, 20])
def test_a_forgotten_conversation_is_found_nowhere_under_the_root(driver: Driver, n: int) -> None:
    """Neither its token ids nor its rows: in records, index, log, quarantine, temporaries."""
    chance = random.Random(n)
    secret = [chance.randrange(2**60, 2**62) for _ in range(n)]
    save(driver, [1, 2, 3, 4], "system")
    save(driver, [1, 2, 3, 4, *secret])
    driver.restore([1, 2, 3, 4, *secret, 5])
    (entry,) = [e for e in driver.cache.entries() if e.n_tokens == n + 4]
    needles = [
        *(token.to_bytes(8, "little") for token in secret),
        *(token.to_bytes(8, "big") for token in secret),
        *(str(token).encode() for token in secret),
    ]
    everything = b"".join(path.read_bytes() for path in driver.root.rglob("*") if path.is_file())
    assert any(needle in everything for needle in needles)
    driver.cache.forget(entry)
    for path in driver.root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not any(needle in data for needle in needles), path.name
    assert driver.restore([1, 2, 3, 4, *secret, 5]).n_tokens == 4
    # The same tokens sent again are a new conversation.
    save(driver, [1, 2, 3, 4, *secret])
    assert driver.restore([1, 2, 3, 4, *secret, 5]).n_tokens == n + 4


@pytest.mark.parametrize("how", ["forget", "clear"])
def test_what_is_forgotten_is_gone_though_the_settings_cannot_be_read(driver: Driver, how: str) -> None:
    chance = random.Random(how)
    secret = [chance.randrange(2**60, 2**62) for _ in range(9)]
    save(driver, secret)
    (entry,) = driver.cache.entries()
    right = (driver.root / "store.json").read_bytes()
    (driver.root / "store.json").write_bytes(b"no settings")
    with pytest.raises(rewarm.SettingsError):
        driver.cache.forget(entry) if how == "forget" else driver.cache.clear()
    needles = [token.to_bytes(8, order) for token in secret for order in ("little", "big")]
    for path in driver.root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not any(needle in data for needle in needles), path.name
    (driver.root / "store.json").write_bytes(right)


def test_clear_of_one_namespace_leaves_the_others(driver: Driver) -> None:
    driver.save(range(9), owner=(0, b""))
    driver.save(range(9), owner=(1, b""))
    driver.flush()
    told = driver.cache.clear(driver.namespace((0, b"")), dry_run=True)
    assert driver.cache.clear(driver.namespace((0, b""))) == told
    assert driver.restore(range(10), owner=(0, b"")).n_tokens == 0
    assert driver.restore(range(10), owner=(1, b"")).n_tokens == 9
    assert driver.cache.clear().n_files > 0
    assert on_disk(driver.root).n_files == 0
    assert driver.cache.stats()["files_used"] == 0


def test_clear_takes_pinned_entries_too(driver: Driver) -> None:
    save(driver, list(range(9)))
    driver.cache.pin(driver.cache.entries()[0])
    driver.cache.clear()
    assert on_disk(driver.root).n_files == 0
    assert driver.cache.settings().pins == ()


def test_wrong_names_are_wrong_calls(driver: Driver) -> None:
    for wrong in ("", "x", "0" * 31, "0" * 33, "../" * 8, "zz" * 16):
        with pytest.raises(ValueError, match="hex"):
            driver.cache.forget(wrong)
        with pytest.raises(ValueError, match="hex"):
            driver.cache.pin(wrong)
    assert not driver.cache.pin("0" * 32)
    assert driver.cache.forget("0" * 32).n_files == 0
    with pytest.raises(ValueError, match="hex"):
        driver.cache.clear("x")


def test_pins_hold_a_whole_path(tmp_path: Path) -> None:
    limits = Limits(max_bytes=2**40, max_files=12, min_free_bytes=0)
    driver = Driver(tmp_path / "kv", FakeEngine(layers=LAYERS["window"]), limits=limits, lossy=True)
    save(driver, list(range(5)))
    save(driver, list(range(9)))
    assert driver.cache.pin(driver.cache.entries()[0])
    for i in range(10):
        save(driver, list(range(1000 * i + 100, 1000 * i + 109)))
    assert driver.restore(list(range(10))).n_tokens == 9
    assert driver.cache.unpin(next(e for e in driver.cache.entries() if e.pinned))
    for i in range(20, 30):
        save(driver, list(range(1000 * i, 1000 * i + 9)))
    assert driver.restore(list(range(10))).n_tokens == 0
    driver.assert_in_order()
    driver.close()


def test_wrong_calls_raise_and_change_nothing(driver: Driver) -> None:
    state = driver.engine.state([1, 2, 3])
    ns = driver.namespace()
    with pytest.raises(ValueError, match="4 tokens for a state of 3"):
        ns.save([1, 2, 3, 4], state)
    with pytest.raises(ValueError, match="Boundary"):
        ns.save([1, 2, 3], state, "noon")
    with pytest.raises(ValueError, match="64-bit"):
        ns.save([1.5, 2, 3], state)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="64-bit"):
        ns.find(["a"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at_most"):
        ns.find([1], at_most=-1)
    misfit = dict(driver.engine.state(range(9)).tensors)
    misfit["x"] = rewarm.Rows(state.tensors[min(state.tensors)].array.reshape(3, -1), 0)
    if any(isinstance(tensor, rewarm.Rows) for tensor in state.tensors.values()):
        with pytest.raises(ValueError, match="rows for"):
            ns.save([1] * 9, rewarm.SequenceState(9, misfit))
    driver.flush()
    assert on_disk(driver.root).n_files == 0


def test_b093_b094_an_empty_state_is_not_stored(driver: Driver) -> None:
    report = driver.namespace().save([], rewarm.SequenceState(0, {}))
    assert (report.queued, report.reason) == (False, rewarm.Dropped.EMPTY)
    report = driver.namespace().save([1, 2], rewarm.SequenceState(2, {}))
    assert report.reason is rewarm.Dropped.EMPTY
    match = driver.namespace().find([])
    assert (match.n_tokens, match.reason) == (0, rewarm.Reason.HIT)
    state = driver.namespace().restore(match)
    assert (state.n_tokens, state.tensors) == (0, {})


def test_a_save_on_an_entrys_path_leaves_nothing_that_no_entry_owns(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "rows", FakeEngine(layers=LAYERS["rows"]))
    save(driver, list(range(11)))
    before = on_disk(driver.root).records
    save(driver, list(range(6)), "user")
    assert on_disk(driver.root).records == before
    assert driver.restore([*range(6), 99]).n_tokens == 6
    driver.close()
