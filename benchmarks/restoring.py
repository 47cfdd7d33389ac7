"""Restoring, against the disk's own limit and against other ways of keeping the same arrays."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import rewarm
from benchmarks.rounds import Result, alternate, cold, ratios
from benchmarks.states import SHAPES, state_of, tokens_of

PIECE = 8 * 2**20
"""Bytes that plain reading asks for at once."""

UNBOUNDED = rewarm.Limits(max_bytes=2**50, max_files=2**40, min_free_bytes=0)

CASES = (("7b", 1024), ("7b", 8192), ("7b", 32768), ("32b", 8192), ("mla", 32768), ("window", 8192), ("hybrid", 8192))
QUICK = (("7b", 2048), ("window", 2048), ("hybrid", 2048))


@contextlib.contextmanager
def stored(folder: Path, name: str, n_tokens: int) -> Iterator[tuple[rewarm.Namespace, Path, list[int]]]:
    """A cache that holds a state, a plain file of as many bytes beside it, and the sizes of its arrays in bytes."""
    root = folder / f"{name}-{n_tokens}"
    cache = rewarm.open(root, limits=UNBOUNDED)
    space = cache.namespace(rewarm.Identity({"weights": name}))
    state = state_of(SHAPES[name], n_tokens)
    sizes = [tensor.array.nbytes for tensor in state.tensors.values()]
    save_whole(cache, space, tokens_of(n_tokens), state)
    plain = root / "plain"
    with plain.open("wb") as file:
        for tensor in state.tensors.values():
            file.write(tensor.array.reshape(-1).view(np.uint8).data)
    del state
    try:
        yield space, plain, sizes
    finally:
        cache.close()
        shutil.rmtree(root)


def save_whole(cache: rewarm.PrefixCache, space: rewarm.Namespace, tokens: list[int], state: Any) -> None:
    """Save a state that may be larger than the queue."""
    for _ in range(1000):
        report = space.save(tokens, state)
        if not cache.flush(600):
            raise RuntimeError("the disk does not take the state")
        if report.reason is None:
            return
    raise RuntimeError(f"the state is not saved: {report.reason}")


def read_plainly(path: Path, sizes: list[int]) -> list[np.ndarray]:
    """The file in new buffers, as many and as large as the state's arrays, read from its beginning to its end.

    One buffer for all would be no fairer: how the system backs memory depends on how much is asked for at once.
    """
    buffers, at = [np.empty(size, np.uint8) for size in sizes], 0
    fd = os.open(path, os.O_RDONLY)
    try:
        for buffer in buffers:
            view, done = memoryview(buffer), 0
            while done < len(view):
                done += os.preadv(fd, [view[done : done + PIECE]], at + done)
            at += done
    finally:
        os.close(fd)
    return buffers


def read_and_copy(path: Path, sizes: list[int]) -> list[np.ndarray]:
    """The same, and each buffer copied to another one."""
    read = read_plainly(path, sizes)
    return [*read, *(np.array(buffer) for buffer in read)]


def restore(space: rewarm.Namespace, n_tokens: int) -> Any:
    """Find and restore; all of it must come.

    Raises:
        RuntimeError: it did not.
    """
    state = space.restore(space.find(tokens_of(n_tokens + 1)))
    if state.n_tokens != n_tokens:
        raise RuntimeError(f"{state.n_tokens} of {n_tokens} tokens were restored: {state.reason}")
    return state


def against_the_disk(folder: Path, rounds: int, cases: tuple[tuple[str, int], ...]) -> list[Result]:
    """Cold against plain reading, and warm against plain reading plus a copy."""
    results = []
    for name, n_tokens in cases:
        with stored(folder, name, n_tokens) as (space, plain, sizes):
            nbytes = sum(sizes)
            what = f"restore, {name}, {n_tokens:,} tokens, {nbytes / 2**20:,.0f} MiB"
            for is_cold in (True, False):
                plainly = read_plainly if is_cold else read_and_copy
                ours, theirs = alternate(
                    partial(restore, space, n_tokens),
                    partial(plainly, plain, sizes),
                    rounds,
                    cold if is_cold else None,
                )
                results.append(
                    Result(
                        f"{what}, {'cold' if is_cold else 'warm'} page cache",
                        "sequential preadv" if is_cold else "preadv plus one copy",
                        ratios(ours, theirs),
                        at_least=0.95 if is_cold else 0.8,
                        shown={"ours_s": ours, "theirs_s": theirs, "nbytes": nbytes, "n_tokens": n_tokens},
                    )
                )
    return results
