"""Command messages: decoding, refusals with their reasons, and signatures by vectors for other languages."""

from __future__ import annotations

import copy
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from interlock.wire.commands import BadMessage, compose, has_signature_of, read, salvage

VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text())
SECRET = bytes.fromhex(VECTORS["secret"])
NAMES: dict[str, Any] = {
    "command_id": "0192f0c1-7a1b-7c3d-8e4f-5a6b7c8d9e0f",
    "version_id": "hmac-v1",
    "target": "bot",
    "name": "say",
}
GOOD = compose(SECRET, timestamp="2026-01-31T12:00:00Z", payload=b'{"text": "hi"}', **NAMES)


def changed(**fields: Any) -> bytes:
    """Returns the valid message with fields replaced; a value of `...` removes the field."""
    message = json.loads(GOOD)
    for dotted, value in fields.items():
        block, _, field = dotted.partition("__")
        if value is ...:
            del message[block][field]
        else:
            message[block][field] = value
    return json.dumps(message).encode()


def reason(raw: bytes, **how: Any) -> tuple[str, str]:
    with pytest.raises(BadMessage) as refused:
        read(raw, **how)
    return refused.value.reason, str(refused.value)


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda vector: vector["case"])
def test_signatures_match_the_vectors(vector: dict[str, Any]) -> None:
    message = copy.deepcopy(vector["message"])
    envelope = read(json.dumps(message).encode(), replays=True)
    assert envelope.signed.decode() == vector["signed"]
    assert has_signature_of(SECRET, envelope)
    # The signature as a producer in another language computes it, from the documentation alone.
    proof = message["metadata"].pop("hmac")
    payload = json.loads(vector["payload"], parse_int=float)
    assert rfc8785.dumps(message | {"command": message["command"] | {"payload": payload}}) == envelope.signed
    assert hmac.new(SECRET, envelope.signed, hashlib.sha256).hexdigest() == proof


def test_documentation_shows_a_vector_to_the_byte() -> None:
    page = Path("docs/bus.md").read_text()
    (shown,) = [vector for vector in VECTORS["vectors"] if vector["message"]["metadata"]["hmac"] in page]
    assert shown["signed"] in page
    assert VECTORS["secret"] in page


@pytest.mark.parametrize("part", ["id", "timestamp", "target", "name", "payload", "secret"])
def test_signature_covers_every_field(part: str) -> None:
    others: dict[str, dict[str, Any]] = {
        "id": {"metadata__id": "0192f0c1-7a1b-7c3d-8e4f-5a6b7c8d9e00"},
        "timestamp": {"metadata__timestamp": "2026-01-31T12:00:00.0Z"},
        "target": {"command__target": "bank"},
        "name": {"command__name": "pay"},
        "payload": {"command__payload": {"text": "ho"}},
        "secret": {},
    }
    secret = bytes(32) if part == "secret" else SECRET
    assert not has_signature_of(secret, read(changed(**others[part])))
    assert has_signature_of(SECRET, read(GOOD))


FIELDS = ["id", "timestamp", "type", "version_id", "hmac"]


@pytest.mark.parametrize("field", [*(f"metadata__{name}" for name in FIELDS), "command__target", "command__name"])
@pytest.mark.parametrize("value", [..., None, 7, "", [], {}, "x" * 300, "\u0410", "a\n", "\u0000"])
def test_missing_or_malformed_field_is_refused_by_name(field: str, value: Any) -> None:
    code, sentence = reason(changed(**{field: value}))
    missing = field == "metadata__hmac" and value is ...
    assert code == ("missing_hmac" if missing else "malformed")
    assert field.partition("__")[2] in sentence


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata__id", NAMES["command_id"].upper()),
        ("metadata__id", "{" + NAMES["command_id"] + "}"),
        ("metadata__id", NAMES["command_id"].replace("-", "")),
        ("metadata__timestamp", "2026-01-31T12:00:00+00:00"),
        ("metadata__timestamp", "2026-01-31 12:00:00Z"),
        ("metadata__timestamp", "2026-02-30T12:00:00Z"),
        ("metadata__timestamp", "2026-01-31T12:00:60Z"),
        ("metadata__timestamp", "0000-01-31T12:00:00Z"),
        ("metadata__type", "snavio.command-sent "),
        ("metadata__version_id", "hmac-v01"),
        ("metadata__hmac", "A" * 64),
        ("command__target", "dis\u0441ord-bot"),
        ("command__target", "discord--bot"),
        ("command__target", "Discord-bot"),
        ("command__target", "x" * 65),
        ("command__name", "post-message\u200b"),
        ("command__name", "\uff50ost"),
    ],
)
def test_each_value_has_one_spelling(field: str, value: str) -> None:
    code, sentence = reason(changed(**{field: value}))
    assert (code, field.partition("__")[2] in sentence) == ("malformed", True)


