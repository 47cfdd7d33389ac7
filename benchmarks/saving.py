"""Saving, against one copy of the new rows and against plain writing of as many bytes."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import rewarm
from benchmarks.restoring import PIECE, UNBOUNDED
from benchmarks.rounds import Result, timed
from benchmarks.states import SHAPES, state_of, tokens_of
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


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one round.

    Attributes:
        save_s: until `save` has returned, which has copied what is new.
        copy_s: of one copy of it.
        committed_s: until everything of a state that was given is written.
        write_s: of plain writing of as many bytes.
    """

    save_s: float
    copy_s: float
    committed_s: float
    write_s: float


def one_round(cache: rewarm.PrefixCache, case: tuple[str, int, int], state: SequenceState, number: int) -> Round:
    """Save one conversation's turn twice, under other tokens: once copied, once given."""
    name, old, new = case
    space = cache.namespace(rewarm.Identity({"weights": name}))
    copied, given = (tokens_of(old + new, 2 * number + each) for each in (0, 1))
    if old:
        for tokens in (copied, given):
            space.save(tokens[:old], cut(state, old))
            cache.flush(600)
    rows = new_rows(state, old)
    copies: list[np.ndarray] = []
    reports: list[rewarm.SaveReport] = []
    plain = cache.root / f"plain-{number}"

    def give() -> None:
        reports.append(space.save(given, state, give=True))
        cache.flush(600)

    actions = {
        "save_s": lambda: reports.append(space.save(copied, state)),
        "copy_s": lambda: copies.extend(np.array(array, order="C") for array in rows),
        "committed_s": give,
        "write_s": lambda: write_plainly(plain, [array.reshape(-1).view(np.uint8).data for array in copies]),
    }
    order = (
        ("save_s", "copy_s", "committed_s", "write_s") if number % 2 else ("copy_s", "save_s", "write_s", "committed_s")
    )
    took = {}
    for key in order:
        took[key] = timed(actions[key])
        cache.flush(600)
    plain.unlink()
    if any(report.reason is not None for report in reports):
        raise RuntimeError(f"the state is not saved: {[report.reason for report in reports]}")
    return Round(**took)


def against_copy_and_write(folder: Path, rounds: int, cases: tuple[tuple[str, int, int], ...]) -> list[Result]:
    """A turn of a conversation, and a prompt that is all new."""
    results = []
    for case in cases:
        name, old, new = case
        root = folder / f"save-{name}-{old}-{new}"
        state = state_of(SHAPES[name], old + new)
        with rewarm.open(root, limits=UNBOUNDED) as cache:
            # The first round touches memory that the machine has not backed yet.
            took = [one_round(cache, case, state, i) for i in range(rounds + 1)][1:]
        shutil.rmtree(root)
        nbytes = sum(array.nbytes for array in new_rows(state, old))
        what = f"save, {name}, {new:,} tokens after {old:,}, {nbytes / 2**20:,.0f} MiB"
        results += [
            Result(
                f"{what}, until the caller goes on",
                "one copy of the new rows",
                [each.copy_s / each.save_s for each in took],
                at_least=0.8,
                shown={"rounds": [asdict(each) for each in took], "nbytes": nbytes},
            ),
            Result(
                f"{what}, given, until committed",
                "pwrite of as many bytes",
                [each.write_s / each.committed_s for each in took],
                at_least=0.8,
            ),
        ]
    return results
