"""The first stage: refuses what breaks the protocol, before anything else is asked of it. Touches no store.

In this order: the message itself, the window of its timestamp, a ban, the version of the key, the signature.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from msgspec import UNSET, Raw

from interlock.bus import envelope as envelopes
from interlock.bus import metrics
from interlock.bus.batch import read_all
from interlock.bus.caches import TTLS, Tenant
from interlock.bus.decision import Decision, failed, invalid
from interlock.bus.envelope import BadMessage, Envelope, proves_all
from interlock.bus.model import BanKind, Key, Kind
from interlock.wire.bus_events import (
    BusEvent,
    FailureReason,
    KeyExpiryImminent,
    LegacyKeyUsed,
    SkewNearLimit,
    SkewSample,
)

EXPIRED_TIMESTAMP: Final = "expired_timestamp"
FUTURE_TIMESTAMP: Final = "future_timestamp"
UNKNOWN_KEY: Final = "unknown_key"
EXPIRED_KEY: Final = "expired_key"
INVALID_HMAC: Final = "invalid_hmac"

NEAR: Final = 0.8
"""Of the window: from here on the producer is told that its clock is off."""
SAMPLED: Final = 0.01
IMMINENT_SECONDS: Final = 86_400.0
"""A key that ends within this, of a producer that has not asked for the next one, is told of."""
POLL_SECONDS: Final = 12 * 3600.0
"""How often producers are expected to ask for their configuration."""
_KEYS: Final = Kind.KEYS
_KEYS_FRESH: Final = TTLS[_KEYS].fresh
_TOLD_AGAIN_SECONDS: Final = {LegacyKeyUsed: 60.0, KeyExpiryImminent: 3600.0}
_MOST_TOLD: Final = 10_000


class Shield:
    def __init__(
        self,
        *,
        window_seconds: float = 60.0,
        message_limit: int = envelopes.MESSAGE_LIMIT,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._window = window_seconds
        self._limit = message_limit
        self._dice = dice
        self._told: dict[tuple[type[BusEvent], str, str], float] = {}
        self.notices: list[tuple[UUID, BusEvent]] = []
        """Events beside the decisions; whoever writes those takes them along."""

    def check(
        self, raw: bytes | Raw, source: str, tenant: Tenant, now: float, *, replays: bool = False
    ) -> Envelope | Decision:
        """The message, if all about it is right."""
        try:
            envelope = envelopes.read(raw, limit=self._limit, replays=replays)
        except BadMessage as error:
            return invalid(error.reason, str(error))
        return self._check_sender(envelope, source, tenant, now)

    def check_all(
        self, raws: Sequence[bytes | Raw], source: str, tenant: Tenant, now: float, *, replays: bool = False
    ) -> list[Envelope | Decision]:
        """As `check` of each, for less where all of them are plain messages."""
        read = read_all(raws, limit=self._limit)
        if read is None:
            return [self.check(raw, source, tenant, now, replays=replays) for raw in raws]
        if not self._all_pass(read, source, tenant, now):
            return [self._check_sender(envelope, source, tenant, now) for envelope in read]
        dice = self._dice
        self.notices += [(tenant.org_id, _sample(each, source, now)) for each in read if dice() < SAMPLED]
        return [*read]

    def _all_pass(self, envelopes: Sequence[Envelope], source: str, tenant: Tenant, now: float) -> bool:
        """Whether there is nothing to say of any of them: all in time, by one key that is current and fresh."""
        near = NEAR * self._window
        moments = {envelope.sent_at for envelope in envelopes}
        versions = {envelope.metadata.version_id for envelope in envelopes}
        if tenant.bans or len(versions) != 1 or not now - near < min(moments) <= max(moments) < now + near:
            return False
        key = tenant.keys.get((source, versions.pop()))
        if key is None or not key.current or (key.expires_at is not None and key.expires_at <= now):
            return False
        fresh = now - tenant.checked_at[_KEYS] < _KEYS_FRESH * tenant.shorter
        return fresh and proves_all(key.secret, envelopes)

    def _check_sender(self, envelope: Envelope, source: str, tenant: Tenant, now: float) -> Envelope | Decision:
        """Of a message that is one: whether it comes in time, from who may send, and from who it says."""
        skew = now - envelope.sent_at
        if not -self._window <= skew <= self._window:
            return self._outside(envelope, skew)
        command = envelope.command
        ban = tenant.ban(BanKind.HARD, source, command.target, command.name, now)
        if ban is not None:
            return failed(envelope, FailureReason.FAIRNESS_VIOLATION, wait_seconds=ban.until - now, ban=ban)
        key = tenant.keys.get((source, envelope.metadata.version_id))
        if key is None:
            return invalid(UNKNOWN_KEY, "There is no such version of this service's key.", envelope)
        if key.expires_at is not None and key.expires_at <= now:
            return invalid(EXPIRED_KEY, "This version of the key has ended: sign with the current one.", envelope)
        if not envelopes.proves(key.secret, envelope):
            metrics.HMAC_FAILURES.inc()
            return invalid(INVALID_HMAC, "The signature is not that of this message and key.", envelope)
        self._note(envelope, source, tenant, key, now)
        return envelope

    def _outside(self, envelope: Envelope, skew: float) -> Decision:
        early = "in the future" if skew < 0 else "in the past"
        reason = FUTURE_TIMESTAMP if skew < 0 else EXPIRED_TIMESTAMP
        return invalid(
            reason, f"The timestamp is {abs(skew):.1f} s {early}; at most {self._window:g} s are allowed.", envelope
        )

    def _note(self, envelope: Envelope, source: str, tenant: Tenant, key: Key, now: float) -> None:
        age = now - tenant.checked_at[_KEYS]
        if age >= _KEYS_FRESH * tenant.shorter:
            tenant.due = True
            metrics.CACHE_USAGE_STALE["hmac"].inc()
            metrics.CACHE_STALE_WINDOW["hmac"].set(age - _KEYS_FRESH)
        if not key.current:
            self._note_key(source, tenant, key, now)
        if abs(now - envelope.sent_at) >= NEAR * self._window:
            self.notices.append((tenant.org_id, _near_limit(envelope, source, now)))
        if self._dice() < SAMPLED:
            self.notices.append((tenant.org_id, _sample(envelope, source, now)))

    def _note_key(self, source: str, tenant: Tenant, key: Key, now: float) -> None:
        polled = UNSET if key.polled_at is None else datetime.fromtimestamp(key.polled_at, UTC)
        told: dict[str, object] = {"version_id": key.version_id, "source": source, "time_of_last_config_poll": polled}
        self._once(LegacyKeyUsed, key, tenant, now, told)
        ends_soon = key.expires_at is not None and key.expires_at - now <= IMMINENT_SECONDS
        if ends_soon and (key.polled_at is None or now - key.polled_at > POLL_SECONDS):
            self._once(KeyExpiryImminent, key, tenant, now, told)

    def _once(
        self,
        kind: type[LegacyKeyUsed | KeyExpiryImminent],
        key: Key,
        tenant: Tenant,
        now: float,
        fields: dict[str, object],
    ) -> None:
        """Per key and while: a busy producer needs to hear it once, not with every command."""
        known = (kind, key.source, key.version_id)
        if now - self._told.get(known, 0.0) < _TOLD_AGAIN_SECONDS[kind]:
            return
        if len(self._told) >= _MOST_TOLD:
            self._told.clear()
        self._told[known] = now
        self.notices.append((tenant.org_id, kind(**fields)))  # type: ignore[arg-type]


def _near_limit(envelope: Envelope, source: str, now: float) -> SkewNearLimit:
    command_id = UUID(envelope.metadata.id)
    return SkewNearLimit(
        command_id=command_id,
        message_id=command_id,
        source=source,
        sent_at=datetime.fromtimestamp(envelope.sent_at, UTC),
        received_at=datetime.fromtimestamp(now, UTC),
        skew_seconds=round(now - envelope.sent_at, 3),
    )


def _sample(envelope: Envelope, source: str, now: float) -> SkewSample:
    return SkewSample(
        message_id=UUID(envelope.metadata.id),
        source=source,
        skew_seconds=round(now - envelope.sent_at, 3),
        sent_at=datetime.fromtimestamp(envelope.sent_at, UTC),
        received_at=datetime.fromtimestamp(now, UTC),
    )
