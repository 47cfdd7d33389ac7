"""Models that are gone: what was kept of them makes room before anything else, and is served until then."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from identity_models import SETTINGS, edit_json, write_model

from rewarm.cache import gone as looking
from rewarm.cache.description import read_description
from rewarm.cache.digest_memo import Memo
from rewarm.cache.identity import Identity
from rewarm.cache.namespace import Namespace
from rewarm.cache.policy import Policy
from rewarm.cache.prefix_cache import PrefixCache, open_cache
from rewarm.store.settings import Limits
from rewarm.testing.driver import on_disk
from rewarm.testing.fake_engine import FakeEngine

ENGINE = FakeEngine()
CHAT = list(range(9))  # three records


class World:
    """A cache for nine records, models beside it, and a clock that goes on with every use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 1e9
        self.model = write_model(folder / "models" / "a model")
        self.cache: PrefixCache = self.open()

    def open(self) -> PrefixCache:
        limits = Limits(max_bytes=2**40, max_files=9, min_free_bytes=0)
        limits_of_new = None if (self.folder / "kv").exists() else limits
        return open_cache(self.folder / "kv", limits_of_new, Policy(), 4, clock=lambda: self.now_s)

    def reopen(self) -> None:
        self.cache.close()
        self.cache = self.open()

    def namespace(self, path: Path | None = None, **settings: Any) -> Namespace:
        """The namespace of the model as it is now."""
        memo = Memo(self.folder / "digests.json")
        identity = Identity.from_model(path or self.model, memo=memo, **{**SETTINGS, **settings})
        assert identity.wait(20), identity.error
        return self.cache.namespace(identity)

    def use(self, namespace: Namespace) -> Namespace:
        """Save a conversation of three records."""
        self.now_s += 10_000
        assert namespace.save(CHAT, ENGINE.state(CHAT)).wait(20)
        assert self.cache.flush(20)
        return namespace

    def kept(self, namespace: Namespace) -> bool:
        """Whether the whole conversation is there."""
        return namespace.look(namespace.find([*CHAT, 1]).tokens).n_tokens == len(CHAT)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.cache.close()


def replace_weights(world: World) -> dict[str, Any]:
    shard = world.model / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    return {}


def replace_config(world: World) -> dict[str, Any]:
    edit_json(world.model / "config.json", rope_theta=20000.0)
    return {}


def update_engine(_: World) -> dict[str, Any]:
    return {"engine_epoch": "fake 2.0"}


@pytest.mark.parametrize("change", [replace_weights, replace_config, update_engine])
def test_b076_what_was_kept_of_a_model_that_was_replaced_goes_first(
    world: World, change: Callable[[World], dict[str, Any]]
) -> None:
    """It was used later than the others, and goes before them all the same."""
    strangers = [world.use(world.namespace(write_model(world.folder / f"other {i}", 90 + i))) for i in range(2)]
    old = world.use(world.namespace())
    settings = change(world)
    world.reopen()
    new = world.use(world.namespace(**settings))
    old, *strangers = (world.cache.namespace(each.identity) for each in (old, *strangers))
    assert not world.kept(old)
    assert all(map(world.kept, (new, *strangers)))
    assert world.cache.gone() == {old.identity.fingerprint: "replaced"}


def test_b076_what_was_kept_of_a_model_that_was_removed_goes_first(world: World) -> None:
    stranger = world.use(world.namespace(write_model(world.folder / "other", 90)))
    old = world.use(world.namespace())
    third = world.use(world.namespace(write_model(world.folder / "third", 95)))
    shutil.rmtree(world.model)
    world.reopen()
    kept = [world.cache.namespace(each.identity) for each in (stranger, third)]
    new = world.use(world.namespace(write_model(world.folder / "fourth", 99)))
    assert world.cache.gone() == {old.identity.fingerprint: "missing"}
    assert not world.kept(world.cache.namespace(old.identity))
    assert all(map(world.kept, (new, *kept)))


def test_b076_never_more_goes_than_is_needed_and_pins_hold(world: World) -> None:
    old = world.use(world.namespace())
    world.cache.pin(world.cache.entries()[0])
    stranger = world.use(world.namespace(write_model(world.folder / "other", 90)))
    world.use(world.namespace(write_model(world.folder / "third", 95)))
    replace_weights(world)
    world.reopen()
    new = world.use(world.namespace())
    assert world.kept(world.cache.namespace(old.identity))  # pinned
    assert world.kept(new)
    assert not world.kept(world.cache.namespace(stranger.identity))  # the least recently used of the others
    assert on_disk(world.folder / "kv").n_files == 9


