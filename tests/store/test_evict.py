"""What is dropped for room: children first, least recently used first, nothing spared, never more than needed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rewarm.state.chain import Key
from rewarm.store.evict import Need, choose
from rewarm.store.files import RecordName
from rewarm.store.index import Row


def key(i: int) -> Key:
    return Key(i.to_bytes(32, "big"))


def row(i: int, parent: int, n: int, used: int, nbytes: int = 4096) -> Row:
    return Row(RecordName(b"f" * 32, key(i), is_point=False), key(parent), n, nbytes, used)


class Tree:
    """Records that hang from each other, and what the chooser asks of the index."""

    def __init__(self, rows: list[Row]) -> None:
        self.all = sorted(rows, key=lambda r: (r.used, -r.n))

    def rows(self) -> list[Row]:
        return self.all

    def hanging(self, of: Key) -> set[Key]:
        return {r.name.key for r in self.all if r.parent == of}

    def choose(self, nbytes: int, n_files: int = 0, spared: set[int] = set(), wanted: set[int] = set()) -> list[int]:  # noqa: B006
        self.need = Need(nbytes, n_files)
        chosen = choose(self.rows, self.need, set(map(key, spared)), set(map(key, wanted)), self.hanging)
        return [int.from_bytes(r.name.key, "big") for r in chosen]


CHAIN = Tree([row(1, 0, 4, 5), row(2, 1, 8, 5), row(3, 2, 9, 5), row(4, 2, 10, 7)])


def test_b132_children_go_before_their_parents() -> None:
    assert CHAIN.choose(4096) == [3]
    assert CHAIN.choose(3 * 4096) == [3, 4, 2]
    assert CHAIN.choose(4 * 4096) == [3, 4, 2, 1]


def test_nothing_is_dropped_without_need() -> None:
    assert CHAIN.choose(0) == []
    assert CHAIN.choose(-5, -1) == []


def test_files_count_as_bytes_do() -> None:
    assert CHAIN.choose(-(10**9), 2) == [3, 4]
    assert CHAIN.choose(1, 0) == [3]


def test_what_is_spared_stays_with_all_that_it_needs() -> None:
    assert CHAIN.choose(10 * 4096, spared={4}) == [3]
    assert not CHAIN.need.is_met()


def test_b129_what_was_just_found_goes_last() -> None:
    assert CHAIN.choose(4096, wanted={3}) == [4]
    assert CHAIN.choose(2 * 4096, wanted={3}) == [4, 3]


TREES = st.integers(1, 24).flatmap(
    lambda n: st.tuples(
        st.tuples(*[st.integers(0, i) for i in range(n)]),
        st.lists(st.integers(0, 6), min_size=n, max_size=n),
        st.lists(st.sampled_from([4096, 8192, 65536]), min_size=n, max_size=n),
    )
)


@settings(max_examples=300, deadline=None)
@given(TREES, st.integers(0, 200_000), st.integers(0, 12), st.sets(st.integers(1, 24)), st.sets(st.integers(1, 24)))
def test_any_choice_leaves_whole_chains_and_is_never_more_than_needed(
    tree: tuple[tuple[int, ...], list[int], list[int]], nbytes: int, n_files: int, spared: set[int], wanted: set[int]
) -> None:
    parents, used, sizes = tree
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    rows = [row(i + 1, p, depth[i + 1] * 4, used[i], sizes[i]) for i, p in enumerate(parents)]
    chosen = Tree(rows).choose(nbytes, n_files, spared, wanted)
    assert not set(chosen) & spared
    assert len(set(chosen)) == len(chosen)
    gone: set[int] = set()
    for i in chosen:
        assert {r + 1 for r, p in enumerate(parents) if p == i} <= gone
        gone.add(i)
    freed = [sizes[i - 1] for i in chosen]
    met = sum(freed) >= nbytes and len(freed) >= n_files
    if chosen:
        assert sum(freed[:-1]) < nbytes or len(freed) - 1 < n_files
    left = set(range(1, len(parents) + 1)) - gone
    droppable = {i for i in left - spared if not any(p == i and r + 1 in left for r, p in enumerate(parents))}
    if not met:
        assert not droppable
    if set(chosen) & wanted:
        # Only when nothing else could go: what went before, and what hangs below it, was all there was.
        first = next(k for k, i in enumerate(chosen) if i in wanted)
        before = left | set(chosen[first:])
        leaves = {i for i in before if not any(p == i and r + 1 in before for r, p in enumerate(parents))}
        assert leaves - spared <= wanted
