"""The shield: refuses commands that break the protocol, before any other check. It reads no store.

The checks, in order: the message itself, its timestamp, bans, the version of the key, the signature.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple
from uuid import UUID

from msgspec import UNSET, Raw

from interlock.bus import metrics
from interlock.bus.model import BanKind, Decision, Key, Kind, failed, invalid
from interlock.bus.path.bulk_verification import verify_together
from interlock.bus.path.caches import TTLS, Tenant
from interlock.wire import commands
from interlock.wire.bus_events import (
    BusEvent,
    FailureReason,
    KeyExpiryImminent,
    LegacyKeyUsed,
    SkewNearLimit,
    SkewSample,
)
from interlock.wire.commands import BadMessage, Envelope

EXPIRED_TIMESTAMP: Final = "expired_timestamp"
FUTURE_TIMESTAMP: Final = "future_timestamp"
UNKNOWN_KEY: Final = "unknown_key"
EXPIRED_KEY: Final = "expired_key"
INVALID_HMAC: Final = "invalid_hmac"

NEAR: Final = 0.8
"""Share of the window: with a larger clock skew, the producer gets a warning."""
SAMPLED: Final = 0.01
IMMINENT_SECONDS: Final = 86_400.0
"""A key that expires within this time is reported, if its producer has not fetched the next one."""
POLL_SECONDS: Final = 12 * 3600.0
"""How often producers are expected to fetch their configuration."""
_KEYS_FRESH: Final = TTLS[Kind.KEYS].fresh
_REPEAT_SECONDS: Final = {LegacyKeyUsed: 60.0, KeyExpiryImminent: 3600.0}
_MAX_REPORTED: Final = 10_000

Notice = tuple[UUID, BusEvent]
"""An event that accompanies the decisions, and the org that receives it."""


class Verified(NamedTuple):
    results: list[Envelope | Decision]
    """The message for each that passed, the refusal for each other; in the order of the request."""
    notices: list[Notice]


class Shield:
    def __init__(
        self,
        *,
        window_seconds: float = 60.0,
        message_limit: int = commands.MESSAGE_LIMIT,
        rng: Callable[[], float] = random.random,
    ) -> None:
        self._window = window_seconds
        self._limit = message_limit
        self._rng = rng
        self._reported: dict[tuple[type[BusEvent], str, str], float] = {}

    def verify(
        self, raws: Sequence[bytes | Raw], source: str, tenant: Tenant, now: float, *, replays: bool = False
    ) -> Verified:
        """Verifies each message of a request by itself."""
        together = verify_together(raws, source, tenant, now, limit=self._limit, window=self._window)
        if together is not None:
            return Verified([*together], self._notices(together, source, tenant, now))
        results = [self._verify(raw, source, tenant, now, replays) for raw in raws]
        passed = [each for each in results if isinstance(each, Envelope)]
        return Verified(results, self._notices(passed, source, tenant, now))

    def _verify(self, raw: bytes | Raw, source: str, tenant: Tenant, now: float, replays: bool) -> Envelope | Decision:
        try:
            envelope = commands.read(raw, limit=self._limit, replays=replays)
        except BadMessage as error:
            return invalid(error.reason, str(error))
        skew = now - envelope.sent_at
        if not -self._window <= skew <= self._window:
            return self._outside(envelope, skew)
        if tenant.bans:
            command = envelope.command
            ban = tenant.ban(BanKind.HARD, source, command.target, command.name, now)
            if ban is not None:
                return failed(envelope, FailureReason.FAIRNESS_VIOLATION, wait_seconds=ban.until - now, ban=ban)
        key = tenant.keys.get((source, envelope.metadata.version_id))
        if key is None:
            return invalid(UNKNOWN_KEY, "The key of this service has no such version.", envelope)
        if key.expires_at is not None and key.expires_at <= now:
            return invalid(EXPIRED_KEY, "This version of the key has expired: sign with the current one.", envelope)
        if not commands.has_signature_of(key.secret, envelope):
            metrics.HMAC_FAILURES.inc()
            return invalid(INVALID_HMAC, "The signature does not match this message and key.", envelope)
        return envelope

    def _outside(self, envelope: Envelope, skew: float) -> Decision:
        direction = "in the future" if skew < 0 else "in the past"
        reason = FUTURE_TIMESTAMP if skew < 0 else EXPIRED_TIMESTAMP
        return invalid(
            reason, f"The timestamp is {abs(skew):.1f} s {direction}; at most {self._window:g} s are allowed.", envelope
        )

    def _notices(self, envelopes: Sequence[Envelope], source: str, tenant: Tenant, now: float) -> list[Notice]:
        """Returns warnings about clocks and keys of the messages that passed."""
        age = now - tenant.checked_at[Kind.KEYS]
        if envelopes and age >= _KEYS_FRESH * tenant.shorter:
            tenant.due = True
            metrics.CACHE_USAGE_STALE["hmac"].inc(len(envelopes))
            metrics.CACHE_STALE_WINDOW["hmac"].set(age - _KEYS_FRESH)
        events: list[BusEvent] = []
        near = NEAR * self._window
        for envelope in envelopes:
            key = tenant.keys[source, envelope.metadata.version_id]
            if not key.current:
                events += self._key_warnings(source, key, now)
            if abs(now - envelope.sent_at) >= near:
                events.append(_near_limit(envelope, source, now))
            if self._rng() < SAMPLED:
                events.append(_sample(envelope, source, now))
        return [(tenant.org_id, event) for event in events]

    def _key_warnings(self, source: str, key: Key, now: float) -> list[BusEvent]:
        """Returns warnings about a key that is not the current one; each at most once per period, since a busy producer
        would otherwise get one for every command."""
        kinds: list[type[LegacyKeyUsed | KeyExpiryImminent]] = [LegacyKeyUsed]
        expires_soon = key.expires_at is not None and key.expires_at - now <= IMMINENT_SECONDS
        if expires_soon and (key.polled_at is None or now - key.polled_at > POLL_SECONDS):
            kinds.append(KeyExpiryImminent)
        polled = UNSET if key.polled_at is None else datetime.fromtimestamp(key.polled_at, UTC)
        return [
            kind(version_id=key.version_id, source=source, time_of_last_config_poll=polled)
            for kind in kinds
            if self._is_due(kind, key, now)
        ]

    def _is_due(self, kind: type[LegacyKeyUsed | KeyExpiryImminent], key: Key, now: float) -> bool:
        entry = (kind, key.source, key.version_id)
        if now - self._reported.get(entry, 0.0) < _REPEAT_SECONDS[kind]:
            return False
        if len(self._reported) >= _MAX_REPORTED:
            self._reported.clear()
        self._reported[entry] = now
        return True


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
