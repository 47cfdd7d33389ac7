"""The planner against the perfect model, over tables of records that tests fill and pierce."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarm.state.chain import Chain, Key, as_tokens, ordered, root_key
from rewarm.state.layout import Kind, Layout, TensorSpec
from rewarm.state.plan import MAX_AFTER, Child, Plan, plan, window_path
from rewarm.state.reason import Reason
from rewarm.testing.perfect import PerfectCache, shared

ROWS = TensorSpec("k", Kind.ROWS, "float32", "<f4", 0, (2,))
STATE = TensorSpec("s", Kind.OPAQUE, "float32", "<f4")
ROWS_ONLY = Layout((ROWS,))
HYBRID = Layout((ROWS, STATE))


def windowed(size: int, keep: int = 0) -> Layout:
    return Layout((ROWS, TensorSpec("w", Kind.WINDOW, "float32", "<f4", 0, (2,), size, keep)))


@dataclass
class Table:
    """A planner's source in memory; `holes` are keys that are gone, with the reason."""

    layout: Layout
    size: int
    records: dict[Key, tuple[Key, Child]] = field(default_factory=dict)
    holes: dict[Key, Reason] = field(default_factory=dict)
    n_lookups: int = 0
    longest: int = 0

    def root(self) -> Key:
        return root_key(self.size, b"f" * 32, self.layout.digest, b"")

    def chain(self, tokens: Sequence[int]) -> Chain:
        return Chain(self.root(), as_tokens(tokens), self.size)

    def save(self, tokens: Sequence[int], after: Sequence[int] | None = None) -> None:
        chain, n = self.chain(tokens), len(tokens)
        for i, key in enumerate(chain.blocks()):
            part = chain.tokens[i * self.size : (i + 1) * self.size]
            self.records[key] = (chain.parent(i), Child(key, False, (i + 1) * self.size, ordered(part)))
        key = chain.point(n)
        earlier = self.chain(after).point(len(after)) if after is not None else None
        own = ordered(chain.tail(chain.n_blocks))
        self.records[key] = (chain.parent(chain.n_blocks), Child(key, True, n, own, earlier))

    def drop(self, key: Key, reason: Reason = Reason.EVICTED) -> None:
        del self.records[key]
        self.holes[key] = reason

    def n_present(self, blocks: Sequence[Key]) -> int:
        self.n_lookups += 1
        return next((i for i, key in enumerate(blocks) if key not in self.records), len(blocks))

    def record(self, key: Key) -> Child | None:
        self.n_lookups += 1
        return self.records[key][1] if key in self.records else None

    def _siblings(self, parent: Key, *, points_only: bool) -> list[Child]:
        found = [child for of, child in self.records.values() if of == parent and (child.is_point or not points_only)]
        return sorted(found, key=lambda child: child.tokens)

    def before(self, parent: Key, tokens: bytes, *, points_only: bool) -> Child | None:
        self.n_lookups += 1
        self.longest = max(self.longest, len(tokens))
        found = self._siblings(parent, points_only=points_only)
        i = bisect.bisect_right([child.tokens for child in found], tokens)
        return found[i - 1] if i else None

    def behind(self, parent: Key, tokens: bytes) -> Child | None:
        self.n_lookups += 1
        self.longest = max(self.longest, len(tokens))
        found = self._siblings(parent, points_only=False)
        i = bisect.bisect_left([child.tokens for child in found], tokens)
        return found[i] if i < len(found) else None

    def gone(self, keys: Sequence[Key]) -> Reason | None:
        return next((self.holes[key] for key in keys if key in self.holes), None)

    def plan(self, prompt: Sequence[int]) -> Plan:
        return plan(self.layout, self.chain(prompt), self)


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=11), min_size=1, max_size=6)
PROMPT = st.lists(st.integers(0, 2), max_size=12)
LAYOUTS = [ROWS_ONLY, Layout((ROWS,), 3), HYBRID, Layout((STATE,)), windowed(3), Layout(())]


