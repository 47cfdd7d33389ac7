"""Saving, against one copy of the new rows and against plain writing of as many bytes."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

import rewarm
from benchmarks.restoring import PIECE, UNBOUNDED
from benchmarks.rounds import Result, ratios, timed
from benchmarks.states import SHAPES, Filler, nbytes_of, state_of, tokens_of
from rewarm.state.sequence import Rows, SequenceState

CASES = (("7b", 8192, 512), ("7b", 0, 4096), ("32b", 4096, 256), ("mla", 8192, 2048))
QUICK = (("7b", 2048, 512), ("mla", 0, 4096))
"""Shape, tokens that are stored already, new tokens."""


def write_plainly(path: Path, pieces: list[memoryview]) -> None:
    """A new file, written from its beginning to its end."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    done = 0
    try:
        for piece in pieces:
            for start in range(0, len(piece), PIECE):
                done += os.pwrite(fd, piece[start : start + PIECE], done)
    finally:
        os.close(fd)


def cut(state: SequenceState, n_tokens: int) -> SequenceState:
    """The first tokens of a state of rows alone, as views."""
    tensors = {}
    for name, tensor in state.tensors.items():
        assert isinstance(tensor, Rows)
        lead = (slice(None),) * tensor.axis
        tensors[name] = replace(tensor, array=tensor.array[(*lead, slice(0, n_tokens))])
    return SequenceState(n_tokens, tensors)


def new_rows(state: SequenceState, first: int) -> list[np.ndarray]:
    """Views of the rows from `first` on."""
    return [t.array[(*(slice(None),) * t.axis, slice(first, None))] for t in state.tensors.values()]  # type: ignore[union-attr]


def against_copy_and_write(folder: Path, rounds: int, cases: tuple[tuple[str, int, int], ...]) -> list[Result]:
    """A turn of a conversation, and a prompt that is all new."""
    results = []
    for name, old, new in cases:
        state = state_of(SHAPES[name], old + new)
        rows = new_rows(state, old)
        took: dict[str, list[float]] = {key: [] for key in ("save_s", "copy_s", "committed_s", "write_s")}
        for i in range(rounds + 1):
            root = folder / f"save-{i}"
            cache = rewarm.open(root, limits=UNBOUNDED)
            space = cache.namespace(rewarm.Identity({"weights": name}))
            if old:
                space.save(tokens_of(old), cut(state, old))
                cache.flush(600)
            tokens = tokens_of(old + new)
            copied: list[np.ndarray] = []

            def save_and_wait() -> None:
                reports.append(space.save(tokens, state))  # noqa: B023 - called at once
                began.append(timed(lambda: cache.flush(600)))  # noqa: B023

            def copy() -> None:
                copied.extend(np.array(array, order="C") for array in rows)  # noqa: B023

            reports: list[rewarm.cache.jobs.SaveReport] = []
            began: list[float] = []
            copy_s = timed(copy) if i % 2 else 0.0
            whole_s = timed(save_and_wait)
            copy_s = copy_s or timed(copy)
            if reports[0].reason is not None:
                raise RuntimeError(f"the state is not saved: {reports[0].reason}")
            pieces = [array.reshape(-1).view(np.uint8).data for array in copied]
            write_s = timed(lambda: write_plainly(root / "plain", pieces))  # noqa: B023
            cache.close()
            shutil.rmtree(root)
            if i:
                for key, seconds in zip(took, (whole_s - began[0], copy_s, whole_s, write_s), strict=True):
                    took[key].append(seconds)
            del copied, pieces
        nbytes = sum(array.nbytes for array in rows)
        what = f"save, {name}, {new:,} tokens after {old:,}, {nbytes / 2**20:,.0f} MiB"
        results += [
            Result(
                f"{what}, until the caller goes on",
                "one copy of the new rows",
                ratios(took["save_s"], took["copy_s"]),
                at_least=0.8,
                shown=took,
            ),
            Result(
                f"{what}, until committed",
                "pwrite of as many bytes",
                ratios(took["committed_s"], took["write_s"]),
                at_least=0.8,
            ),
        ]
    return results
