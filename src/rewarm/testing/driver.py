"""Drives a real cache beside the perfect model, and checks every restored state bit for bit.

What tests of the store, the cache and its faults share. It looks at the folder itself, not at what the
cache says about it, when it counts files and bytes or looks for holes in chains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewarm.cache.identity import Identity
from rewarm.cache.jobs import SaveReport
from rewarm.cache.namespace import Match, Namespace
from rewarm.cache.policy import Policy
from rewarm.cache.prefix_cache import PrefixCache, open_cache
from rewarm.format.record import PRELUDE, Header, read_header, read_prelude, round_up
from rewarm.state.sequence import SequenceState
from rewarm.store.disk import Disk
from rewarm.store.settings import Limits
from rewarm.testing.fake_engine import FakeEngine
from rewarm.testing.perfect import PerfectCache

ROOMY = Limits(max_bytes=2**40, max_files=10**6, min_free_bytes=0)
"""Limits that no test meets."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """What lies under a root, counted file by file.

    Attributes:
        n_files: records, temporaries and quarantine.
        nbytes: these plus index and log, each rounded up to 4 KiB.
        records: paths of the records.
        leftovers: temporaries (lock files of living processes apart).
    """

    n_files: int
    nbytes: int
    records: tuple[Path, ...]
    leftovers: tuple[str, ...]


def on_disk(root: Path) -> OnDisk:
    """Count the files under `root`."""
    records = sorted(path for kind in ("block", "point") for path in root.glob(f"{'?' * 64}/??/*.{kind}"))
    temporaries = [path for path in (root / "tmp").iterdir() if path.suffix != ".lock"]
    quarantine = list((root / "quarantine").iterdir()) if (root / "quarantine").is_dir() else []
    counted = [*records, *temporaries, *quarantine]
    index = [path for path in root.iterdir() if path.name.startswith("index.db")]
    nbytes = sum(round_up(path.stat().st_size) for path in [*counted, *index])
    return OnDisk(len(counted), nbytes, tuple(records), tuple(path.name for path in temporaries))


def header_of(path: Path) -> Header:
    """The header of a record file, checked."""
    data = path.read_bytes()
    prelude = read_prelude(data[: PRELUDE.size], len(data))
    return read_header(data[: prelude.payload_at], prelude)


def holes(root: Path) -> list[str]:
    """Records that hang from a block, or run behind a point, that is not there."""
    headers = [header_of(path) for path in on_disk(root).records]
    keys = {header.key for header in headers}
    found = []
    for header in headers:
        if header.first and header.parent not in keys:
            found.append(f"{header.kind} at {header.n} hangs from nothing")
        if header.after is not None and header.after not in keys:
            found.append(f"point at {header.n} runs behind nothing")
    return found


@dataclass
class Driver:
    """A cache, the engines whose states it keeps, and the perfect model of it.

    Attributes:
        root: the cache folder.
        engine: computes and checks states; `owner` chooses its seed.
        block_tokens: tokens per block of a new root.
        limits: of a new root.
        disk: the file operations, or None for the real ones.
        policy: of a new root.
        perfect: everything that was saved.
        lossy: whether something may be missing, so that the perfect model is an upper bound.
    """

    root: Path
    engine: FakeEngine = field(default_factory=FakeEngine)
    block_tokens: int = 4
    limits: Limits = ROOMY
    disk: Disk | None = None
    clock: Callable[[], float] = time.time
    policy: Policy = field(default_factory=lambda: Policy(thin=False))  # the perfect model keeps every point
    perfect: PerfectCache = field(default_factory=PerfectCache)
    lossy: bool = False

    def __post_init__(self) -> None:
        """Open the cache."""
        self.open()

    def open(self) -> None:
        """Open the cache, as a new process would."""
        limits = None if (self.root / "store.json").exists() else self.limits
        self.cache: PrefixCache = open_cache(
            self.root, limits, self.policy, self.block_tokens, disk=self.disk, clock=self.clock
        )
        self._namespaces: dict[Any, Namespace] = {}

    def close(self) -> None:
        """Close the cache, with everything written."""
        assert self.cache.close().unwritten == 0

    def reopen(self) -> None:
        """Close and open."""
        self.close()
        self.open()

    def engine_of(self, owner: tuple[int, bytes]) -> FakeEngine:
        """The engine of a model: `owner` is its seed and a tenant."""
        return FakeEngine(owner[0], self.engine.layers, self.engine.quantise_from, self.engine.quantised)

    def namespace(self, owner: tuple[int, bytes] = (0, b"")) -> Namespace:
        """The namespace of a model and a tenant."""
        if owner not in self._namespaces:
            identity = Identity({"fake engine": owner[0]}, name="fake")
            self._namespaces[owner] = self.cache.namespace(identity, owner[1])
        return self._namespaces[owner]

    def save(
        self,
        tokens: Sequence[int],
        boundary: str = "assistant",
        label: str | None = None,
        owner: tuple[int, bytes] = (0, b""),
    ) -> SaveReport:
        """Save the state after `tokens`."""
        state = self.engine_of(owner).state(tokens)
        report = self.namespace(owner).save(tokens, state, boundary, label)
        if len(tokens):
            self.perfect.save(owner, tokens, state)
        return report

    def flush(self) -> None:
        """Have everything written."""
        assert self.cache.flush(60.0)

    def find(self, prompt: Sequence[int], at_most: int | None = None, owner: tuple[int, bytes] = (0, b"")) -> Match:
        """Find `prompt`, and hold the match against the perfect model."""
        match = self.namespace(owner).find(prompt, at_most)
        best = self.perfect.restorable(owner, prompt, at_most)
        assert match.n_tokens <= best, f"{match.n_tokens} tokens found of {best} that were saved"
        if not self.lossy:
            assert match.n_tokens == best, f"{match.n_tokens} tokens found of {best} that were saved: {match.reason}"
        return match

    def restore(
        self, prompt: Sequence[int], at_most: int | None = None, owner: tuple[int, bytes] = (0, b"")
    ) -> SequenceState:
        """Find and restore `prompt`; the state is checked bit for bit."""
        match = self.find(prompt, at_most, owner)
        state = self.namespace(owner).restore(match)
        assert state.n_tokens <= match.n_tokens
        if not self.lossy:
            assert state.n_tokens == match.n_tokens, f"{state.n_tokens} of {match.n_tokens}: {state.reason}"
        self.engine_of(owner).check(state, prompt)
        for name, tensor in state.tensors.items():
            array = tensor.array
            assert array.flags.writeable and array.flags.c_contiguous and array.base is None, name
        return state

    def assert_in_order(self) -> None:
        """After a flush: index, files and limits agree, and no chain has a hole."""
        self.flush()
        report = self.cache.verify()
        assert report.is_clean, report
        found = on_disk(self.root)
        assert not found.leftovers
        assert holes(self.root) == []
        stats = self.cache.stats()
        assert stats["files_used"] == found.n_files
        limits = self.cache.settings().limits
        assert found.n_files <= (limits.max_files or 0)
        assert found.nbytes <= (limits.max_bytes or 0)
