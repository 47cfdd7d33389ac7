"""Versions of an engine: one that computes the same goes on with what is stored, one that does not begins anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewarm.cache.description import read_description
from rewarm.cache.epochs import PROBE_LABEL, PROBE_TOKENS
from rewarm.cache.identity import Identity
from rewarm.cache.policy import Policy
from rewarm.cache.prefix_cache import PrefixCache, open_cache
from rewarm.state.reason import Reason
from rewarm.state.sequence import Rows, SequenceState
from rewarm.store.settings import Limits
from rewarm.testing.driver import on_disk
from rewarm.testing.fake_engine import FakeEngine, Layer, latent, pair, recurrent, triple, window

CHAT = list(range(100, 109))
LAYERS: dict[str, tuple[Layer, ...]] = {
    "rows": (pair(),),
    "everything": (pair(1, 2), latent(), triple(), window(6, 1), recurrent()),
}


class Version:
    """One version of an engine, that counts how often it is probed.

    Attributes:
        name: its epoch.
        engine: computes its states.
        noise: by how much its second chunk plan differs from the first.
        shift: by how much all of its states differ from the engine's.
    """

    def __init__(self, name: str, engine: FakeEngine | None = None, noise: float = 0.0, shift: float = 0.0) -> None:
        self.name, self.engine = name, engine or FakeEngine(layers=LAYERS["rows"])
        self.noise, self.shift = noise, shift
        self.n_probed = 0

    def identity(self, **fields: Any) -> Identity:
        return Identity({"weights": "w", "engine_epoch": self.name, **fields}, "a model")

    def probe(self) -> Sequence[SequenceState]:
        self.n_probed += 1
        return [self.state(self.shift), self.state(self.shift + self.noise)]

    def state(self, by: float) -> SequenceState:
        state = self.engine.state(PROBE_TOKENS)
        if not by:
            return state
        tensors = {
            name: replace(tensor, array=small(tensor.array) + np.float32(by)) for name, tensor in state.tensors.items()
        }
        return replace(state, tensors=tensors)


def small(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers of an engine that computes something: the fake one's bits are of any size."""
    return (np.arange(array.size, dtype=array.dtype).reshape(array.shape) % 7) / 8


class Settled(Version):
    """A version whose states are of plain numbers."""

    def state(self, by: float) -> SequenceState:
        return super().state(by or 1e-30)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    limits = Limits(max_bytes=2**40, max_files=10**6, min_free_bytes=0)
    opened = open_cache(tmp_path / "kv", limits, Policy(), 256)
    yield opened
    opened.close()


def serve(cache: PrefixCache, version: Version, **fields: Any) -> Identity:
    """Load a model, adopt, and save a conversation."""
    identity = cache.adopt_epoch(version.identity(**fields), version.probe)
    state = version.engine.state(CHAT)
    assert cache.namespace(identity).save(CHAT, state).wait(20)
    assert cache.flush(20)
    return identity


def finds(cache: PrefixCache, version: Version) -> int:
    """How much of the conversation the version restores, every bit right."""
    space = cache.namespace(cache.adopt_epoch(version.identity(), version.probe))
    state = space.restore(space.find([*CHAT, 1]))
    version.engine.check(state, [*CHAT, 1])
    return state.n_tokens


