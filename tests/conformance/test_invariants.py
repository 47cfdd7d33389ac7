"""`docs/invariants.md` names tests; each of them must exist, and every invariant must have one."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOC = TESTS.parent / "docs" / "invariants.md"


def test_every_invariant_names_tests_that_exist() -> None:
    there = set()
    for path in TESTS.rglob("test_*.py"):
        there |= set(re.findall(r"^\s*def (test_\w+)", path.read_text(), flags=re.MULTILINE))
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", DOC.read_text(), flags=re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 20
    for number, _, tests in rows:
        names = re.findall(r"`(test_\w+)`", tests)
        assert names, number
        assert set(names) <= there, (number, set(names) - there)
