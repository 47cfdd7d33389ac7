"""rewarm, other formats and the disk's own limit, on the same data in the same run: `make bench`.

    python -m benchmarks [--check] [--quick] [--only NAME ...] [--rounds N] [--dir DIR] [--out DIR]

Prints ratios: the median of several rounds, and the least and the most. With `--check`, ends with exit status 1
when one that is asked for is not reached. What each figure means: docs/performance.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import formats, growth, memory, report, restoring, saving, turns
from benchmarks.rounds import Result, can_be_cold, machine

Group = Callable[[Path, int, bool], list[Result]]

GROUPS: dict[str, Group] = {
    "restore": lambda folder, rounds, quick: restoring.against_the_disk(
        folder, rounds, restoring.QUICK if quick else restoring.CASES
    ),
    "formats": lambda folder, rounds, quick: formats.against_formats(folder, rounds, "7b", 1024 if quick else 4096),
    "save": lambda folder, rounds, quick: saving.against_copy_and_write(
        folder, rounds, saving.QUICK if quick else saving.CASES
    ),
    "turns": lambda folder, rounds, quick: [*turns.bytes_written(folder), *turns.cost_of_a_turn(folder, 4 * rounds)],
    "files": lambda folder, rounds, quick: growth.with_files(
        folder, 2 * rounds, (1000, 10_000) if quick else (1000, 10_000, 100_000)
    ),
    "rows": lambda folder, rounds, quick: growth.with_rows(
        folder, 2 * rounds, (1000, 100_000) if quick else (1000, 10_000, 100_000, 1_000_000)
    ),
    "memory": lambda folder, rounds, quick: [
        memory.peak_beyond_the_state(folder, "7b", 4096 if quick else 32_768),
    ],
}


def main() -> int:
    """Measure, print, write; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail when a ratio that is asked for is not reached")
    parser.add_argument("--quick", action="store_true", help="small states, few records: to try it out")
    parser.add_argument("--only", action="append", choices=GROUPS, help="only this group; can be given several times")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (5)")
    parser.add_argument(
        "--dir", type=Path, default=Path("build/tmp/bench"), help="where to write, on the disk in question"
    )
    parser.add_argument("--out", type=Path, help="folder for bench.json, bench.md and bench.svg")
    options = parser.parse_args()
    if not can_be_cold():
        sys.exit("The page cache can be emptied by root on Linux only, and cold reads are measured without it.")
    folder: Path = options.dir.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    results: list[Result] = []
    began = time.monotonic()
    try:
        for name in options.only or GROUPS:
            found = GROUPS[name](folder, options.rounds, options.quick)
            results += found
            print(f"{name} ({time.monotonic() - began:.0f} s)", *map(report.line, found), sep="\n", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.out:
        report.write(options.out, results, machine())
    missed = [result for result in results if result.holds is False]
    print(f"{len(results)} figures, {len(missed)} short of what is asked", *map(report.line, missed), sep="\n")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
