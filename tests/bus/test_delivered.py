"""What is written of a command as text is what its readers' structs would have written."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.bus import delivered
from interlock.bus.archive_file import parquet
from interlock.bus.envelope import compose, read
from interlock.bus.packed import packed
from tests.bus.producing import SECRET, signed, timestamp

_payloads = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NOW = datetime(2026, 11, 16, 22, 0, 0, 123456, UTC)


@settings(max_examples=150)
@given(_payloads, st.uuids(), st.booleans(), st.sampled_from([1, 20]))
def test_texts_and_structs_of_a_command_say_the_same(
    payload: Any, command_id: UUID, replayed: bool, copies: int
) -> None:
    raw = compose(
        SECRET,
        command_id=str(command_id),
        timestamp=timestamp(NOW.timestamp()),
        version_id="hmac-v12",
        target="mailer",
        name="send-mail",
        payload=msgspec.json.encode(payload),
        replay=(str(command_id), 'a "reason"') if replayed else None,
    )
    envelope, source = read(raw, replays=True), "acme/billing"
    text = delivered.body(envelope, source)
    sent = delivered.delivered(text)
    assert (sent.metadata, sent.command.source) == (envelope.metadata, source)
    assert msgspec.json.decode(sent.command.payload) == payload
    (row, *others) = _archived((packed([text] * copies), NOW))
    assert others == [row | {"position": 7 + n} for n in range(1, copies)]
    assert row == {
        "position": 7,
        "command_id": str(command_id),
        "source": source,
        "target": "mailer",
        "name": "send-mail",
        "timestamp": datetime.fromisoformat(envelope.metadata.timestamp),
        "accepted_at": NOW,
        "version_id": "hmac-v12",
        "payload": envelope.payload.decode(),
        "replay_id": str(command_id) if replayed else None,
        "replay_reason": 'a "reason"' if replayed else None,
    }


def _archived(*packs: tuple[bytes, datetime]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(parquet(packs, 7))).to_pylist()
    return rows


def test_the_archive_knows_when_each_write_was_accepted() -> None:
    text = delivered.body(read(signed(NOW.timestamp())), "acme/billing")
    later = NOW + timedelta(seconds=1)
    rows = _archived((packed([text] * 2), NOW), (packed([text]), later))
    assert [(row["position"], row["accepted_at"]) for row in rows] == [(7, NOW), (8, NOW), (9, later)]


@pytest.mark.parametrize(
    ("fraction", "kept"), [("", 0), (".5", 500_000), (".123456", 123_456), (".123456789", 123_456)]
)
def test_the_archive_keeps_the_microseconds_of_what_was_signed(fraction: str, kept: int) -> None:
    text = delivered.body(read(signed(NOW.timestamp())), "acme/billing")
    stamp = json.loads(text)["metadata"]["timestamp"]
    (row,) = _archived((packed([text.replace(stamp, f"2026-11-16T22:00:00{fraction}Z")]), NOW))
    assert row["timestamp"] == datetime(2026, 11, 16, 22, 0, 0, kept, UTC)


def test_what_is_long_is_compressed_and_what_is_short_is_not() -> None:
    raw = signed(NOW.timestamp(), payload={})
    text = delivered.body(read(raw), "acme/billing")
    assert packed([text]).startswith(b"[")
    assert len(packed([text] * 100)) < 10 * len(text)