@settings(max_examples=300, deadline=None)
@given(SEQUENCES, PROMPT, st.integers(1, 5), st.sampled_from(LAYOUTS))
def test_the_plan_is_the_perfect_models(saved: list[list[int]], prompt: list[int], size: int, layout: Layout) -> None:
    table, perfect = Table(layout, size), PerfectCache()
    for tokens in saved:
        table.save(tokens)
        perfect.saved.setdefault((0, layout), set()).add(tuple(tokens))
    found = table.plan(prompt)
    # The planner is handed what may be matched; the model leaves one token to evaluate.
    assert found.n == perfect.restorable(0, [*prompt, 9])
    assert_whole(table, found, prompt)
    assert (found.reason is Reason.HIT) == (found.n == len(prompt))


def assert_whole(table: Table, found: Plan, prompt: Sequence[int]) -> None:
    """Every record of the plan is there and holds the prompt's tokens."""
    chain = table.chain(prompt)
    assert list(found.blocks) == chain.blocks()[: found.n // table.size]
    assert all(key in table.records for key in found.path)
    rest = chain.tokens[len(found.blocks) * table.size : found.n].tolist()
    if rest and table.layout.rows_only:
        assert found.tail is not None
        parent, child = table.records[found.tail]
        assert parent == chain.parent(len(found.blocks))
        assert child.tokens.startswith(ordered(as_tokens(rest)))
    if found.exact:
        assert found.tail == found.points[0] == chain.point(found.n)


@settings(max_examples=200, deadline=None)
@given(SEQUENCES, PROMPT, st.integers(1, 3), st.sampled_from(LAYOUTS), st.data())
def test_a_plan_never_uses_what_is_gone(
    saved: list[list[int]], prompt: list[int], size: int, layout: Layout, data: st.DataObject
) -> None:
    """With holes anywhere the plan is whole, and no longer than it was."""
    table = Table(layout, size)
    for tokens in saved:
        table.save(tokens)
    whole = table.plan(prompt).n
    keys = sorted(table.records)
    for key in data.draw(st.lists(st.sampled_from(keys), unique=True)):
        table.drop(key)
    found = table.plan(prompt)
    assert found.n <= whole
    assert_whole(table, found, prompt)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("cut", range(1, 18))
def test_rows_are_cut_at_every_offset_around_block_edges(size: int, cut: int) -> None:
    table = Table(ROWS_ONLY, size)
    table.save(list(range(17)))
    found = table.plan([*range(cut), 99])
    assert found.n == cut
    assert_whole(table, found, [*range(cut), 99])


def test_b007_a_stored_prompt_longer_than_the_new_one_is_cut() -> None:
    table = Table(ROWS_ONLY, 4)
    table.save([1, 2, 3, 4, 5, 6])
    found = table.plan([1, 2, 3])
    assert (found.n, found.exact, found.reason) == (3, False, Reason.HIT)


def test_the_reason_names_the_token_that_diverges() -> None:
    table = Table(ROWS_ONLY, 4)
    table.save([1, 2, 3, 4, 5, 6])
    found = table.plan([1, 2, 3, 4, 5, 7, 8])
    assert found.n == 5
    assert found.reason is Reason.DIVERGED
    assert found.detail == {"at": 5, "asked_token": 7, "stored_token": 6}


def test_divergence_at_the_first_token_of_a_later_block_is_named() -> None:
    table = Table(ROWS_ONLY, 2)
    table.save([1, 2, 3, 4])
    found = table.plan([1, 2, 9, 9])
    assert (found.n, found.reason) == (2, Reason.DIVERGED)
    assert found.detail == {"at": 2, "asked_token": 9, "stored_token": 3}


def test_the_end_of_what_is_stored_is_no_divergence() -> None:
    table = Table(ROWS_ONLY, 4)
    table.save([1, 2, 3])
    found = table.plan([1, 2, 3, 4, 5])
    assert (found.n, found.reason) == (3, Reason.NOTHING_STORED)


def test_an_evicted_block_is_the_reason() -> None:
    table = Table(ROWS_ONLY, 2)
    table.save([1, 2, 3, 4, 5])
    table.drop(table.chain([1, 2, 3, 4]).block(1))
    found = table.plan([1, 2, 3, 4, 5])
    assert (found.n, found.reason) == (2, Reason.EVICTED)
    assert found.detail["at"] == 2


def test_a_damaged_block_is_the_reason() -> None:
    table = Table(ROWS_ONLY, 2)
    table.save([1, 2, 3, 4, 5])
    table.drop(table.chain([1, 2]).block(0), Reason.CORRUPT)
    found = table.plan([1, 2, 3, 4, 5])
    assert (found.n, found.reason) == (0, Reason.CORRUPT)


def test_other_layouts_are_restored_at_points_only() -> None:
    table = Table(HYBRID, 4)
    table.save([1, 2, 3, 4, 5, 6])
    table.save([1, 2, 3])
    found = table.plan([1, 2, 3, 4, 5, 9])
    assert (found.n, found.reason) == (3, Reason.NO_RESTORE_POINT)
    assert found.detail == {"shared": 5, "restorable": 3}


def test_rows_below_valid_from_are_not_given() -> None:
    table = Table(Layout((ROWS,), 5), 2)
    table.save([1, 2, 3, 4, 5, 6])
    assert table.plan([1, 2, 3, 4, 5, 9]).n == 5
    assert table.plan([1, 2, 3, 4, 9]).n == 0


def test_a_window_run_follows_after_until_the_window_is_covered() -> None:
    table = Table(windowed(6), 4)
    tokens = list(range(20))
    table.save(tokens[:3])
    table.save(tokens[:5], after=tokens[:3])
    table.save(tokens[:7], after=tokens[:5])
    table.save(tokens[:9], after=tokens[:7])
    chain = table.chain(tokens)
    # The window of 9 begins at 3: the runs of 9, 7 and 5 cover it.
    assert table.plan(tokens[:9]).points == (chain.point(9), chain.point(7), chain.point(5))
    # A gap in the path: the point counts as not there, and so does every one that reaches over it.
    table.drop(chain.point(5))
    assert table.plan(tokens[:9]).n == 3
    table.save(tokens[:9])
    assert table.plan(tokens[:9]).n == 9


def test_a_run_reaches_over_at_most_four_earlier_points() -> None:
    table = Table(windowed(100), 4)
    tokens = list(range(20))
    table.save(tokens[:1])
    for n in range(2, 12):
        table.save(tokens[:n], after=tokens[: n - 1])
    chain = table.chain(tokens)
    for n in range(1, 12):
        child = table.record(chain.point(n))
        assert child is not None
        path = window_path(table.layout, child, table)
        assert len(path) == (n if n - 1 <= MAX_AFTER else 0)


@pytest.mark.parametrize("n_siblings", [10, 2000])
@pytest.mark.parametrize("layout", [ROWS_ONLY, HYBRID], ids=["rows", "hybrid"])
def test_the_number_of_look_ups_does_not_grow_with_the_siblings(n_siblings: int, layout: Layout) -> None:
    table = Table(layout, 8)
    for i in range(n_siblings):
        table.save([1, 2, i, 4, 5])
    table.n_lookups = 0
    table.plan([1, 2, n_siblings + 1, 4, 5, 6])
    assert table.n_lookups <= 6


@pytest.mark.parametrize("layout", [ROWS_ONLY, HYBRID], ids=["rows", "hybrid"])
def test_no_look_up_carries_more_than_a_block(layout: Layout) -> None:
    """Else a long prompt without a restore point costs its length once per block."""
    table = Table(layout, 8)
    table.save(range(400))
    table.plan([*range(399), 0, 0])
    assert table.longest <= 8 * 9


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_the_models_common_prefix(a: list[int], b: list[int]) -> None:
    n = shared(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
