"""How long a list of all entries takes: 100 to 10,000 conversations, which share system prompts.

    python -m benchmarks.entries_growth [--json FILE]

Rows and entries are entered straight into the index (no record files: a list reads none). Of each number of
entries there are two roots: conversations of one block, and of eight. Prints the median of some lists.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import rewarm
from benchmarks.rounds import machine
from rewarm.format.layouts import encode_layout
from rewarm.state.chain import as_tokens, ordered
from rewarm.testing.fake_engine import FakeEngine, pair

BLOCK = 256
SYSTEM_BLOCKS = 4
ROUNDS = 7


class Rows:
    """Enters records and entries into one root's index."""

    def __init__(self, cache: rewarm.PrefixCache, chance: random.Random) -> None:
        layout = FakeEngine(layers=(pair(),)).state([1]).layout()
        fingerprint = rewarm.Identity({"weights": "benchmark"}).fingerprint_bytes
        assert fingerprint is not None
        self.index, self._chance = cache.store._root.index, chance
        self.index.add_layout(fingerprint, layout.digest, encode_layout(layout))
        self._space, self._layout = self.index.namespace_id(fingerprint), layout.digest

    def record(self, parent: bytes, n: int, *, is_point: bool) -> bytes:
        """Enter one; its key."""
        key = self._chance.randbytes(32)
        own = ordered(as_tokens([self._chance.randrange(50_000) for _ in range(40 if is_point else BLOCK)]))
        self.index.execute(
            "INSERT INTO records (key, parent, is_point, tokens, namespace, layout, n, nbytes, used)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, 4096, 1)",
            (key, parent, is_point, own, self._space, self._layout, n),
        )
        return key

    def entry(self, end: bytes, parent: bytes, n: int) -> None:
        """Enter one."""
        self.index.execute(
            'INSERT INTO entries (id, namespace, layout, "end", parent, tail, n, label, boundary, created_s, matched_s)'
            " VALUES (?, ?, ?, ?, ?, x'', ?, NULL, 'assistant', ?, ?)",
            (self._chance.randbytes(16), self._space, self._layout, end, parent, n, n, n),
        )


def fill(cache: rewarm.PrefixCache, n_entries: int, n_blocks: int, chance: random.Random) -> None:
    """Conversations of `n_blocks` blocks and a point, behind one of ten system prompts."""
    rows = Rows(cache, chance)
    with rows.index.transaction():
        systems = []
        for _ in range(10):
            key = chance.randbytes(32)
            for i in range(SYSTEM_BLOCKS):
                key = rows.record(key, (i + 1) * BLOCK, is_point=False)
            systems.append(key)
        for _ in range(n_entries):
            key = chance.choice(systems)
            for i in range(n_blocks):
                key = rows.record(key, (SYSTEM_BLOCKS + i + 1) * BLOCK, is_point=False)
            n = (SYSTEM_BLOCKS + n_blocks) * BLOCK + 40
            rows.entry(rows.record(key, n, is_point=True), key, n)


def measure(n_entries: int, n_blocks: int) -> dict[str, float]:
    """Median seconds of one list."""
    with tempfile.TemporaryDirectory() as folder:
        limits = rewarm.Limits(max_bytes=2**50, max_files=2**40, min_free_bytes=0)
        with rewarm.open(Path(folder) / "kv", limits=limits) as cache:
            fill(cache, n_entries, n_blocks, random.Random(n_entries))
            took = []
            for _ in range(ROUNDS):
                cache.store._listed = None
                began = time.perf_counter()
                assert len(cache.entries()) == n_entries
                took.append(time.perf_counter() - began)
    return {"n_entries": n_entries, "n_blocks": n_blocks, "median_s": statistics.median(took)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    results = [measure(n, blocks) for n in (100, 1_000, 10_000) for blocks in (1, 8)]
    for found in results:
        print(f"{found['n_entries']:>6,} entries of {found['n_blocks']} blocks: {1e3 * found['median_s']:.1f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "lists": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
