"""The Cache and Settings pages' words, chart and picture: values in, what a person reads out."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("nicegui", reason="needs the gateway's packages")

from rewarm.gateway.branches import draw
from rewarm.gateway.entry_list import Row, title_of
from rewarm.gateway.page import cache_picture
from rewarm.gateway.page import cache_words as words
from rewarm.gateway.page.cache_chart import ttft_chart
from rewarm.gateway.replies import Replies, Reply
from rewarm.store.entries import Entry
from rewarm.store.room import Removal


def entry(name: str, n_tokens: int = 100, parent: str | None = None, fork: int = 0, label: str | None = None) -> Entry:
    return Entry(name, "f" * 64, n_tokens, label or name, "assistant", False, 0.0, 0.0, 0, 8192, 4096, parent, fork)


def row(name: str, *args: object, **more: object) -> Row:
    return Row(entry(name, *args, **more), f"<{name}>", "a model")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("past_s", "said"),
    [(-5, "just now"), (59, "just now"), (90, "1 min ago"), (7200, "2 h ago"), (86_400 * 12, "12 days ago")],
)
def test_how_long_ago(past_s: float, said: str) -> None:
    assert words.ago(1000.0, 1000.0 + past_s) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (45, "45 s"), (125, "2 min 5 s"), (1800, "30 min"), (11_040, "3 h 4 min"), (190_800, "2 days 5 h")],
)
def test_how_much_time_was_saved(seconds: float, said: str) -> None:
    assert words.duration(seconds) == said


def test_b147_a_share_is_never_more_than_all_and_never_nothing_when_it_is_something() -> None:
    assert words.share(162, 100) == 1.0
    assert words.share(-1, 100) == words.share(5, 0) == 0.0
    assert [words.per_cent(part) for part in (0, 0.004, 0.5, 0.996, 1)] == ["0 %", "under 1 %", "50 %", "99 %", "100 %"]


def test_b150_what_was_not_to_be_served_lowers_no_hit_rate() -> None:
    assert words.hit_rate({"hits": 3, "misses": {"diverged": 1, "disabled": 50, "too_short": 9}}) == (
        "75 %",
        "3 of 4 look-ups",
    )
    assert words.hit_rate({})[0] == "none yet"
    noted = Replies(now=lambda: 1.0)
    for reason in ("disabled", "too_short", "not_worth_loading", "nothing_stored"):
        noted.note("m", {"prompt_tokens": 10, "reason": reason}, 0.1)
    assert (noted.summary().n_misses, noted.summary().n_bypassed) == (1, 3)
    assert [miss.reason for miss in noted.misses(5)] == ["nothing_stored"]


def test_b149_what_a_worker_says_is_taken_as_numbers_or_not_at_all() -> None:
    saved: list[float] = []
    noted = Replies(saved.append, now=lambda: 5.0)
    noted.note("m", {"prompt_tokens": 9, "disk_tokens": 4, "memory_tokens": 3, "saved_s": 1.5, "reason": "hit"}, 0.2)
    noted.note("m", {"prompt_tokens": "many", "disk_tokens": -3, "saved_s": True, "memory_tokens": None}, None)
    first, second = noted.latest()
    assert (first.cached_tokens, first.kind, first.at_s) == (7, "disk", 5.0)
    assert (second.prompt_tokens, second.cached_tokens, second.saved_s) == (0, 0, 0.0)
    assert saved == [1.5]
    assert noted.summary().ttft_restored_s == 0.2 and noted.summary().ttft_prefilled_s is None


def test_replies_are_bounded() -> None:
    noted = Replies(now=lambda: 0.0)
    for number in range(2500):
        noted.note("m", {"prompt_tokens": number}, None)
    assert len(noted.latest()) == 2000 and noted.latest()[-1].prompt_tokens == 2499 and noted.n_ever == 2500


def test_sizes_and_removals_are_plain() -> None:
    assert words.size(64 * 2**30) == "64 GiB"
    assert words.size(1_600_000) == "1.5 MiB"
    assert words.removal(Removal(1, 4096)) == "1 file, 4 KiB"
    assert words.removal(Removal(1204, 2**30)) == "1,204 files, 1 GiB"


def test_the_chart_has_a_dot_for_each_streamed_reply_and_says_so() -> None:
    replies = [
        Reply(0, "<b>", 5000, disk_tokens=4000, ttft_s=0.4),
        Reply(0, "m", 5000, ttft_s=21.0),
        Reply(0, "m", 12, memory_tokens=11, ttft_s=0.004),
        Reply(0, "m", 900),  # not streamed: nobody knows
        Reply(0, "m", 0, ttft_s=1.0),
    ]
    svg = ET.fromstring(ttft_chart(replies))
    dots = list(svg.iter("circle"))
    assert [each.attrib["class"].split()[1] for each in dots] == ["rc-none", "rc-memory", "rc-disk"]
    assert svg.attrib["aria-label"].endswith("1 restored, 1 from memory, 1 prefilled.")
    width, height = map(float, svg.attrib["viewBox"].split()[2:])
    for dot in dots:
        assert 0 <= float(dot.attrib["cx"]) <= width and 0 <= float(dot.attrib["cy"]) <= height
    assert dots[2][0].text == "<b>: 5,000 tokens, 4,000 reused, first token after 400 ms"
    assert float(dots[0].attrib["cy"]) < float(dots[2].attrib["cy"])  # slower is higher
    assert ttft_chart([]) == ttft_chart([Reply(0, "m", 10)]) == ""


def test_the_picture_puts_branches_below_what_they_branched_off() -> None:
    rows = [row("d", 50), row("c", 90, "b", 40), row("b", 60, "a", 20), row("e", 30, "a", 10), row("a", 80)]
    pictures, n_left_out, n_alone = draw(rows)
    assert (n_left_out, n_alone) == (0, 1)
    assert [(each.row.entry.id, each.depth, each.parent_at) for each in pictures[0].branches] == [
        ("a", 0, None),
        ("b", 1, 0),
        ("c", 2, 1),
        ("e", 1, 0),
    ]
    html = cache_picture.draw(pictures)
    assert "&lt;c&gt;: 90 tokens, the first 40 shared with “&lt;b&gt;”" in html and "<c>" not in html
    left = [float(each) for each in re.findall(r'bar-own" style="left:([\d.]+)%', html)]
    assert left == [0.0, 22.22, 44.44, 11.11]


def test_a_large_family_is_drawn_with_whole_lines_only() -> None:
    rows = [row(f"{number}", 100, f"{number - 1}" if number else None, 10) for number in reversed(range(60))]
    pictures, n_left_out, _ = draw(rows, 24)
    drawn = [each.row.entry.id for picture in pictures for each in picture.branches]
    assert len(drawn) <= 24 and n_left_out == 60 - len(drawn)
    assert all(each.parent_at is not None or each.depth == 0 for picture in pictures for each in picture.branches)
    wide = [*(row(f"w{number}", 100, "root", 10) for number in range(60)), row("root")]
    pictures, n_left_out, _ = draw(wide, 24)
    assert len(pictures[0].branches) == 24 and pictures[0].branches[0].row.entry.id == "root" and n_left_out == 37


def test_an_entry_is_called_by_its_conversation_else_its_label_else_its_kind() -> None:
    assert title_of(entry("x", label="abc"), {"abc": "Plan a week"}) == "Plan a week"
    assert title_of(entry("x", label="my-agent"), {}) == "my-agent"
    unnamed = Entry("x", "f" * 64, 1, None, "assistant", False, 0.0, 0.0, 0)
    assert title_of(unnamed, {}).startswith("Unnamed, of ")
    assert title_of(Entry("x", "f" * 64, 1, None, "system", False, 0.0, 0.0, 0), {}) == "System prompt"
