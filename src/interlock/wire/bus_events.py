"""Telemetry of the command bus: every event that a tenant receives, with its fields.

Names are a contract with consumers in other languages. An event is a flat JSON object with its type in `event`. Members
without a value are omitted.

Alerts report events of one kind out of band: here are their channels, and the health of routes.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field
from msgspec.json import Decoder, Encoder

from interlock.wire.base import Reply, Request


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


ROUTE_UNHEALTHY: Final = "snavio.route.unhealthy"
"""The queue of a route is not drained fast enough, or has no consumer."""
DEAD_LETTERS: Final = "interlock.queue.dead_letters"
"""Wake-ups of tasks of the org became dead letters: received too often without being settled."""
CRITICAL: Final = frozenset(name_of(kind) for kind in (CommandInvalid, TelemetryDropped, KeyExpiryImminent))
"""Events that need at least one channel."""
ALERTED: Final = (
    *sorted(CRITICAL),
    name_of(ExecutedAfterAclRevoked),
    name_of(WarmPathBan),
    name_of(AbuseDetected),
    ROUTE_UNHEALTHY,
    DEAD_LETTERS,
)


class ChannelKind(StrEnum):
    DASHBOARD = "dashboard"
    EMAIL = "email"
    WEBHOOK = "webhook"


class Channel(Request, frozen=True, kw_only=True):
    kind: ChannelKind
    to: Annotated[str, Meta(max_length=254)] = ""
    """An e-mail address, or the name of a webhook of the org; empty for a dashboard."""


class AlertSettings(Request, frozen=True, kw_only=True):
    """`PUT /v1/alert-channels/{event}`: the channels of one kind of event. An empty list turns its alerts off."""

    channels: Annotated[list[Channel], Meta(max_length=20)]


class AlertSettingsView(Reply, frozen=True, kw_only=True):
    event: str
    critical: bool
    """The alert cannot be turned off."""
    channels: list[Channel]
    changed_by: str | None
    changed_at: datetime | None


class AlertSettingsList(Reply, frozen=True, kw_only=True):
    events: list[AlertSettingsView]


class AlertView(Reply, frozen=True, kw_only=True):
    alert_id: UUID
    org: str
    event: str
    critical: bool
    opened_at: datetime
    last_at: datetime
    told: int
    """Number of events of this kind since the alert was opened."""
    sample: Raw
    """The first of them."""
    unrouted: bool
    """The alert is critical, has neither an e-mail address nor a webhook, and is flagged to operations."""
    resolved_at: datetime | None
    resolved_by: str | None


class AlertPage(Reply, frozen=True, kw_only=True):
    alerts: list[AlertView]
    next_cursor: str | None


class RouteStatus(StrEnum):
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    """The oldest message has waited for more than twice `expected_drain_seconds`."""
    STALLED = "stalled"
    """The queue has grown at each of the last checks."""
    UNPOLLED = "unpolled"
    """Messages wait, and none was in flight at any of the last checks."""
    MISROUTED = "misrouted"
    """Commands were sent to a route that does not exist."""


class RouteHealth(Reply, frozen=True, kw_only=True):
    target: str
    name: str
    status: RouteStatus
    since: datetime
    checked_at: datetime
    depth: int
    """Counted up to 10,000, like the next two."""
    in_flight: int
    dead_letters: int
    oldest_age_seconds: float | None
    misroutes: int


class RouteHealthPage(Reply, frozen=True, kw_only=True):
    routes: list[RouteHealth]
    next_cursor: str | None
