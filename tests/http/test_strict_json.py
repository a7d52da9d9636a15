"""Strict JSON: texts that every later reader parses alike, and refused texts."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.strict_json import (
    MAX_DEPTH,
    NotStrict,
    RepeatedKey,
    first_not_strict,
    require_depth,
    require_strict,
    require_unique_keys,
)

REFUSED: dict[str, tuple[bytes, str]] = {
    "an infinite float": (b'{"h": 1e400}', "does not fit into a double"),
    "a float that only numeric refuses": (b"[1e-16384]", "too many digits"),
    "an exponent of many digits": (b"[0.0e-" + b"9" * 70 + b"]", "too many digits"),
    "an exponent of leading zeros": (b"1e00000400", "does not fit into a double"),
    "a long mantissa with a far exponent": (b"[" + b"1" * 40 + b"e-99999]", "too many digits"),
    "a long integer": (b"9" * 4001, "too many digits"),
    "a long fraction": (b"1." + b"0" * 20_000, "too many digits"),
    "a constant": (b"[NaN]", "NaN is not a JSON number"),
    "a NUL": (rb'{"a": ["x\u0000y"]}', "NUL"),
    "a NUL in a key": (rb'{"\u0000": 1}', "NUL"),
    "half of a pair": (rb'["\ud800"]', "surrogate"),
    "bytes": (b'"\xff"', "not UTF-8"),
    "a repeated key": (b'{"a": {"b": 1, "b": 2}}', "key 'b' twice"),
    "a repeated key with an escape": (rb'{"\u0061": 1, "a": 2}', "key 'a' twice"),
    "a repeated key and an escaped colon": (rb'{"a": 1, "a": "\u003a"}', "key 'a' twice"),
    "lists too deep": (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "levels deep"),
    "objects too deep": (b'{"a":' * 600 + b"1" + b"}" * 600, "levels deep"),
    "far too deep": (b"[" * 5000 + b"]" * 5000, "levels deep"),
    "half a list": (b"[1", "not JSON"),
}
TAKEN: dict[str, bytes] = {
    "an escaped backslash before u0000": rb'"\\u0000"',
    "a pair": rb'"\ud83d\ude00"',
    "deep lists": b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
    "many brackets, none deep": b"[" + b",".join([b"[]"] * 2000) + b"]",
    "brackets in a string": b'"' + b"[" * 2000 + b'"',
    "a long integer": b"9" * 4000,
    "a tiny float": b"1e-400",
    "a hash": b'{"h": "3e00001e-0000"}',
    "an escape before digits": rb'{"h": "\u00e91234", "i": "\u003a"}',
    "the same key in two objects": b'[{"a": 1}, {"a": 1, "b": {"a": 2}}]',
    "spaces": b' { "a" :\n[ 1 ,\t2 ] } ',
}


@pytest.mark.parametrize("name", REFUSED)
def test_json_that_a_later_reader_refuses_is_refused_with_a_reason(name: str) -> None:
    text, reason = REFUSED[name]
    with pytest.raises(NotStrict, match=reason):
        require_strict(text)
    found = first_not_strict([b"1", b'{"a": "\\u00e9"}', text, b"2"])
    assert found is not None
    assert found[0] == 2
    assert reason in str(found[1])


@pytest.mark.parametrize("name", TAKEN)
def test_odd_json_that_all_readers_accept_is_accepted(name: str) -> None:
    require_strict(TAKEN[name])
    assert first_not_strict([b"1", msgspec.Raw(TAKEN[name])]) is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    st.booleans(),
)
def test_python_json_is_strict_unless_it_has_a_nul_or_lone_surrogate(value: Any, escaped: bool) -> None:
    text = json.dumps(value, ensure_ascii=escaped)
    unfit = "\\u0000" in json.dumps(value).replace("\\\\", "")
    try:
        found = first_not_strict([text.encode(), b"{}"])
    except UnicodeEncodeError:
        return
    halved = any(0xD800 <= ord(c) < 0xE000 for c in json.dumps(value, ensure_ascii=False))
    assert (found is not None) == (unfit or halved)


@given(st.lists(st.text(max_size=3), min_size=1, max_size=4), st.booleans())
def test_repeated_keys_are_found_at_any_depth(keys: list[str], escaped: bool) -> None:
    inner = ", ".join(f'{json.dumps(key, ensure_ascii=escaped)}: ":"' for key in keys)
    text = f'{{"outer": [1, {{{inner}}}], "other": ":"}}'.encode("utf-8", "replace")
    if len(set(keys)) == len(keys):
        require_unique_keys(text)
    else:
        with pytest.raises(RepeatedKey):
            require_unique_keys(text)
    require_unique_keys(text, top_only=True)


def test_only_the_outermost_object_may_be_asked_about() -> None:
    require_unique_keys(b'{"a": [{"b": 1, "b": 2}], "c": {"b": 1, "b": 1}}', top_only=True)
    with pytest.raises(RepeatedKey, match="'a' twice"):
        require_unique_keys(b'{"a": [{"b": 1}], "c": 1, "a": {}}', top_only=True)


def test_repeated_key_beside_what_cannot_be_decoded_is_found() -> None:
    with pytest.raises(RepeatedKey):
        require_unique_keys(b'{"a": 1e400, "b": "\xff", "a": 2}')
    require_unique_keys(b'{"a": 1e400, "b": "\xff"}')


def test_depth_is_that_of_brackets_outside_of_strings() -> None:
    require_depth(rb'["\"[[[[' + b"[" * 1000 + b'"]')
    require_depth(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(NotStrict, match="levels deep"):
        require_depth(b'{"a":' * (MAX_DEPTH + 1))
