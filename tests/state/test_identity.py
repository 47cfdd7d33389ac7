"""Identities: one canonical form for equal ones, different bytes for different ones."""

from __future__ import annotations

import enum
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.state.chain import root_key
from rewarm.state.identity import MAX_DEPTH, differing, encode, fingerprint, from_json, normalise, to_json

TEXT = st.text(max_size=6)  # hypothesis makes no surrogates unless it is told to
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT | st.binary()
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=12
)
FIELDS = st.dictionaries(TEXT, VALUES, max_size=4)


def test_the_fingerprint_is_stable() -> None:
    """A golden value: caches on disk are found again by it."""
    fields = {
        "engine": "mlx-lm",
        "kv_bits": None,
        "rope": 10000.0,
        "scale": 0.5,
        "flag": True,
        "key": b"\x00\xff",
        "list": [1, -1, 2**70],
        "map": {"b": 1, "a": "ä"},
    }
    assert fingerprint(fields).hex() == "aacd9f81d13f8d40893ffa6fc3662547406ca38acaaab61a26172120a65288c1"
    assert len(fingerprint({})) == 32


def test_the_canonical_form_byte_by_byte() -> None:
    """The table of the module's docstring, worked out by hand."""

    def u64(n: int) -> bytes:
        return n.to_bytes(8, "little")

    assert encode({"b": [None, True, -1, 256], "a": b"x"}) == b"".join(
        [
            b"m" + u64(79),
            *(b"s" + u64(1) + b"a", b"y" + u64(1) + b"x"),
            *(b"s" + u64(1) + b"b", b"l" + u64(40)),
            *(b"n" + u64(0), b"b" + u64(1) + b"\x01", b"i" + u64(1) + b"\xff", b"i" + u64(2) + b"\x00\x01"),
        ]
    )


class Family(enum.StrEnum):
    LLAMA = "llama"


class Odd(str):
    def __str__(self) -> str:
        return "something else"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (10000, 10000.0),
        (0, -0.0),
        (2**53, float(2**53)),
        (int(1e300), 1e300),
        (0.5, np.float64(0.5)),
        ([1, 2], (1, 2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ("llama", Family.LLAMA),
        ("llama", Odd("llama")),
    ],
    ids=str,
)
def test_equal_values_have_one_form(one: Any, other: Any) -> None:
    assert encode({"x": one}) == encode({"x": other})
    assert differing({"x": one}, {"x": other}) == []


DIFFERENT: list[Any] = [
    *(None, True, False, 1, 0, -1, 255, 256, -128, -129, 2**64, 2**64 + 1, -(2**64), 0.5, -0.5, 5e-324, 0.1, 1e-9),
    *("", "1", "True", "None", "a", "ä", "a\u0308", "1.0", "0.5", b"", b"a", b"1", b"\x00", "\x00"),
    *([], [[]], [None], [1], [1, 1], [[1], 1], {}, {"": None}, {"a": 1}, {"a": {"a": 1}}, ["a", 1], {"a": [1]}),
]


def test_different_values_have_different_forms() -> None:
    """A boolean is no number, text of a number is none, bytes are no text, nothing is not the empty thing."""
    assert len({encode({"x": value}) for value in DIFFERENT}) == len(DIFFERENT)
    for value in DIFFERENT[1:]:
        assert differing({"x": value}, {"x": None}), value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": "bc"}, {"ab": "c"}),
        ({"a": "b", "c": "d"}, {"a": "bcd"}),
        ({"a": ["b", "c"]}, {"a": ["bc"]}),
        ({"a": [["b"], "c"]}, {"a": [["b", "c"]]}),
        ({"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "c": 2}}),
        ({"a.b": 1}, {"a": {"b": 1}}),
        ({"a": ["b", 1]}, {"a": {"b": 1}}),
        ({"a": b"s" + (1).to_bytes(8, "little") + b"x"}, {"a": "x"}),
        ({"a": None}, {}),
    ],
    ids=str,
)
def test_fields_do_not_run_into_each_other(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert encode(one) != encode(other)
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -math.inf, [0, math.nan], {"a": math.inf}),
        *({1: 2}, {None: 1}, {1, 2}, object(), 1j, bytearray(b"x"), lambda: None),
        *(np.int64(1), np.zeros(2), "\ud800", {"\ud800": 1}),
    ],
    ids=repr,
)
def test_what_cannot_be_part_of_an_identity_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="x"):
        fingerprint({"x": value})


