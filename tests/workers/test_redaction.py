"""Masking of secrets in everything that leaves a process that runs operators."""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.wire.access import TaskSecret
from interlock.workers import protocol
from interlock.workers.child_runtime import ERROR_MESSAGE
from interlock.workers.context import plain
from interlock.workers.redaction import MASK, Redaction, Redactor

VALUES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=8, max_size=40)
FORMS = [
    str,
    lambda value: quote(value, safe=""),
    lambda value: json.dumps(value)[1:-1],
    lambda value: repr(value)[1:-1],
    lambda value: value.encode().hex(),
    lambda value: value.encode().hex(" ").upper(),
    lambda value: repr(value.encode())[2:-1],
    lambda value: base64.b64encode(value.encode()).decode(),
    lambda value: f"https://user:{quote(value)}@host/{value}?k={value}",
]


@given(value=VALUES, before=st.text(max_size=20), after=st.text(max_size=20), form=st.sampled_from(FORMS))
def test_value_is_masked_in_every_encoding_and_position(value: str, before: str, after: str, form: Any) -> None:
    masked = Redactor([value]).text(before + form(value) + after)
    assert value not in masked
    assert form(value) not in masked
    assert MASK in masked


@given(
    value=VALUES,
    before=st.binary(max_size=5),
    after=st.binary(max_size=5),
    encode=st.sampled_from([base64.b64encode, base64.urlsafe_b64encode]),
)
def test_value_between_other_bytes_is_masked_in_base64(value: str, before: bytes, after: bytes, encode: Any) -> None:
    """Basic authentication encodes `user:password`; a binary body is encoded as a whole."""
    inside = before + value.encode()
    encoded = encode(inside + after).decode()
    masked = Redactor([value]).text(f"Basic {encoded}")
    assert MASK in masked
    assert encoded[-(-len(before) * 8 // 6) : len(inside) * 8 // 6] not in masked


@pytest.mark.parametrize("user", ["u", "us", "use", "user"])
def test_password_is_masked_in_basic_authentication(user: str) -> None:
    header = base64.b64encode(f"{user}:correct-horse-battery".encode()).decode()
    masked = Redactor(["correct-horse-battery"]).text(f"Authorization: Basic {header}")
    assert MASK in masked
    assert not any(header[at : at + 8] in masked for at in range(8, len(header) - 8))


def test_value_is_masked_right_after_text_that_resembles_it() -> None:
    assert Redactor(["aaaaaaaaaaaab"]).text("a" * 20 + "b") == f"{MASK}{MASK}b"


@given(value=VALUES, size=st.integers(0, 60))
def test_truncated_value_is_masked_at_the_end_of_text(value: str, size: int) -> None:
    cut = plain("x" * (ERROR_MESSAGE - size) + value + " and more" * 10, ERROR_MESSAGE)
    masked = Redactor([value]).text(cut)
    assert value not in masked
    assert value[:4] + "…" not in masked or len(value[:4]) < 4


@given(value=VALUES, where=st.data())
def test_value_is_masked_in_results(value: str, where: st.DataObject) -> None:
    leaf = st.just(value) | st.just(f"a {value} b") | st.integers() | st.none() | st.booleans() | st.text(max_size=5)
    document = where.draw(
        st.recursive(leaf, lambda inner: st.lists(inner) | st.dictionaries(st.just(value) | st.text(), inner))
    )
    redactor = Redactor([value])
    masked = redactor.json(msgspec.json.encode(document))
    assert value not in json.dumps(json.loads(masked), ensure_ascii=False)
    if json.dumps(value)[1:-1] not in json.dumps(document):
        assert redactor.json(masked) == masked


def test_number_equal_to_a_value_is_masked() -> None:
    masked = Redactor(["12345678"]).json(b'{"a": 12345678, "b": 1234567, "c": 0.5, "d": [912345678]}')
    assert json.loads(masked) == {"a": MASK, "b": 1234567, "c": 0.5, "d": [MASK]}


def test_document_without_a_value_is_unchanged() -> None:
    document = b'{"a" : 1.50, "b": "text"}'
    assert Redactor(["another-value"]).json(document) is document


def test_end_of_a_value_is_masked_at_the_start_of_a_line() -> None:
    redactor = Redactor(["first-half-second-half"])
    assert redactor.line("it is first-half-se") == f"it is {MASK}"
    assert redactor.line("cond-half, and more") == f"{MASK}, and more"


def test_every_line_of_a_long_value_is_masked() -> None:
    key = "-----BEGIN KEY-----\nMIGHAgEAMBMGByqG\nSM49AgEGCCqGSM49\n-----END KEY-----"
    assert Redactor([key]).line("MIGHAgEAMBMGByqG") == MASK


def assigned(slot: int, value: str | None, **environment: str) -> protocol.Assign:
    secrets = [] if value is None else [TaskSecret("KEY", value, [])]
    work = protocol.Work("x", (None, None), None, 1, b"{}", [], [], secrets=secrets, environment=environment)
    return protocol.Assign(work, [protocol.Assignment(slot, uuid4(), None, b"null")])


def test_reports_mask_the_tasks_secrets_and_the_log_masks_all() -> None:
    """A secret that is a common word must not change the results of other tasks."""
    process = Redaction()
    process.given(assigned(1, "customer-name"))
    process.given(assigned(2, None))
    process.given(assigned(3, None, TOKEN="passed-on-token"))
    text = b'{"field": "customer-name passed-on-token"}'
    first, second, third, printed, progressed = process.cleaned(
        [
            protocol.Finished(1, 0.1, text, [], []),
            protocol.Finished(2, 0.1, text, [], []),
            protocol.Raised(3, 0.1, "passed-on-token", text.decode()),
            protocol.Printed(2, "stdout", text.decode()),
            protocol.Progressed(2, 0.5, "customer-name"),
        ]
    )
    assert isinstance(first, protocol.Finished)
    assert json.loads(first.result) == {"field": f"{MASK} passed-on-token"}
    assert isinstance(second, protocol.Finished)
    assert second.result == text
    assert isinstance(third, protocol.Raised)
    assert third.error_class == MASK
    assert "passed-on-token" not in third.message
    assert isinstance(printed, protocol.Printed)
    assert printed.line == f'{{"field": "{MASK} {MASK}"}}'
    assert isinstance(progressed, protocol.Progressed)
    assert progressed.text == "customer-name"


def test_secrets_are_not_in_any_repr() -> None:
    assign = assigned(1, "a-secret-value", TOKEN="passed-on-token")
    for shown in (repr(assign), repr(assign.work), repr(assign.work.secrets)):
        assert "a-secret-value" not in shown
        assert "passed-on-token" not in shown


@pytest.mark.parametrize("short", ["", "abc", "1234567"])
def test_values_too_short_for_secrets_are_not_masked(short: str) -> None:
    assert not Redactor([short])
