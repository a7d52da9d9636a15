"""Canonical JSON: compared with the reference, and texts without a canonical form."""

from __future__ import annotations

import json
from typing import Any

import pytest
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st

from interlock.wire.commands import NotCanonical, canonical

SAFE = 2**53 - 1
values = st.recursive(
    st.none() | st.booleans() | st.integers(-SAFE, SAFE) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=12,
)


@given(values, st.booleans(), st.sampled_from([None, 2]))
@example({"\ue000": 1, "\U0001f600": 2}, True, None)
@example({"b": [1e21, 1e-7, -0.0, 0.1 + 0.2, 1e16, 5e-324], "a": '\x00\x1f\x7f\u2028\\/"'}, True, None)
@example({"colons": "a:b", "c:d": {":": ":"}}, False, None)
def test_canonical_form_equals_the_reference_for_any_spelling(value: Any, ascii_only: bool, indent: Any) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert canonical(text.encode()) == rfc8785.dumps(value)


@given(values)
def test_canonical_form_is_a_fixed_point_with_the_same_value(value: Any) -> None:
    once = canonical(json.dumps(value).encode())
    assert canonical(once) == once
    assert json.loads(once, parse_int=float) == value


@given(st.dictionaries(st.text(), st.integers(0, 9), min_size=1, max_size=4), st.booleans(), st.data())
def test_repeated_key_is_refused_at_any_depth_and_spelling(
    fields: dict[str, int], ascii_only: bool, data: st.DataObject
) -> None:
    twin = data.draw(st.sampled_from(sorted(fields)))
    members = [*fields.items(), (twin, data.draw(st.integers(0, 9)))]
    inner = ",".join(f"{json.dumps(key, ensure_ascii=ascii_only)}:{value}" for key, value in members)
    with pytest.raises(NotCanonical, match="same key twice"):
        canonical(f'[{{"outer":{{{inner}}}}}]'.encode())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"9007199254740993", "send it as a string"),
        (b'{"n":-9007199254740993}', "send it as a string"),
        (b"1" + b"0" * 400, "send it as a string"),
        (b"1e400", "beyond what a double can hold"),
        (b"NaN", "malformed"),
        (b"[1,]", "malformed"),
        (b'{"a":1} x', "trailing"),
        (b'"\xff"', "utf-8"),
        (rb'"\ud800"', "truncated|surrogate"),
        (b"[" * 513 + b"]" * 513, "512 levels deep"),
        (b"", "truncated"),
        (b"[" * 5_000 + b"]" * 5_000, "nested too deeply"),
        (b'{"\\u0061":1,"a":2}', "same key twice"),
    ],
)
def test_ambiguous_text_has_no_canonical_form(text: bytes, why: str) -> None:
    with pytest.raises(NotCanonical, match=why):
        canonical(text)
