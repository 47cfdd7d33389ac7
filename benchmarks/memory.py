"""Peak memory of restoring a large state, beyond the state itself: measured in a process of its own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import rewarm
from benchmarks.restoring import UNBOUNDED, restore, stored
from benchmarks.rounds import Result

ALLOWED_MIB = 64


def peak_beyond_the_state(folder: Path, name: str, n_tokens: int) -> Result:
    """MiB beyond the state, against 64 MiB and one block for each reading thread."""
    with stored(folder, name, n_tokens) as (space, _, sizes):
        block_mib = sum(sizes) / n_tokens * 256 / 2**20
        root = space._store.root
        command = [sys.executable, "-m", "benchmarks.memory", str(root), name, str(n_tokens)]
        said = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - ourselves
    figures = json.loads(said.stdout)
    beyond = figures["peak_mib"] - figures["before_mib"] - sum(sizes) / 2**20
    allowed = ALLOWED_MIB + 2 * block_mib
    return Result(
        f"peak memory beyond the state, restoring {sum(sizes) / 2**30:.1f} GiB",
        f"{ALLOWED_MIB} MiB plus one block of {block_mib:.0f} MiB for each of 2 readers",
        [beyond / allowed],
        at_most=1.0,
        shown={**figures, "beyond_mib": beyond},
    )


def main() -> None:
    """In the process of its own: restore, and say what memory it took."""
    root, name, n_tokens = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    with rewarm.open(root, limits=UNBOUNDED) as cache:
        space = cache.namespace(rewarm.Identity({"weights": name}))
        before = _peak_mib()
        state = restore(space, n_tokens)
        print(json.dumps({"before_mib": before, "peak_mib": _peak_mib(), "n_tokens": state.n_tokens}))


def _peak_mib() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        # What `getrusage` says on Linux begins with the peak of the process that started this one.
        line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