def test_message_with_a_source_is_refused() -> None:
    assert reason(changed(command__source="org/bank"))[0] == "command_source_present"
    assert reason(changed(command__source=None, metadata__hmac=...))[0] == "command_source_present"


def test_unknown_fields_are_refused_at_every_level() -> None:
    extra = json.loads(GOOD) | {"source": "org/bank"}
    for raw in (changed(metadata__source="x"), changed(command__queue="x"), json.dumps(extra).encode()):
        assert reason(raw)[0] == "malformed"


@pytest.mark.parametrize("written", [b'"name":', b'"n\\u0061me":', b'"payload":'])
def test_repeated_key_is_refused_at_every_level(written: bytes) -> None:
    for key in (b'"command":{', b'"metadata":{"id":'):
        name = key[: key.index(b":") + 1]
        twice = GOOD.replace(name, name + b"{}," + name, 1)
        assert reason(twice)[0] == "malformed"
    twin = GOOD.replace(b'"target":', written + b'"say","target":', 1)
    assert reason(twin) == ("malformed", "The message cannot be read: an object has the same key twice.")


def test_message_over_the_size_limit_is_refused() -> None:
    assert reason(GOOD, limit=len(GOOD) - 1)[0] == "too_large"
    assert read(GOOD, limit=len(GOOD)).command.name == "say"


@pytest.mark.parametrize("raw", [b"", b"x", b"[]", b"7", b"null", b"{}", b"\xff", GOOD[:-1], GOOD + GOOD, b"[" * 9_999])
def test_arbitrary_text_is_malformed(raw: bytes) -> None:
    assert reason(raw)[0] == "malformed"
    assert salvage(raw) == {}


@given(st.binary(max_size=40), st.integers(0, len(GOOD)), st.integers(0, 30))
def test_damaged_message_is_unchanged_or_fails_verification(noise: bytes, at: int, gone: int) -> None:
    raw = GOOD[:at] + noise + GOOD[at + gone :]
    try:
        envelope = read(raw)
    except BadMessage:
        return
    assert not has_signature_of(SECRET, envelope) or envelope.signed == read(GOOD).signed


def test_only_a_replay_may_have_replay_fields() -> None:
    marks = ("0192f0c1-7a1b-7c3d-8e4f-000000000001", "lost: again")
    replayed = compose(SECRET, timestamp="2026-01-31T12:00:00Z", payload=b"1", replay=marks, **NAMES)
    assert reason(replayed)[0] == "replay_claimed"
    envelope = read(replayed, replays=True)
    assert (envelope.metadata.replay_id, envelope.metadata.replay_reason) == marks
    assert has_signature_of(SECRET, envelope)
    for field, value in [("replayed", False), ("replay_id", "x"), ("replay_reason", ""), ("replay_reason", "x" * 201)]:
        odd = json.loads(replayed)
        odd["metadata"][field] = value
        assert reason(json.dumps(odd).encode(), replays=True)[0] == "malformed"
    assert reason(changed(metadata__replay_id=marks[0]), replays=True)[0] == "malformed"


def test_readable_fields_of_a_bad_message_are_salvaged_and_truncated() -> None:
    found = salvage(changed(command__target="x" * 9_000, command__payload={"secret": 1}))
    assert found["command.target"] == "x" * 200
    assert found["metadata.id"] == NAMES["command_id"]
    assert not any("payload" in name for name in found)