@pytest.mark.parametrize("fields", [None, [("a", 1)], "a", {1: 1}], ids=repr)
def test_an_identity_is_a_mapping_of_names(fields: Any) -> None:
    with pytest.raises(ValueError, match="identity"):
        fingerprint(fields)


def test_what_is_nested_without_end_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(ValueError, match="nested deeper"):
        fingerprint(loop)
    deep: Any = 1
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    fingerprint({"x": deep})
    with pytest.raises(ValueError, match="nested deeper"):
        fingerprint({"x": [deep]})
    with pytest.raises(ValueError, match="nested deeper"):
        from_json({"x": [[deep]]})


def test_integers_of_any_size() -> None:
    values = [0, 1, -1, 127, 128, -128, -129, 2**63, 2**64, -(2**63) - 1, 10**5000, -(10**5000)]
    assert len({encode({"x": value}) for value in values}) == len(values)
    for value in values:
        assert from_json(json.loads(json.dumps(to_json({"x": value}))))["x"] == value


@given(FIELDS)
def test_json_keeps_the_fingerprint(fields: dict[str, Any]) -> None:
    tree = json.loads(json.dumps(to_json(fields), allow_nan=False))
    again = from_json(tree)
    assert fingerprint(again) == fingerprint(fields)
    assert differing(again, fields) == []
    assert to_json(again) == tree


@pytest.mark.parametrize(
    "fields",
    [{"$bytes": "00"}, {"a": {"$bytes": "00"}}, {"$$": {"$int": 1}}, {"$": b"\x01"}, {"a": [{"$int": "1"}, b""]}],
    ids=str,
)
def test_keys_like_our_own_marks_survive_json(fields: dict[str, Any]) -> None:
    assert from_json(json.loads(json.dumps(to_json(fields)))) == normalise(fields)


@pytest.mark.parametrize(
    "tree",
    [[], None, {"x": {"$bytes": "0g"}}, {"x": {"$int": ""}}, {"$x": 1}, {"x": {"$bytes": 1}}, {"x": math.nan}],
    ids=str,
)
def test_json_that_is_none_of_ours_is_refused(tree: Any) -> None:
    with pytest.raises(ValueError, match="."):
        from_json(tree)


@given(FIELDS, FIELDS)
def test_two_identities_have_one_form_only_when_nothing_differs(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (encode(one) == encode(other)) == (differing(one, other) == [])
    assert (encode(one) == encode(other)) == (fingerprint(one) == fingerprint(other))
    assert differing(one, other) == differing(other, one)


@given(FIELDS, TEXT, VALUES)
def test_b025_every_field_changes_the_key_of_every_tier(fields: dict[str, Any], key: str, value: Any) -> None:
    changed = {**fields, key: value}
    if not differing(fields, changed):
        assert fingerprint(changed) == fingerprint(fields)
        return
    keys = {root_key(256, fingerprint(each), b"layout", b"") for each in (fields, changed)}
    assert len(keys) == 2


@given(st.permutations(sorted({"a": 1, "b": [2], "c": {"d": 3.5}, "ä": None}.items(), key=str)))
def test_the_order_of_keys_means_nothing(items: list[tuple[str, Any]]) -> None:
    assert encode(dict(items)) == encode({"a": 1, "b": [2], "c": {"d": 3.5}, "ä": None})


def test_differing_names_fields_as_people_write_them() -> None:
    one = {"config": {"rope": {"base": 1, "kind": "a"}, "n": 1}, "adapters": [{"scale": 1}, {"scale": 2}], "bits": 4}
    other = {"config": {"rope": {"base": 2, "kind": "a"}, "n": True}, "adapters": [{"scale": 3}], "epoch": 1}
    assert differing(one, other) == ["adapters.0.scale", "adapters.1", "bits", "config.n", "config.rope.base", "epoch"]
    assert differing({"a": {"b": 1}}, {"a": [1]}) == ["a"]


def test_the_normal_form_is_a_copy() -> None:
    inner = [1]
    normal = normalise({"a": inner})
    inner.append(2)
    assert normal == {"a": [1]}
