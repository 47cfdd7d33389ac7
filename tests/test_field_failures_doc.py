"""`docs/field-failures.md` names tests that exist, and every test that bears an id is named there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "field-failures.md").read_text(encoding="utf-8")


def names_of_tests() -> set[str]:
    """The names of all tests."""
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    return {name for text in texts for name in re.findall(r"def (test_\w+)", text)}


def rows() -> dict[str, str]:
    """What the document says of each id."""
    found = re.findall(r"^\| (B\d{3}) \| \w+ \| .*? \| (.+) \|$", DOC, re.MULTILINE)
    assert len(found) == len(dict(found))
    return dict(found)


def test_every_test_that_is_named_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", DOC))
    assert len(named) > 60
    assert named <= names_of_tests()
    for path in re.findall(r"`(tests/[\w/]+\.py)`", DOC):
        assert (ROOT / path).is_file(), path


def test_every_id_that_a_test_bears_is_in_the_document() -> None:
    borne = {f"B{number}" for name in names_of_tests() for number in re.findall(r"_b(\d{3})(?=_)", name)}
    said = rows()
    assert len(said) == 99
    assert borne <= set(said)
    for identifier in borne:
        assert f"_b{identifier[1:]}" in said[identifier], identifier
