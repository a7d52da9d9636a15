"""What is written of a command as text is what its readers' structs would have written."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.bus import delivered, telling
from interlock.bus.archived import archived
from interlock.bus.effects import _replayed
from interlock.bus.envelope import compose, read
from interlock.wire.bus_events import decoded
from tests.bus.producing import SECRET, timestamp

_payloads = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**50), 2**50) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NOW = datetime(2026, 11, 16, 22, 0, 0, 123456, UTC)


@settings(max_examples=150)
@given(_payloads, st.uuids(), st.booleans())
def test_texts_and_structs_of_a_command_say_the_same(payload: Any, command_id: UUID, replayed: bool) -> None:
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
    sent = delivered.delivered(delivered.body(envelope, source))
    assert (sent.metadata, sent.command.source) == (envelope.metadata, source)
    assert msgspec.json.decode(sent.command.payload) == payload
    if replayed:
        return
    told = telling.delivered(envelope.metadata, source, "mailer", "send-mail", path="fast", latency_seconds=0.0012)
    assert decoded(delivered.told(envelope, source, 1.2)) == told
    (kept,) = archived(f"[{delivered.kept(envelope, source, NOW.isoformat())}]")
    assert msgspec.structs.replace(kept, payload=msgspec.Raw(b"")) == msgspec.structs.replace(
        _replayed(source, envelope, NOW), payload=msgspec.Raw(b"")
    )
    assert bytes(kept.payload) == envelope.payload
