"""Every kind of damage to every record: no wrong load, no exception; quarantined once, and the rest still serves."""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rewarm.state.reason import Reason
from rewarm.testing.driver import Driver, on_disk
from rewarm.testing.fake_engine import FakeEngine, Layer, pair, recurrent, window

TOKENS = list(range(19))
LAYERS: dict[str, tuple[Layer, ...]] = {
    "rows": (pair(),),
    "window": (pair(1, 2), window(6, 1)),
    "hybrid": (pair(1, 2), recurrent()),
}


@pytest.fixture(params=LAYERS)
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path / "kv", FakeEngine(layers=LAYERS[request.param]), lossy=True)
    for end in (6, 11, 19):
        driver.save(TOKENS[:end])
        driver.flush()
    yield driver
    driver.close()


def flip(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


DAMAGE: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "one bit": flip,
    "another bit": flip,
    "64 KiB of random bytes": lambda data, chance: chance.randbytes(65536),
    "random bytes of its length": lambda data, chance: chance.randbytes(len(data)),
    "zeros of its length": lambda data, chance: bytes(len(data)),
    "zero length": lambda data, chance: b"",
    "half": lambda data, chance: data[: len(data) // 2],
    "less one byte": lambda data, chance: data[:-1],
    "more one byte": lambda data, chance: data + b"\0",
    "padded to a page": lambda data, chance: data + bytes(4096),
    "header only": lambda data, chance: data[:4096],
    "first page of zeros": lambda data, chance: bytes(4096) + data[4096:],
    "shifted": lambda data, chance: b"\0" + data[:-1],
    "text": lambda data, chance: b"hello\n" * 1000,
}


def restored(driver: Driver) -> list[int]:
    """How much of each cut is restored; every state is checked bit for bit."""
    return [driver.restore([*TOKENS[:cut], 99]).n_tokens for cut in range(len(TOKENS) + 1)]


def save_again(driver: Driver, whole: list[int], rounds: int = 3) -> None:
    """Save and restore until all is as it was: what is bad below a bad record is seen in a later round."""
    for _ in range(rounds):
        for end in (6, 11, 19):
            driver.save(TOKENS[:end])
            driver.flush()
        if restored(driver) == whole:
            return
        driver.flush()
    assert restored(driver) == whole


@pytest.mark.parametrize("damage", DAMAGE)
def test_b039_b061_damage_to_any_record_is_a_miss_from_there_on(
    driver: Driver, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(damage)
    whole = restored(driver)
    for path in on_disk(driver.root).records:
        good = path.read_bytes()
        bad = DAMAGE[damage](good, chance)
        if bad == good:  # a record of no tensors is its header only
            continue
        path.write_bytes(bad)
        quarantined = driver.cache.stats()["quarantined_files"]
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            less = restored(driver)
            driver.flush()
        assert all(n <= most for n, most in zip(less, whole, strict=True))
        assert less != whole
        # Once, counted, with one line that names the file.
        assert driver.cache.stats()["quarantined_files"] == quarantined + 1  # type: ignore[operator]
        assert sum(path.name in record.getMessage() for record in caplog.records) == 1
        assert not path.exists()
        # Its name is free: the next save writes it again, and all is as it was.
        for end in (6, 11, 19):
            driver.save(TOKENS[:end])
            driver.flush()
        assert restored(driver) == whole
    assert driver.cache.verify().is_clean
    assert len(list((driver.root / "quarantine").iterdir())) <= 16


def test_truncation_at_each_sixteenth_of_each_record(driver: Driver) -> None:
    whole = restored(driver)
    for part in range(16):
        paths = on_disk(driver.root).records
        path = paths[part % len(paths)]
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * part // 16])
        less = restored(driver)
        assert all(n <= most for n, most in zip(less, whole, strict=True))
        driver.flush()
        save_again(driver, whole)


def test_b004_swapped_files_are_seen(driver: Driver) -> None:
    whole = restored(driver)
    records = on_disk(driver.root).records
    for one, two in itertools.pairwise(records):
        a, b = one.read_bytes(), two.read_bytes()
        one.write_bytes(b)
        two.write_bytes(a)
        less = restored(driver)
        assert all(n <= most for n, most in zip(less, whole, strict=True))
        driver.flush()
        save_again(driver, whole)


def test_b059_records_of_another_root_are_seen(driver: Driver, tmp_path: Path) -> None:
    """Another engine's records, of the same names' lengths and sizes: only their content tells them apart."""
    other = Driver(tmp_path / "other", driver.engine)
    other.save(TOKENS, owner=(1, b""))
    other.flush()
    for suffix in (".block", ".point"):
        ours = [path for path in on_disk(driver.root).records if path.suffix == suffix]
        theirs = [path for path in on_disk(other.root).records if path.suffix == suffix]
        for mine, foreign in zip(ours, theirs, strict=False):
            shutil.copyfile(foreign, mine)
    restored(driver)
    driver.flush()
    restored(driver)
    other.close()


def test_newer_records_are_left_alone(driver: Driver) -> None:
    for path in on_disk(driver.root).records:
        data = bytearray(path.read_bytes())
        data[8] = 2
        path.write_bytes(data)
    before = on_disk(driver.root).records
    assert set(restored(driver)) == {0}
    driver.flush()
    assert on_disk(driver.root).records == before
    assert driver.cache.stats()["quarantined_files"] == 0
    for path in driver.root.glob("index.db*"):
        path.unlink()
    driver.close()
    driver.open()
    assert set(restored(driver)) == {0}
    assert on_disk(driver.root).records == before


def test_b045_files_that_vanish_are_a_miss(driver: Driver) -> None:
    whole = restored(driver)
    for path in on_disk(driver.root).records:
        path.unlink()
        assert restored(driver) != whole
        driver.flush()
        assert driver.cache.stats()["quarantined_files"] == 0
        for end in (6, 11, 19):
            driver.save(TOKENS[:end])
            driver.flush()
        assert restored(driver) == whole
        assert path.exists()


def test_b105_a_folder_that_was_emptied_heals(driver: Driver) -> None:
    whole = restored(driver)
    for path in driver.root.iterdir():
        if len(path.name) == 64:
            shutil.rmtree(path)
    assert set(restored(driver)) == {0}
    driver.flush()
    save_again(driver, whole, rounds=1)
    assert driver.cache.verify().is_clean


@pytest.mark.parametrize("what", ["random", "zeros", "empty", "text", "half", "gone"])
def test_b118_b083_a_broken_index_is_built_anew(driver: Driver, what: str) -> None:
    whole = restored(driver)
    entries = {(entry.n_tokens, entry.label, entry.boundary) for entry in driver.cache.entries()}
    driver.close()
    path = driver.root / "index.db"
    data = path.read_bytes()
    replaced = {
        "random": random.Random(0).randbytes(len(data)),
        "zeros": bytes(len(data)),
        "empty": b"",
        "text": b"hello\n" * 100,
        "half": data[: len(data) // 2],
    }
    if what == "gone":
        path.unlink()
    else:
        path.write_bytes(replaced[what])
    driver.open()
    assert restored(driver) == whole
    assert {(entry.n_tokens, entry.label, entry.boundary) for entry in driver.cache.entries()} == entries
    driver.assert_in_order()


def test_an_index_that_is_flipped_anywhere_gives_nothing_wrong(driver: Driver, tmp_path: Path) -> None:
    driver.close()
    path = driver.root / "index.db"
    data = path.read_bytes()
    chance = random.Random(1)
    for _ in range(25):
        path.write_bytes(flip(flip(data, chance), chance))
        driver.open()
        driver.restore([*TOKENS, 99])
        driver.save(TOKENS)
        driver.cache.flush(20)
        driver.restore([*TOKENS, 99])
        driver.cache.close()
        for leftover in driver.root.glob("index.db*"):
            leftover.unlink()
    path.write_bytes(data)
    driver.open()


def test_the_reason_of_damage_is_corrupt(driver: Driver) -> None:
    path = next(path for path in on_disk(driver.root).records if path.suffix == ".block")
    path.write_bytes(flip(path.read_bytes(), random.Random(0)))
    # Which block it is, the walk over all cuts finds out.
    reasons = {driver.restore([*TOKENS[:cut], 99]).reason for cut in range(len(TOKENS) + 1)}
    assert Reason.CORRUPT in reasons


def test_what_rewarm_did_not_write_is_never_touched(driver: Driver) -> None:
    strangers = [
        driver.root / "notes.txt",
        driver.root / "tmp" / "notes.txt",
        driver.root / "quarantine-of-mine",
        next(path for path in driver.root.iterdir() if len(path.name) == 64) / "README",
        on_disk(driver.root).records[0].with_name("x.block"),
        on_disk(driver.root).records[0].with_suffix(".block.bak"),
    ]
    for stranger in strangers:
        stranger.write_text("mine")
    driver.reopen()
    driver.cache.repair()
    driver.cache.verify()
    driver.cache.clear()
    driver.reopen()
    for stranger in strangers:
        assert stranger.read_text() == "mine", stranger


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_records_that_became_pipes_or_links_hold_nobody_up(driver: Driver, tmp_path: Path) -> None:
    records = on_disk(driver.root).records
    for i, path in enumerate(records):
        target = tmp_path / f"outside-{i}"
        path.rename(target)
        path.symlink_to(target) if i % 2 else os.mkfifo(path)
    assert set(restored(driver)) == {0}
    driver.flush()


def test_b069_a_record_that_is_a_link_is_set_aside_with_a_reason(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv", lossy=True)
    driver.save(range(11))
    driver.flush()
    for path in on_disk(driver.root).records:
        outside = tmp_path / path.name
        path.rename(outside)
        path.symlink_to(outside)
    state = driver.namespace().restore(driver.namespace().find(range(12)))
    assert (state.n_tokens, state.reason) == (0, Reason.CORRUPT)
    for _ in range(3):  # one is met at each restore, and written again by the save
        driver.flush()
        driver.save(range(11))
        driver.flush()
        state = driver.restore(range(12))
    assert state.n_tokens == 11
    assert len(list(tmp_path.glob("*.block"))) == 2  # what the links led to is nobody's business
    driver.close()


def test_b083_index_and_disk_agree_after_damage_has_been_met(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "kv", lossy=True)
    chats = [[100 * i, 1, 2, 3, 4, 5, 6, 7, 8] for i in range(50)]
    for tokens in chats:
        driver.save(tokens)
    driver.flush()
    for path in random.Random(0).sample(on_disk(driver.root).records, 10):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    for tokens in chats:
        driver.restore([*tokens, 1])
    driver.flush()
    found, stats = on_disk(driver.root), driver.cache.stats()
    assert (stats["files_used"], stats["bytes_used"]) == (found.n_files, found.nbytes)
    driver.cache.verify(quarantine=True)  # what lies behind a damaged block, and was not met
    found, stats = on_disk(driver.root), driver.cache.stats()
    assert (stats["files_used"], stats["bytes_used"]) == (found.n_files, found.nbytes)
    assert stats["quarantined_files"] == 10
    driver.cache.repair()
    found, stats = on_disk(driver.root), driver.cache.stats()
    assert (stats["files_used"], stats["bytes_used"]) == (found.n_files, found.nbytes)
    driver.close()
