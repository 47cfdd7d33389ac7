"""The documents name tests; each of them must exist, and every invariant must have one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOC = TESTS.parent / "docs" / "invariants.md"


def names_of_tests() -> set[str]:
    """The names of all tests."""
    texts = [path.read_text() for path in TESTS.rglob("test_*.py")]
    return {name for text in texts for name in re.findall(r"^\s*def (test_\w+)", text, flags=re.MULTILINE)}


@pytest.mark.parametrize("name", ["store", "identity", "format", "how-it-works"])
def test_what_a_document_names_exists(name: str) -> None:
    text = (DOC.parent / f"{name}.md").read_text()
    assert set(re.findall(r"`(test_\w+)`", text)) <= names_of_tests()
    for path in re.findall(r"`((?:tests|benchmarks|src)/[\w/.]+\.\w+)`", text):
        assert (TESTS.parent / path).is_file(), path


def test_every_invariant_names_tests_that_exist() -> None:
    there = names_of_tests()
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", DOC.read_text(), flags=re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 20
    for number, _, tests in rows:
        names = re.findall(r"`(test_\w+)`", tests)
        assert names, number
        assert set(names) <= there, (number, set(names) - there)
