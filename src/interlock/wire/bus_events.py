"""Telemetry of the command bus: every event that a tenant receives, with its fields.

Names are a contract with consumers in other languages. An event is a flat JSON object with its type in `event`. Members
without a value are omitted.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Final, Literal
from uuid import UUID

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.json import Decoder, Encoder


class FailureReason(StrEnum):
    """The reason for which a valid command was not dispatched."""

    RATE_LIMIT_EXCEEDED = "rate-limit-exceeded"
    SOURCE_QUOTA = "rate-limit-exceeded: source-quota"
    ACL_DENY = "acl-deny"
    ROUTE_MISSING = "route-missing"
    DELIVERY_FAILURE = "delivery-failure"
    FAIRNESS_VIOLATION = "fairness-violation"


class BusEvent(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", gc=False):
    """The base of all events."""


class _OfCommand(BusEvent, frozen=True, kw_only=True):
    command_id: UUID
    source: str
    target: str
    name: str = field(name="command.name")
    timestamp: datetime
    """As signed by the producer."""


class _Replayable(_OfCommand, frozen=True, kw_only=True):
    replay: bool = False
    replay_reason: str | UnsetType = UNSET
    replay_id: UUID | UnsetType = UNSET


class CommandDelivered(_Replayable, frozen=True, kw_only=True, tag="snavio.command.delivered"):
    """The command passed every check and is durable at the destination of its route."""

    path: Literal["fast", "slow"]
    dispatch_latency_ms: float


class CommandInvalid(BusEvent, frozen=True, kw_only=True, tag="snavio.command.invalid"):
    """The message breaks the protocol. The event has its readable fields; `source` comes from the credentials."""

    reason: str
    """A short code, such as `expired_timestamp`."""
    command_id: UUID | UnsetType = UNSET
    source: str | UnsetType = UNSET
    target: str | UnsetType = UNSET
    name: str | UnsetType = field(name="command.name", default=UNSET)
    timestamp: datetime | UnsetType = UNSET
    skew_seconds: float | UnsetType = UNSET
    """Set, with the next two, if the reason is the timestamp."""
    sent_at: datetime | UnsetType = UNSET
    received_at: datetime | UnsetType = UNSET
    replay: bool = False
    """True, with the next two, for a message of the platform's replay."""
    replay_reason: str | UnsetType = UNSET
    replay_id: UUID | UnsetType = UNSET


class CommandFailed(BusEvent, frozen=True, kw_only=True, tag="snavio.command.failed"):
    """The message is valid, but was not dispatched. Producers may ignore the retry hints."""

    reason: FailureReason
    command_id: UUID | UnsetType = UNSET
    source: str | UnsetType = UNSET
    target: str | UnsetType = UNSET
    name: str | UnsetType = field(name="command.name", default=UNSET)
    timestamp: datetime | UnsetType = UNSET
    retry_after_ms: int | UnsetType = UNSET
    throttle_until: datetime | UnsetType = UNSET
    source_share: float | UnsetType = UNSET
    """Set, with the next two, for a fairness violation."""
    competing_share: float | UnsetType = UNSET
    dispatch_volume: int | UnsetType = UNSET
    replay: bool = False
    replay_reason: str | UnsetType = UNSET
    replay_id: UUID | UnsetType = UNSET


class CommandDuplicate(_Replayable, frozen=True, kw_only=True, tag="snavio.command.duplicate"):
    """A route with strict deduplication has already delivered a command with this id."""

    dedupe_mode: Literal["strict"]


class ExecutedAfterAclRevoked(BusEvent, frozen=True, kw_only=True, tag="snavio.command.executed_after_acl_revoked"):
    """A command was dispatched by a stale ACL that had been revoked."""

    source: str
    target: str
    name: str = field(name="command.name")
    stale_duration_seconds: float
    acl_revocation_timestamp: datetime


class WarmPathBan(BusEvent, frozen=True, kw_only=True, tag="snavio.fairness.warm-path-ban"):
    """Sent once per ban."""

    source: str
    target: str
    name: str = field(name="command.name")
    source_share: float
    competing_share: float
    retry_after_ms: int
    throttle_until: datetime


class AbuseDetected(BusEvent, frozen=True, kw_only=True, tag="snavio.fairness.abuse_detected"):
    """Sent once per ban, by the auditor of all dispatchers."""

    source: str
    affected_targets: list[str]
    total_violations: int
    ban_applied_until: datetime


class LegacyKeyUsed(BusEvent, frozen=True, kw_only=True, tag="snavio.secret.legacy_key_used"):
    version_id: str
    source: str
    time_of_last_config_poll: datetime | UnsetType = UNSET


class KeyExpiryImminent(BusEvent, frozen=True, kw_only=True, tag="snavio.secret.key_expiry_imminent"):
    version_id: str
    source: str
    time_of_last_config_poll: datetime | UnsetType = UNSET


class SkewNearLimit(BusEvent, frozen=True, kw_only=True, tag="snavio.telemetry.skew_near_limit"):
    """`messageId` and `command_id` have the same value: consumers use either name."""

    command_id: UUID
    message_id: UUID = field(name="messageId")
    source: str
    sent_at: datetime
    received_at: datetime
    skew_seconds: float


class SkewSample(BusEvent, frozen=True, kw_only=True, tag="snavio.telemetry.skew_sample"):
    message_id: UUID = field(name="messageId")
    source: str
    skew_seconds: float
    sent_at: datetime
    received_at: datetime


class TelemetryDropped(BusEvent, frozen=True, kw_only=True, tag="snavio.telemetry.dropped"):
    tenant: str
    dropped_events: int
    reason: Literal["queue_unconsumed"]
    queue_age_seconds: float
    last_received_at: datetime | UnsetType = UNSET
    """Omitted if nobody has ever received from the queue."""


Telemetry = (
    CommandDelivered
    | CommandInvalid
    | CommandFailed
    | CommandDuplicate
    | ExecutedAfterAclRevoked
    | WarmPathBan
    | AbuseDetected
    | LegacyKeyUsed
    | KeyExpiryImminent
    | SkewNearLimit
    | SkewSample
    | TelemetryDropped
)

CATALOGUE: Final[tuple[type[BusEvent], ...]] = (
    CommandDelivered,
    CommandInvalid,
    CommandFailed,
    CommandDuplicate,
    ExecutedAfterAclRevoked,
    WarmPathBan,
    AbuseDetected,
    LegacyKeyUsed,
    KeyExpiryImminent,
    SkewNearLimit,
    SkewSample,
    TelemetryDropped,
)


def name_of(kind: type[BusEvent]) -> str:
    """Returns the name of the event on the wire."""
    return str(kind.__struct_config__.tag)


EVENT_TYPES: Final = {name_of(kind): kind for kind in CATALOGUE}

_encoder: Final = Encoder()
_decoder: Final[Decoder[Telemetry]] = Decoder(Telemetry)


def event_type(event: BusEvent) -> str:
    return name_of(type(event))


def encoded(event: BusEvent) -> bytes:
    return _encoder.encode(event)


def decoded(body: bytes | str) -> Telemetry:
    return _decoder.decode(body)
