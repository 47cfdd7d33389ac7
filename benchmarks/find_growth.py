"""How the cost of a look-up grows with what is stored: find, on an index of 1 thousand to 1 million rows.

    python -m benchmarks.find_growth [--most 1000000] [--json FILE]

The rows are entered straight into the index (no record files: find reads none): half of them are siblings
under one parent, as of many conversations that share a system prompt, the rest are chains of their own. In
each index two prompts are looked up, alternating: one that diverges among the siblings, and one of 131,072
tokens whose every block is stored. Prints the median of many look-ups, and ratios to the smallest index.
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
from rewarm.state.chain import Chain, as_tokens, ordered, root_key
from rewarm.testing.fake_engine import FakeEngine, pair

BLOCK = 256
LONG = 131_072
ROUNDS = 40


def fill(cache: rewarm.PrefixCache, namespace: rewarm.Namespace, n_rows: int, chance: random.Random) -> None:
    """Enter the long prompt's blocks, then siblings and strangers up to `n_rows` rows."""
    layout = FakeEngine(layers=(pair(),)).state([1]).layout()
    fingerprint = namespace.identity.fingerprint_bytes
    assert fingerprint is not None
    root = root_key(BLOCK, fingerprint, layout.digest, b"")
    index = cache.store._root.index
    with index.transaction():
        index.add_layout(fingerprint, layout.digest, encode_layout(layout))
        space = index.namespace_id(fingerprint)
        chain = Chain(root, as_tokens(long_prompt()), BLOCK)
        sql = (
            "INSERT INTO records (key, parent, is_point, tokens, namespace, layout, n, nbytes, used)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, 4096, 1)"
        )
        blocks = chain.blocks()[: max(2, n_rows // 2)]
        for i, key in enumerate(blocks):
            own = ordered(chain.tokens[i * BLOCK : (i + 1) * BLOCK])
            index.execute(sql, (key, chain.parent(i), 0, own, space, layout.digest, (i + 1) * BLOCK))
        for i in range(n_rows - len(blocks)):
            parent = blocks[1] if i % 2 else chance.randbytes(32)
            own = ordered(as_tokens([chance.randrange(50_000) for _ in range(40)]))
            index.execute(sql, (chance.randbytes(32), parent, 1, own, space, layout.digest, 2 * BLOCK + 40))


def long_prompt() -> list[int]:
    """The same 131,072 tokens each time."""
    return [(7919 * i) % 50_000 for i in range(LONG + 1)]


def measure(n_rows: int) -> dict[str, float]:
    """Median seconds of each look-up in an index of `n_rows` rows."""
    chance = random.Random(n_rows)
    with tempfile.TemporaryDirectory() as folder:
        limits = rewarm.Limits(max_bytes=2**50, max_files=2**40, min_free_bytes=0)
        cache = rewarm.open(Path(folder) / "kv", limits=limits, block_tokens=BLOCK)
        namespace = cache.namespace(rewarm.Identity({"weights": "benchmark"}))
        fill(cache, namespace, n_rows, chance)
        long = as_tokens(long_prompt())
        shared = as_tokens(long_prompt()[: 2 * BLOCK])
        took: dict[str, list[float]] = {"sibling_s": [], "long_s": []}
        for _ in range(ROUNDS):
            prompt = [*shared.tolist(), *(chance.randrange(50_000) for _ in range(60))]
            for name, tokens in (("sibling_s", as_tokens(prompt)), ("long_s", long)):
                began = time.perf_counter()
                namespace.look(tokens)
                took[name].append(time.perf_counter() - began)
        cache.close()
    return {name: statistics.median(values) for name, values in took.items()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--most", type=int, default=1_000_000, help="rows of the largest index")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    sizes = [n for n in (1_000, 10_000, 100_000, 1_000_000) if n <= arguments.most]
    results = {n: measure(n) for n in sizes}
    for n, result in results.items():
        first = results[sizes[0]]
        line = ", ".join(f"{k[:-2]} {1e3 * v:.2f} ms ({v / first[k]:.2f}x)" for k, v in result.items())
        print(f"{n:>9,} rows: {line}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "median": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
