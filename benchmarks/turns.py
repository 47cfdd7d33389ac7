"""What a conversation costs: bytes written over thirty turns, and one turn's cost as the conversation grows."""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path

import rewarm
from benchmarks.restoring import UNBOUNDED
from benchmarks.rounds import Result
from benchmarks.states import Filler, Shape, nbytes_of, state_of, tokens_of

TURNS = 30
TURN_TOKENS = 300
PREFILL_TOKENS = 2048

SMALL = {
    "rows": Shape("rows", layers=4, heads=2, width=64),
    "window": Shape("window", layers=2, heads=2, width=64, window_layers=4, window=1024),
    "hybrid": Shape("hybrid", layers=2, heads=2, width=64, recurrent_layers=4, recurrent_bytes=2**18),
}


def bytes_written(folder: Path) -> list[Result]:
    """Bytes that thirty turns write, against what the conversation takes at its end."""
    results = []
    for name, shape in SMALL.items():
        root = folder / f"wear-{name}"
        with rewarm.open(root, limits=UNBOUNDED) as cache:
            space = cache.namespace(rewarm.Identity({"weights": name}))
            n_tokens = 0
            for turn in range(TURNS):
                for boundary in ("user", "assistant") if name != "rows" else ("assistant",):
                    n_tokens += TURN_TOKENS // 2 if name != "rows" else TURN_TOKENS
                    space.save(tokens_of(n_tokens), state_of(shape, n_tokens, Filler(turn)), boundary=boundary)
                    cache.flush(60)
            stats = cache.stats()
            written = stats["bytes_written"]
            block_nbytes = 256 * (4 * 2 * 64 * 2 * 2 if name == "rows" else 2 * 2 * 64 * 2 * 2)
            final = nbytes_of(state_of(shape, n_tokens))
        shutil.rmtree(root)
        assert isinstance(written, int)
        allowed = 1.05 * final + TURNS * block_nbytes
        results.append(
            Result(
                f"bytes written over {TURNS} turns, {name}",
                "1.05 times its final size plus one block a turn" if name == "rows" else "its final size",
                [written / (allowed if name == "rows" else final)],
                at_most=1.0 if name == "rows" else None,
                shown={"written": written, "final": final, "times_final": written / final},
            )
        )
    return results


def cost_of_a_turn(folder: Path, rounds: int) -> list[Result]:
    """Seconds in `find` and `save` for a turn at 30,000 tokens of history, against one at 1,000."""
    took: dict[tuple[str, int], list[float]] = {}
    for history in (1000, 30_000):
        root = folder / f"turn-{history}"
        with rewarm.open(root, limits=UNBOUNDED) as cache:
            space = cache.namespace(rewarm.Identity({"weights": "turn"}))
            state = state_of(SMALL["rows"], history)
            space.save(tokens_of(history), state)
            cache.flush(60)
            for turn in range(1, rounds + 2):
                n_tokens = history + 40 * turn
                state = state_of(SMALL["rows"], n_tokens)
                tokens = tokens_of(n_tokens)
                began = time.perf_counter()
                found = space.find([*tokens, 1])
                between = time.perf_counter()
                space.save(tokens, state)
                ended = time.perf_counter()
                assert found.n_tokens >= history
                cache.flush(60)
                if turn > 1:
                    took.setdefault(("find", history), []).append(between - began)
                    took.setdefault(("save", history), []).append(ended - between)
        shutil.rmtree(root)
    results = []
    for what in ("find", "save"):
        short, long = statistics.median(took[what, 1000]), took[what, 30_000]
        results.append(
            Result(
                f"{what} of a turn at 30,000 tokens of history",
                "at 1,000 tokens of history",
                [each / short for each in long],
                at_most=1.2,
                shown={"short_s": took[what, 1000], "long_s": long},
            )
        )
    return results