@pytest.mark.parametrize("layers", LAYERS)
def test_a_version_that_computes_the_same_goes_on_and_is_listed(cache: PrefixCache, layers: str) -> None:
    engine = FakeEngine(layers=LAYERS[layers])
    one, two = Version("1.0", engine), Version("1.1", engine)
    first = serve(cache, one)
    adopted = cache.adopt_epoch(two.identity(), two.probe)
    assert (adopted.fingerprint, adopted.name) == (first.fingerprint, "a model")
    assert adopted.fields["engine_epoch"] == "1.0"
    assert finds(cache, two) == len(CHAT)
    said = read_description(cache.store.description(bytes.fromhex(first.fingerprint or "")))
    assert said is not None
    assert said.epochs == ("1.1",)
    # Each was probed once: the first to be stored, the second to be compared; a listed one is not probed again.
    assert (one.n_probed, two.n_probed) == (1, 1)
    # What the folder says of its last use leaves the list alone, in another process too.
    serve(cache, one)
    root = cache.root
    cache.close()
    with open_cache(root) as again:
        third = Version("1.1", engine)
        assert finds(again, third) == len(CHAT)
        assert third.n_probed == 0
        serve(again, third)
        assert serve(again, Version("1.2", engine)).fingerprint == first.fingerprint
        said = read_description(again.store.description(bytes.fromhex(first.fingerprint or "")))
        assert said is not None
        assert said.epochs == ("1.1", "1.2")


def test_b020_a_version_that_computes_something_else_begins_anew(cache: PrefixCache) -> None:
    first = serve(cache, Version("1.0"))
    other = Version("2.0", FakeEngine(seed=5, layers=LAYERS["rows"]))
    assert finds(cache, other) == 0
    assert serve(cache, other).fingerprint != first.fingerprint
    # A third one that computes as the second does takes the second's.
    third = Version("2.1", other.engine)
    assert finds(cache, third) == len(CHAT)
    assert finds(cache, Version("1.0")) == len(CHAT)


def test_a_namespace_with_nothing_but_its_probe_says_what_changed(cache: PrefixCache) -> None:
    serve(cache, Version("1.0"))
    other = Version("2.0", FakeEngine(seed=5, layers=LAYERS["rows"]))
    space = cache.namespace(cache.adopt_epoch(other.identity(), other.probe))
    assert cache.flush(20)
    match = space.find([*CHAT, 1])
    assert (match.n_tokens, match.reason, match.detail) == (0, Reason.IDENTITY_CHANGED, {"fields": "engine_epoch"})
    serve(cache, other)
    assert space.find([1, 2, 3]).reason is Reason.DIVERGED  # it has something of its own now


@pytest.mark.parametrize(("shift", "same"), [(0.0, True), (0.009, True), (0.02, False)])
@pytest.mark.parametrize("noisy", ["stored", "running"])
def test_equal_is_what_two_chunk_plans_differ_by(cache: PrefixCache, noisy: str, shift: float, same: bool) -> None:
    one = Settled("1.0", noise=0.01 if noisy == "stored" else 0.0)
    two = Settled("1.1", noise=0.01 if noisy == "running" else 0.0, shift=shift)
    first = serve(cache, one)
    assert (cache.adopt_epoch(two.identity(), two.probe).fingerprint == first.fingerprint) is same


def test_b020_only_a_namespace_that_differs_in_the_epoch_alone_is_looked_at(cache: PrefixCache) -> None:
    serve(cache, Version("1.0"), kv_bits=8)
    two = Version("1.1")
    assert cache.adopt_epoch(two.identity(kv_bits=4), two.probe).fields["engine_epoch"] == "1.1"
    assert cache.adopt_epoch(two.identity(kv_bits=8), two.probe).fields["engine_epoch"] == "1.0"


def test_a_version_that_has_a_namespace_keeps_it(cache: PrefixCache) -> None:
    """Also where it has become clear only later that another one computes the same."""
    two = Version("1.1")
    own = two.identity()
    assert cache.namespace(own).save(CHAT, two.engine.state(CHAT)).wait(20)
    serve(cache, Version("1.0"))
    assert cache.adopt_epoch(two.identity(), two.probe).fingerprint == own.fingerprint


def without_probe(cache: PrefixCache) -> None:
    for path in probes(cache):
        path.unlink()


def with_a_damaged_probe(cache: PrefixCache) -> None:
    for path in probes(cache):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def with_a_foreign_description(cache: PrefixCache) -> None:
    for path in cache.root.glob("*/identity.json"):
        path.write_bytes(b'{"identity": {"$": 1}, "epochs": ["1.1"]}')


