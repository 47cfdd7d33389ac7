"""How costs grow with what is stored: opening a root, finding, saving, evicting."""

from __future__ import annotations

import random
import shutil
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np

import rewarm
from benchmarks.find_growth import BLOCK, fill, long_prompt
from benchmarks.restoring import UNBOUNDED
from benchmarks.rounds import Result, timed
from rewarm.state.chain import as_tokens
from rewarm.state.sequence import Rows, SequenceState

PREFILL_TOKENS_PER_S = 1000
FILES_BLOCK = 4
"""Tokens per block of roots with many files, so that files are small and many."""


def files_root(folder: Path, n_records: int) -> Path:
    """A root with so many records, each a file of its own: conversations of a hundred blocks."""
    root = folder / f"files-{n_records}"
    with rewarm.open(root, limits=UNBOUNDED, block_tokens=FILES_BLOCK) as cache:
        space = cache.namespace(rewarm.Identity({"weights": "growth"}))
        for i in range(n_conversations(n_records)):
            n_tokens = 100 * FILES_BLOCK
            space.save(conversation(i), SequenceState(n_tokens, {"x": Rows(np.ones((n_tokens, 8), "<f4"), 0)}))
            if cache.stats()["queue_bytes"] > 2**26:  # type: ignore[operator]
                cache.flush(600)
        cache.flush(600)
    return root


def n_conversations(n_records: int) -> int:
    """How many conversations have so many records: fifty of their own each, and fifty for every hundred of them."""
    return max(1, n_records * 2 // 101)


def conversation(i: int, n_tokens: int = 100 * FILES_BLOCK) -> np.ndarray:
    """The tokens of conversation `i`: half a system prompt that a hundred of them share, half their own."""
    half = n_tokens // 2
    shared = np.arange(half) * 31 + 1_000_003 * (i // 100)
    return np.concatenate([shared, np.arange(n_tokens - half) * 17 + 7919 * i + 5]) % 2**31


def opening(root: Path, rounds: int) -> list[float]:
    """Seconds to open a root and close it again."""
    took = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        cache = rewarm.open(root)
        took.append(time.perf_counter() - began)
        cache.close()
    return took[1:]


def save_and_wait(cache: rewarm.PrefixCache, tokens: np.ndarray, state: SequenceState) -> None:
    """Save, and wait until it is written."""
    cache.namespace(rewarm.Identity({"weights": "growth"})).save(tokens, state)
    cache.flush(60)


def working(root: Path, n_records: int, rounds: int) -> dict[str, list[float]]:
    """Seconds to find, to save a turn until it is written, and to evict it again."""
    took: dict[str, list[float]] = {"find_s": [], "save_s": [], "evict_s": []}
    with rewarm.open(root) as cache:
        space = cache.namespace(rewarm.Identity({"weights": "growth"}))
        for i in range(rounds):
            tokens = conversation(i * 37 % n_conversations(n_records))
            prompt = [*tokens.tolist(), 1]
            took["find_s"].append(timed(partial(space.find, prompt)))
            if space.find(prompt).n_tokens != len(tokens):
                raise RuntimeError("a conversation is not found")
        for i in range(rounds):
            new = np.concatenate([conversation(10**6 + i), np.arange(40)])
            state = SequenceState(len(new), {"x": Rows(np.ones((len(new), 8), "<f4"), 0)})
            took["save_s"].append(timed(partial(save_and_wait, cache, new, state)))
        for _ in range(rounds):
            files = cache.stats()["files_used"]
            assert isinstance(files, int)
            fewer = rewarm.Limits(max_files=files - 50)
            took["evict_s"].append(timed(partial(cache.set_limits, fewer)))
    return took


def with_files(folder: Path, rounds: int, sizes: tuple[int, ...]) -> list[Result]:
    """From a thousand records to a hundred thousand, each a file."""
    figures: dict[int, dict[str, list[float]]] = {}
    for n_records in sizes:
        root = files_root(folder, n_records)
        figures[n_records] = {"open_s": opening(root, rounds), **working(root, n_records, rounds)}
        shutil.rmtree(root)
    least, most = sizes[0], sizes[-1]
    results = []
    for what in ("open_s", "find_s", "save_s", "evict_s"):
        base = statistics.median(figures[least][what])
        results.append(
            Result(
                f"{what[:-2]} with {most:,} records",
                f"with {least:,}",
                [each / base for each in figures[most][what]],
                at_most=2.0 if what == "open_s" else None,
                shown={str(n): statistics.median(found[what]) for n, found in figures.items()},
            )
        )
    return results


def with_rows(folder: Path, rounds: int, sizes: tuple[int, ...]) -> list[Result]:
    """From a thousand index rows to a million: open, and find for a prompt of 131,072 tokens."""
    open_s: dict[int, list[float]] = {}
    find_s: dict[int, list[float]] = {}
    for n_rows in sizes:
        root = folder / f"rows-{n_rows}"
        with rewarm.open(root, limits=UNBOUNDED, block_tokens=BLOCK) as cache:
            space = cache.namespace(rewarm.Identity({"weights": "benchmark"}))
            fill(cache, space, n_rows, random.Random(n_rows))
            tokens = as_tokens(long_prompt())
            find_s[n_rows] = []
            for _ in range(rounds + 1):
                began = time.perf_counter()
                found = space.find(tokens)
                find_s[n_rows].append(time.perf_counter() - began)
        if found.n_tokens != min(n_rows // 2, len(tokens) // BLOCK) * BLOCK:
            raise RuntimeError(f"{found.n_tokens} tokens were found among {n_rows} rows")
        open_s[n_rows] = opening(root, rounds)
        shutil.rmtree(root)
    least, most = sizes[0], sizes[-1]
    base = statistics.median(open_s[least])
    prefill_s = len(tokens) / PREFILL_TOKENS_PER_S
    return [
        Result(
            f"open with {most:,} index rows",
            f"with {least:,}",
            [each / base for each in open_s[most]],
            at_most=2.0,
            shown={str(n): statistics.median(values) for n, values in open_s.items()},
        ),
        Result(
            f"find for {len(tokens):,} tokens among {most:,} index rows",
            f"the prefill that it saves at {PREFILL_TOKENS_PER_S:,} tokens/s, in %",
            [100 * each / prefill_s for each in find_s[most][1:]],
            at_most=0.02,
            unit="%",
            shown={str(n): statistics.median(values[1:]) for n, values in find_s.items()},
        ),
    ]