@pytest.mark.parametrize("settings", [{"kv_bits": 4}, {"window": {"size": 8, "sinks": 4}}, {"kv_start": 1}])
def test_a_model_that_is_used_with_other_settings_is_not_gone(world: World, settings: dict[str, Any]) -> None:
    world.use(world.namespace())
    world.use(world.namespace(**settings))
    world.reopen()
    assert world.cache.gone() == {}


def test_a_model_that_was_moved_is_gone_only_until_it_is_used_again(world: World) -> None:
    old = world.use(world.namespace())
    moved = world.folder / "moved"
    world.model.rename(moved)
    world.reopen()
    assert world.cache.gone() == {old.identity.fingerprint: "missing"}
    found = world.namespace(moved)
    world.now_s += 10_000
    assert found.find([*CHAT, 1]).n_tokens == len(CHAT)  # used, though nothing is saved
    assert world.cache.flush(20)
    world.reopen()
    assert world.cache.gone() == {}
    said = read_description(world.cache.store.description(bytes.fromhex(found.identity.fingerprint or "")))
    assert said is not None
    assert (said.path, said.last_seen_s) == (str(moved), world.now_s)


def test_what_was_replaced_is_served_as_long_as_it_is_there(world: World) -> None:
    old = world.use(world.namespace())
    world.use(world.namespace(engine_epoch="fake 2.0"))
    world.reopen()
    assert list(world.cache.gone().values()) == ["replaced"]
    back = world.namespace()
    assert back.identity.fingerprint == old.identity.fingerprint
    world.now_s += 10_000
    ENGINE.check(back.restore(back.find([*CHAT, 1])), [*CHAT, 1])
    assert world.cache.flush(20)
    world.reopen()  # used by turns: now the other one is the older
    assert world.cache.gone() == {world.namespace(engine_epoch="fake 2.0").identity.fingerprint: "replaced"}


def test_a_disk_of_models_that_does_not_answer_holds_no_save_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    world.use(world.namespace())
    monkeypatch.setattr(looking, "_is_there", lambda path: free.wait(60))
    monkeypatch.setattr(looking, "FIRST_WAIT_S", 0.05)
    world.reopen()
    fresh = world.namespace(write_model(world.folder / "other", 90))
    world.use(fresh)
    assert world.kept(fresh)
    assert not free.is_set()
    free.set()


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"identity": {}}', b"[" * 10**5, b'{"identity": {"$": 1}}', b"\xff"]
)
def test_descriptions_that_make_no_sense_are_nobodys(data: bytes) -> None:
    good = b'{"identity": {"a": 1}, "name": "m", "path": "/m", "last_seen_s": 5}'
    assert looking.gone([(b"1", good), (b"2", data)], lambda _: True) == {}


@pytest.mark.parametrize("name", ["a mod\udce9le", "half \ud800"])
def test_a_model_whose_name_is_no_text_is_kept_and_is_not_gone(name: str, tmp_path: Path) -> None:
    """On Linux a file name is any bytes: what is no UTF-8 reaches Python as half a surrogate pair."""
    identity = Identity({"weights": 1}, name=name)
    identity._path = f"/nowhere/{name}"  # as `from_model` sets it where the file system takes such a name
    cache = open_cache(tmp_path / "kv", block_tokens=4)
    namespace = cache.namespace(identity)
    namespace.save(CHAT, ENGINE.state(CHAT))
    assert cache.flush(60.0)
    match = namespace.find([*CHAT, 1])
    ENGINE.check(namespace.restore(match), CHAT)
    assert (match.n_tokens, cache.gone()) == (len(CHAT), {})
    changed = cache.namespace(Identity({"weights": 2}, name=name)).find([*CHAT, 1])
    assert changed.detail == {"fields": "weights"}
    cache.close()


def test_a_model_in_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    try:
        model = write_model(tmp_path / "mod\udce9le")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    identity = Identity.from_model(model, memo=Memo(tmp_path / "digests.json"), **SETTINGS)
    assert identity.wait(60.0)
    cache = open_cache(tmp_path / "kv", block_tokens=4)
    namespace = cache.namespace(identity)
    namespace.save(CHAT, ENGINE.state(CHAT))
    assert cache.flush(60.0)
    assert namespace.find([*CHAT, 1]).n_tokens == len(CHAT)
    cache.close()
