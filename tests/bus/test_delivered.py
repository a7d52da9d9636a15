"""What is written of a command as text is what its readers' structs would have written."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.bus import delivered, telling
from interlock.bus.archived import ArchivedCommand
from interlock.bus.envelope import compose, read
from interlock.bus.packed import commands_of, events_of, packed
from interlock.wire.bus_events import decoded
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
    pack = packed([(1.2, [text] * copies), (None, [text])])
    told = telling.delivered(envelope.metadata, source, "mailer", "send-mail", path="fast", latency_seconds=0.0012)
    assert [decoded(event) for event in events_of(pack)] == [told] * copies
    found = [*commands_of(pack, NOW)]
    assert len(found) == copies + 1
    assert {bytes(each.payload) for each in found} == {envelope.payload}
    kept = ArchivedCommand(
        command_id=command_id,
        source=source,
        target="mailer",
        name="send-mail",
        timestamp=datetime.fromisoformat(envelope.metadata.timestamp),
        version_id="hmac-v12",
        accepted_at=NOW,
        payload=msgspec.Raw(b""),
        replay_id=command_id if replayed else msgspec.UNSET,
        replay_reason='a "reason"' if replayed else msgspec.UNSET,
    )
    assert [msgspec.structs.replace(each, payload=msgspec.Raw(b"")) for each in found] == [kept] * len(found)


def test_what_is_long_is_compressed_and_what_is_short_is_not() -> None:
    raw = signed(NOW.timestamp(), payload={})
    text = delivered.body(read(raw), "acme/billing")
    assert packed([(1.0, [text])]).startswith(b"[")
    assert len(packed([(1.0, [text] * 100)])) < 10 * len(text)
