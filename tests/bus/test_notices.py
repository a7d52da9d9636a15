"""Notices of the shield: clock skew, and keys that are about to expire."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import msgspec
import pytest

from interlock.bus.model import Key, Kind
from interlock.bus.path.caches import Tenant
from interlock.bus.path.verification import Shield
from interlock.wire import commands
from interlock.wire.bus_events import BusEvent, KeyExpiryImminent, LegacyKeyUsed, SkewNearLimit, SkewSample
from interlock.wire.commands import read
from tests.support.signed_commands import SECRET, SOURCE, signed

NOW: Final = 1_800_000_000.0
DAY: Final = 86_400.0
ID: Final = "5c0a0a5e-5f5e-4c0e-8a55-1d2f3a4b5c6d"


def tenant(**key: float | None) -> Tenant:
    made = Tenant(UUID(int=3))
    made.put(Kind.KEYS, [Key(SOURCE, "hmac-v1", SECRET, "expires_at" not in key, **key)])
    made.checked_at |= dict.fromkeys(Kind, NOW)
    return made


def told(known: Tenant, *, skew: float = 0.0, now: float = NOW, shield: Shield | None = None) -> list[BusEvent]:
    shield = shield or Shield(rng=lambda: 1.0)
    verified = shield.verify([signed(now - skew, command_id=ID)], SOURCE, known, now)
    assert isinstance(verified.results[0], commands.Envelope)
    assert {org_id for org_id, _ in verified.notices} <= {known.org_id}
    return [event for _, event in verified.notices]


@pytest.mark.parametrize(
    ("skew", "near"), [(0, False), (47.9, False), (48, True), (-47.9, False), (-48, True), (60, True)]
)
def test_clock_skew_above_80_percent_of_the_window_is_reported(skew: float, near: bool) -> None:
    found = told(tenant(), skew=skew)
    assert [type(event) for event in found] == [SkewNearLimit] * near
    if near:
        assert isinstance(found[0], SkewNearLimit)
        assert (found[0].command_id, found[0].source, found[0].skew_seconds) == (UUID(ID), SOURCE, skew)
        assert (found[0].received_at - found[0].sent_at).total_seconds() == skew


def test_one_command_in_a_hundred_is_a_skew_sample() -> None:
    dice = iter([0.5, 0.0099, 0.01, 0.999])
    shield = Shield(rng=lambda: next(dice))
    found = [told(tenant(), skew=1.5, shield=shield) for _ in range(4)]
    assert [[type(event) for event in events] for events in found] == [[], [SkewSample], [], []]
    (sample,) = found[1]
    assert isinstance(sample, SkewSample)
    assert (sample.message_id, sample.source, sample.skew_seconds) == (UUID(ID), SOURCE, 1.5)


def test_use_of_the_previous_key_is_reported_once_a_minute() -> None:
    known, shield = tenant(expires_at=NOW + 5 * DAY, polled_at=NOW - 60), Shield(rng=lambda: 1.0)
    assert told(tenant()) == []
    (event,) = told(known, shield=shield)
    polled = datetime.fromtimestamp(NOW - 60, UTC)
    assert event == LegacyKeyUsed(version_id="hmac-v1", source=SOURCE, time_of_last_config_poll=polled)
    assert told(known, shield=shield, now=NOW + 59) == []
    assert [type(each) for each in told(known, shield=shield, now=NOW + 60)] == [LegacyKeyUsed]


@pytest.mark.parametrize(
    ("ends", "polled", "imminent"),
    [
        (DAY, None, True),
        (DAY, 12 * 3600 + 1, True),
        (DAY, 12 * 3600 - 1, False),
        (DAY + 1, None, False),
        (60, 30 * DAY, True),
    ],
)
def test_key_that_expires_within_a_day_is_reported_unless_polled(
    ends: float, polled: float | None, imminent: bool
) -> None:
    known = tenant(expires_at=NOW + ends, polled_at=None if polled is None else NOW - polled)
    shield = Shield(rng=lambda: 1.0)
    assert (KeyExpiryImminent in {type(event) for event in told(known, shield=shield)}) == imminent
    if imminent:  # emitted at most once an hour
        assert told(known, shield=shield, now=NOW + 30) == []


def test_refused_command_causes_no_notice() -> None:
    known, shield = tenant(expires_at=NOW + 60), Shield(rng=lambda: 0.0)
    message = msgspec.json.decode(signed(NOW - 50, command_id=ID))
    message["metadata"]["hmac"] = "0" * 64
    assert shield.verify([msgspec.json.encode(message)], SOURCE, known, NOW).notices == []


def test_signatures_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def noted(one: str, other: str) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("interlock.wire.commands.hmac.compare_digest", noted)
    envelope = read(signed(NOW, command_id=ID))
    assert commands.has_signature_of(SECRET, envelope)
    assert compared == [(envelope.metadata.hmac, envelope.metadata.hmac)]
