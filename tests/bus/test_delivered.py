"""Bodies of delivered commands: the same content for the target, the slow stage and the archive."""

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

from interlock.bus.path import delivery
from interlock.bus.path.delivery import packed
from interlock.bus.replay.archive import parquet
from interlock.wire.commands import compose, read
from tests.support.signed_commands import SECRET, signed, timestamp

_payloads = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NOW = datetime(2026, 11, 16, 22, 0, 0, 123456, UTC)


@settings(max_examples=150)
@given(_payloads, st.uuids(), st.booleans(), st.sampled_from([1, 20]))
def test_body_and_archive_row_have_the_content_of_the_message(
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
    text = delivery.body(envelope, source)
    sent = delivery.delivered(text)
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


def test_archive_has_the_acceptance_time_of_each_write() -> None:
    text = delivery.body(read(signed(NOW.timestamp())), "acme/billing")
    later = NOW + timedelta(seconds=1)
    rows = _archived((packed([text] * 2), NOW), (packed([text]), later))
    assert [(row["position"], row["accepted_at"]) for row in rows] == [(7, NOW), (8, NOW), (9, later)]


@pytest.mark.parametrize(
    ("fraction", "kept"), [("", 0), (".5", 500_000), (".123456", 123_456), (".123456789", 123_456)]
)
def test_archive_keeps_microseconds_of_the_signed_timestamp(fraction: str, kept: int) -> None:
    text = delivery.body(read(signed(NOW.timestamp())), "acme/billing")
    stamp = json.loads(text)["metadata"]["timestamp"]
    (row,) = _archived((packed([text.replace(stamp, f"2026-11-16T22:00:00{fraction}Z")]), NOW))
    assert row["timestamp"] == datetime(2026, 11, 16, 22, 0, 0, kept, UTC)


def test_only_long_packs_are_compressed() -> None:
    raw = signed(NOW.timestamp(), payload={})
    text = delivery.body(read(raw), "acme/billing")
    assert packed([text]).startswith(b"[")
    assert len(packed([text] * 100)) < 10 * len(text)