def probes(cache: PrefixCache) -> list[Path]:
    """The record of the stored probe."""
    return [path for path in on_disk(cache.root).records if b"spread:" in path.read_bytes()]


@pytest.mark.parametrize("spoil", [without_probe, with_a_damaged_probe, with_a_foreign_description])
def test_without_a_probe_that_can_be_read_nothing_is_adopted(
    cache: PrefixCache, spoil: Callable[[PrefixCache], None]
) -> None:
    serve(cache, Version("1.0"))
    assert probes(cache)
    spoil(cache)
    two = Version("1.1")
    assert cache.adopt_epoch(two.identity(), two.probe).fields["engine_epoch"] == "1.1"


def raising() -> Sequence[SequenceState]:
    raise RuntimeError("the engine failed")


@pytest.mark.parametrize(
    "probe",
    [
        raising,
        list,
        lambda: [FakeEngine().state(PROBE_TOKENS)],
        lambda: [FakeEngine().state(range(9))] * 2,
        lambda: [FakeEngine().state(PROBE_TOKENS), FakeEngine(layers=(latent(),)).state(PROBE_TOKENS)],
    ],
    ids=["raises", "none", "one", "too short", "two layouts"],
)
def test_a_probe_that_fails_costs_the_adoption_only(
    cache: PrefixCache, probe: Callable[[], Sequence[SequenceState]]
) -> None:
    serve(cache, Version("1.0"))
    identity = Version("1.1").identity()
    assert cache.adopt_epoch(identity, probe) is identity


def test_identities_without_an_epoch_or_not_yet_known_stay_as_they_are(cache: PrefixCache, tmp_path: Path) -> None:
    plain = Identity({"weights": "w"})
    pending = Identity.from_model(tmp_path / "nothing here", engine_epoch="1")
    for identity in (plain, pending):
        assert cache.adopt_epoch(identity, raising) is identity


def test_probes_are_counted_by_the_limits_and_listed_nowhere(cache: PrefixCache) -> None:
    version = Version("1.0")
    cache.adopt_epoch(version.identity(), version.probe)
    assert cache.flush(20)
    assert cache.entries() == []
    assert [entry.label for entry in cache.store.entries()] == [PROBE_LABEL]
    n_files = len(on_disk(cache.root).records)
    assert cache.stats()["files_used"] == n_files > 0
    assert (cache.stats()["hits"], cache.stats()["misses"]) == (0, {})
    # No prompt of these tokens finds it.
    assert cache.namespace(version.identity()).find([*PROBE_TOKENS, 1]).n_tokens == 0
    assert cache.clear().n_files == n_files


def test_each_load_keeps_the_probe_recent(cache: PrefixCache) -> None:
    """Else it would go long before the update comes for which it is kept."""
    version = Version("1.0")
    cache.adopt_epoch(version.identity(), version.probe)
    assert cache.flush(20)
    space = cache.namespace(version.identity())
    for first in (1000, 2000):
        tokens = range(first, first + 9)
        assert space.save(tokens, version.engine.state(tokens)).wait(20)
    cache.adopt_epoch(version.identity(), version.probe)
    assert cache.flush(20)
    assert version.n_probed == 1
    cache.set_limits(Limits(max_files=1))
    assert len(probes(cache)) == len(on_disk(cache.root).records) == 1


def test_nan_in_a_probe_is_never_equal(cache: PrefixCache) -> None:
    class Broken(Version):
        def probe(self) -> Sequence[SequenceState]:
            bad = np.full((64, 2), np.nan, "<f4")
            return [SequenceState(64, {"k": Rows(bad, 0)})] * 2

    serve(cache, Broken("1.0"))
    identity = Broken("1.1").identity()
    assert cache.adopt_epoch(identity, Broken("1.1").probe) is identity
