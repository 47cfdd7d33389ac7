"""Keys: golden values, stability over processes, and that everything before a record is part of its name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.state.chain import (
    Chain,
    ChainMemo,
    as_tokens,
    block_key,
    common_prefix,
    from_ordered,
    ordered,
    point_key,
    root_key,
)

FINGERPRINT, LAYOUT = bytes(range(32)), bytes(range(32, 64))
TOKEN = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-3, 300),
    st.sampled_from([-(2**63), 2**63 - 1, 255, 256, -256, -257, 2**31, -(2**31)]),
)
TOKENS = st.lists(TOKEN, max_size=12)

ROOT = root_key(4, FINGERPRINT, LAYOUT, b"")


def test_golden_keys() -> None:
    """Keys are written into file names: a change of any makes every cache on disk unreachable."""
    chain = Chain(ROOT, as_tokens(list(range(-2, 9))), 4)
    assert ROOT.hex() == "17ea6698a8fdd723b1deeb2b29cbb26aed1894fcfd0089d64dac12bb356f922c"
    assert [key.hex() for key in chain.blocks()] == [
        "e048970738459e52439ae1493a5fdfa2560e53b8511895a0fb25c1657e116f64",
        "4e3f9a04ab83aa003f20d3dcaa1c615dbac379b31f1c4f68da6589b893109fda",
    ]
    assert chain.point(11).hex() == "6ed2d44756574f02a316adf9d7d268950e0e7b9575a340345f8abcd80be76bdb"
    assert chain.point(8).hex() == "454c9e2a332d9b3dd5bde5e4454b720c884abc12ce095da4245385b3c54f9c65"
    assert chain.point(2).hex() == "85b7cd854e96ad09be81cc1729280a68e83699e0895cb28265d5930c2d8efebd"


def test_b055_keys_are_the_same_in_every_process() -> None:
    code = (
        "from rewarm.state.chain import *\n"
        "c = Chain(root_key(4, b'f' * 32, b'l' * 32, b'tenant'), as_tokens([7, -7, 2**63 - 1] * 5), 4)\n"
        "print([k.hex() for k in c.blocks()], c.point(15).hex())"
    )
    seen = set()
    for seed in ("0", "1", "random"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        seen.add(run.stdout)
    assert len(seen) == 1


def test_every_field_of_the_root_is_part_of_it() -> None:
    roots = [
        root_key(4, FINGERPRINT, LAYOUT, b""),
        root_key(8, FINGERPRINT, LAYOUT, b""),
        root_key(4, LAYOUT, FINGERPRINT, b""),
        root_key(4, FINGERPRINT, LAYOUT, b"a"),
        root_key(4, FINGERPRINT, LAYOUT + b"a", b""),
        root_key(4, FINGERPRINT + LAYOUT, b"", b""),
    ]
    assert len(set(roots)) == len(roots)


def test_blocks_and_points_of_the_same_tokens_have_different_keys() -> None:
    tokens = as_tokens([1, 2, 3, 4])
    assert block_key(ROOT, tokens) != point_key(ROOT, 4, tokens)
    assert point_key(ROOT, 0, tokens) != point_key(ROOT, 4, tokens)
    assert point_key(ROOT, 4, as_tokens([])) != point_key(ROOT, 4, tokens)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_b053_equal_keys_mean_equal_tokens_from_the_first_on(a: list[int], b: list[int], size: int) -> None:
    one, two = Chain(ROOT, as_tokens(a), size), Chain(ROOT, as_tokens(b), size)
    shared = common_prefix(one.tokens, two.tokens)
    for i, (key, other) in enumerate(zip(one.blocks(), two.blocks(), strict=False)):
        assert (key == other) == ((i + 1) * size <= shared)
    for n in range(1, min(len(a), len(b)) + 1):
        assert (one.point(n) == two.point(n)) == (n <= shared)


@given(TOKENS, st.integers(1, 5))
def test_a_chain_covers_its_tokens(tokens: list[int], size: int) -> None:
    chain = Chain(ROOT, as_tokens(tokens), size)
    assert chain.n_blocks == len(chain.blocks()) == len(tokens) // size
    assert chain.parent(0) == ROOT
    assert chain.tail(chain.n_blocks).tolist() == tokens[chain.n_blocks * size :]
    for i, key in enumerate(chain.blocks()):
        assert key == block_key(chain.parent(i), as_tokens(tokens[i * size : (i + 1) * size]))


def test_b049_seventy_thousand_pseudo_tokens_give_as_many_keys() -> None:
    """Media travel as 64-bit pseudo-tokens; nothing of them is cut."""
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=70_000)
    assert len({point_key(ROOT, 1, ids[i : i + 1].astype("<i8")) for i in range(len(ids))}) == len(set(ids.tolist()))
    a, b = as_tokens([1, int(ids[0]), int(ids[1])]), as_tokens([1, int(ids[1]), int(ids[0])])
    assert point_key(ROOT, 3, a) != point_key(ROOT, 3, b)


@given(TOKENS, TOKENS)
def test_ordered_bytes_sort_as_tokens_do(a: list[int], b: list[int]) -> None:
    one, two = ordered(as_tokens(a)), ordered(as_tokens(b))
    assert (one < two) == (a < b)
    assert (one == two) == (a == b)
    assert one.startswith(two) == (a[: len(b)] == b)


@given(TOKENS)
def test_ordered_bytes_come_back(tokens: list[int]) -> None:
    assert from_ordered(ordered(as_tokens(tokens))).tolist() == tokens


@given(st.binary(max_size=24))
def test_arbitrary_bytes_are_tokens_or_refused(data: bytes) -> None:
    try:
        tokens = from_ordered(data)
    except ValueError:
        return
    assert len(tokens) <= len(data)


@pytest.mark.parametrize(
    "given_", [[1, 2], (1, 2), range(1, 3), np.array([1, 2], np.int32), np.array([1, 2], np.uint64)]
)
def test_tokens_of_any_sequence_are_taken(given_: object) -> None:
    tokens = as_tokens(given_)  # type: ignore[arg-type]
    assert tokens.tolist() == [1, 2]
    assert tokens.dtype.str == "<i8"


def test_tokens_are_copied() -> None:
    source = np.array([1, 2, 3], dtype="<i8")
    tokens = as_tokens(source)
    source[0] = 9
    assert tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [[1.5], ["a"], [[1, 2]], [2**63], [-(2**63) - 1], np.array([1.0]), np.array([2**63], np.uint64), [True, None]],
)
def test_what_is_no_sequence_of_64_bit_integers_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="64-bit"):
        as_tokens(wrong)  # type: ignore[arg-type]


def test_the_extremes_of_64_bits_are_taken_together() -> None:
    tokens = [-(2**63), 2**63 - 1, 0, -1]
    assert as_tokens(tokens).tolist() == tokens


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_b004_threads_that_share_a_chain_get_the_same_keys() -> None:
    """Records of one restore are checked on several threads, against one chain."""
    tokens = as_tokens(range(40_000))
    want = Chain(root_key(16, b"f" * 32, b"d" * 32, b""), tokens, 16).blocks()
    for _ in range(10):
        chain = Chain(root_key(16, b"f" * 32, b"d" * 32, b""), tokens, 16)
        gate = threading.Barrier(4)
        wrong: list[int] = []

        def look(chain: Chain = chain, gate: threading.Barrier = gate, wrong: list[int] = wrong) -> None:
            gate.wait()
            wrong += [i for i in range(chain.n_blocks) if chain.block(i) != want[i]]

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


@given(st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), max_size=14)), max_size=12))
def test_a_memo_gives_the_keys_that_the_tokens_give(asked: list[tuple[int, list[int]]]) -> None:
    memo = ChainMemo(3)
    roots = [ROOT, root_key(4, FINGERPRINT, LAYOUT, b"another")]
    for which, tokens in asked:
        made = memo.chain(roots[which], as_tokens(tokens), 4)
        fresh = Chain(roots[which], as_tokens(tokens), 4)
        assert made.blocks() == fresh.blocks()
        assert made.point(len(tokens)) == fresh.point(len(tokens))
        assert [made.block(i) for i in range(made.n_blocks)] == fresh.blocks()


def test_a_memo_hashes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    memo, hashed = ChainMemo(), []
    monkeypatch.setattr("rewarm.state.chain.block_key", lambda *a: hashed.append(1) or block_key(*a))
    tokens = list(range(400))
    for end in (100, 200, 200, 150, 400):
        memo.chain(ROOT, as_tokens(tokens[:end]), 4).blocks()
    assert len(hashed) == 100
    memo.chain(ROOT, as_tokens([*tokens[:42], 7, *tokens[43:]]), 4).blocks()
    assert len(hashed) == 100 + 90
    # Conversations that take turns are all remembered.
    for _ in range(3):
        for i in range(4):
            memo.chain(ROOT, as_tokens([1000 + i, *tokens]), 4).blocks()
    assert len(hashed) == 190 + 400


def test_tokens_cannot_be_changed_under_their_keys() -> None:
    given_tokens = np.arange(8)
    own = as_tokens(given_tokens)
    given_tokens[0] = 99
    assert own[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        own[0] = 5
