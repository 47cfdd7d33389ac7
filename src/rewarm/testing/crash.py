"""Processes that save and evict and are killed while they do.

`python -m rewarm.testing.crash` is the prepared parent: it imports everything once, reads jobs from its
input, one JSON object a line, forks a child for each, kills it when the job says so, and prints what the
child had confirmed by then. So a kill costs a fork, not an interpreter. Needs `os.fork`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rewarm.store import commit
from rewarm.store.settings import Limits
from rewarm.testing.driver import ROOMY, Driver
from rewarm.testing.fake_engine import FakeEngine, Layer, pair, recurrent, window
from rewarm.testing.faults import Fault, FaultyDisk

LAYERS: dict[str, tuple[Layer, ...]] = {
    "rows": (pair(),),
    "window": (pair(1, 2), window(6, 1)),
    "hybrid": (pair(1, 2), recurrent()),
}
BLOCK_TOKENS = 4


@dataclass(frozen=True)
class Job:
    """What a child does, and when it dies.

    Attributes:
        root: the cache folder.
        kind: a key of `LAYERS`.
        seed: of the conversations.
        n_turns: saves, each one flushed and confirmed.
        max_files: the root's limit; None for one that is not met.
        kill_after_s: SIGKILL so long after the fork.
        kill_at: SIGKILL before the file operation of this number.
        kill_in: the operation that `kill_at` counts; None for any.
        forget: the latest entry is forgotten at the end.
        helped: records are written by two threads, however small they are.
    """

    root: str
    kind: str = "rows"
    seed: int = 0
    n_turns: int = 8
    max_files: int | None = None
    kill_after_s: float | None = None
    kill_at: int | None = None
    kill_in: str | None = None
    forget: bool = False
    helped: bool = False

    def engine(self) -> FakeEngine:
        """The engine whose states are saved."""
        return FakeEngine(layers=LAYERS[self.kind])

    def limits(self) -> Limits:
        """The root's limits."""
        return Limits(max_bytes=ROOMY.max_bytes, max_files=self.max_files or 10**6, min_free_bytes=0)

    def turns(self) -> list[list[int]]:
        """The token sequences that are saved, in order: conversations that go on and branch."""
        chance = random.Random(self.seed)  # noqa: S311  # not for secrets
        saved: list[list[int]] = []
        for turn in range(self.n_turns):
            start = chance.choice(saved[-3:]) if saved and chance.random() < 0.8 else []
            if len(start) > 25:  # so that every conversation fits the smallest limits
                start = []
            keep = len(start) if chance.random() < 0.7 else chance.randint(0, len(start))
            saved.append([*start[:keep], turn, *(chance.randint(0, 9) for _ in range(chance.randint(0, 9)))])
        return saved


@dataclass(frozen=True)
class Outcome:
    """What became of a child.

    Attributes:
        confirmed: how many turns a flush had confirmed, and the forgetting after them.
        n_operations: file operations of a child that lived to its end, else 0.
        killed: whether SIGKILL ended it.
        status: its exit status else.
        took_s: from fork to end.
    """

    confirmed: int
    n_operations: int
    killed: bool
    status: int
    took_s: float


def _work(job: Job, out: int) -> None:
    """The child: save every turn; a byte on `out` for each that flush has confirmed."""
    disk = FaultyDisk()
    if job.helped:
        commit.WORTH_A_HELPER_NBYTES = 0  # of this process, which was forked for the job
    if job.kill_at is not None:
        disk.plant(Fault(job.kill_in, "kill", after=job.kill_at))
    driver = Driver(Path(job.root), job.engine(), BLOCK_TOKENS, job.limits(), disk, lossy=job.max_files is not None)
    for tokens in job.turns():
        report = driver.save(tokens)
        if not driver.cache.flush(30.0) or report.reason is not None:
            os._exit(3)
        os.write(out, b".")
        driver.restore([*tokens, 1])
    if job.forget:
        driver.cache.forget(driver.cache.entries()[0])
        os.write(out, b".")
    driver.close()
    os.write(out, f" {sum(disk.counts.values())}".encode())


def _fork(job: Job) -> Outcome:
    reader, writer = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        status = 4
        try:
            os.close(reader)
            _work(job, writer)
            status = 0
        finally:
            # Nothing of the parent's must run here: no exit handlers, no second answer.
            os._exit(status)
    os.close(writer)
    if job.kill_after_s is not None:
        time.sleep(job.kill_after_s)
        os.kill(child, signal.SIGKILL)
    told = b""
    while data := os.read(reader, 4096):
        told += data
    os.close(reader)
    _, status = os.waitpid(child, 0)
    dots, _, n_operations = told.partition(b" ")
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    code = 0 if killed else os.waitstatus_to_exitcode(status)
    return Outcome(len(dots), int(n_operations or 0), killed, code, time.monotonic() - start)


class Parent:
    """The prepared parent, in a process of its own."""

    def __init__(self) -> None:
        # One thread only: it forks.
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "rewarm.testing.crash"]
        self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, job: Job) -> Outcome:
        """Have a child do `job`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the parent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@contextmanager
def parent() -> Iterator[Parent]:
    """A prepared parent, ended afterwards."""
    made = Parent()
    try:
        yield made
    finally:
        made.close()


def main() -> None:
    """Answer jobs until the input ends."""
    for line in sys.stdin:
        outcome = _fork(Job(**json.loads(line)))
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
