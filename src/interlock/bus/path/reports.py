"""Reports of decisions: the verdict for the sender, and the telemetry event; one of each per command."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, Literal
from uuid import UUID

from msgspec import UNSET, UnsetType

from interlock.bus.model import Ban, Decision, Escalation, Outcome
from interlock.bus.path.verification import EXPIRED_TIMESTAMP, FUTURE_TIMESTAMP
from interlock.wire.bus_events import (
    CommandDelivered,
    CommandDuplicate,
    CommandFailed,
    CommandInvalid,
    FailureReason,
    WarmPathBan,
)
from interlock.wire.commands import PENDING, CommandVerdict, Metadata, salvage

_TIMESTAMPS: Final = (EXPIRED_TIMESTAMP, FUTURE_TIMESTAMP)
Path = Literal["fast", "slow"]


def verdict(decision: Decision, now: datetime) -> CommandVerdict:
    envelope = decision.envelope
    command_id = None if envelope is None else envelope.metadata.id
    if decision.outcome is Outcome.DELIVERED:
        return CommandVerdict(command_id=command_id, outcome="delivered")
    hinted = decision.wait_seconds is not None
    detail: str | None = decision.detail
    if not detail and envelope is not None:
        detail = advice(decision.reason, envelope.command.target, envelope.command.name)
    return CommandVerdict(
        command_id=command_id,
        outcome=PENDING if decision.outcome is Outcome.ESCALATED else decision.outcome.value,
        reason=decision.reason or None,
        detail=detail or None,
        retry_after_ms=retry_after_ms(decision) if hinted else None,
        throttle_until=throttle_until(decision, now) if hinted else None,
    )


def pending(command_id: str, waits_for: str) -> CommandVerdict:
    return CommandVerdict(command_id=command_id, outcome=PENDING, reason=waits_for, detail=advice(waits_for, "", ""))


_ADVICE: Final[dict[str, str]] = {
    FailureReason.ROUTE_MISSING: "No route leads to the target {target!r} for the command {name!r}: `interlock route "
    "list` shows the routes, `interlock route add {target} {name} --queue QUEUE` adds one.",
    FailureReason.ACL_DENY: "This service may not send {name!r} to {target!r}: an admin allows it with `interlock acl "
    "allow SOURCE {target} {name}`.",
    FailureReason.RATE_LIMIT_EXCEEDED: "The limit of {target}/{name}, or of the sender, admits no more for now: send "
    "the command again after retry_after_ms.",
    FailureReason.SOURCE_QUOTA: "The sender is banned from the fast path and has used up its quota for "
    "{target}/{name}: send the command again after retry_after_ms.",
    FailureReason.FAIRNESS_VIOLATION: "The sender took most of the capacity of {target}/{name} while others competed: "
    "send fewer, and send this command again after retry_after_ms.",
    FailureReason.DELIVERY_FAILURE: "The destination of {target}/{name} did not take the command: check with "
    "`interlock route show {target} {name}` that its queue or job exists.",
    **dict.fromkeys(
        Escalation,
        "Accepted and durable; the slow stage decides. Read the verdict with GET /v1/commands/{{command_id}}, or send "
        "with ?wait=5.",
    ),
}


def advice(reason: str, target: str, name: str) -> str | None:
    """Returns a sentence about what to do, for the reason of a verdict."""
    text = _ADVICE.get(reason)
    return None if text is None else text.format(target=target, name=name)


def delivered(
    metadata: Metadata, source: str, target: str, name: str, *, path: Path, latency_seconds: float
) -> CommandDelivered:
    return CommandDelivered(
        command_id=UUID(metadata.id),
        source=source,
        target=target,
        name=name,
        timestamp=datetime.fromisoformat(metadata.timestamp),
        path=path,
        dispatch_latency_ms=round(1000 * latency_seconds, 3),
        **_replay(metadata),
    )


def duplicate(metadata: Metadata, source: str, target: str, name: str) -> CommandDuplicate:
    return CommandDuplicate(
        command_id=UUID(metadata.id),
        source=source,
        target=target,
        name=name,
        timestamp=datetime.fromisoformat(metadata.timestamp),
        dedupe_mode="strict",
        **_replay(metadata),
    )


def failed(metadata: Metadata, source: str, target: str, name: str, decision: Decision, now: datetime) -> CommandFailed:
    ban = decision.ban
    hinted = decision.wait_seconds is not None
    shares: dict[str, Any] = {}
    if decision.reason == FailureReason.FAIRNESS_VIOLATION and ban is not None:
        shares = {
            "source_share": ban.source_share,
            "competing_share": ban.competing_share,
            "dispatch_volume": ban.dispatch_volume,
        }
    return CommandFailed(
        reason=FailureReason(decision.reason),
        command_id=UUID(metadata.id),
        source=source,
        target=target,
        name=name,
        timestamp=datetime.fromisoformat(metadata.timestamp),
        retry_after_ms=retry_after_ms(decision) if hinted else UNSET,
        throttle_until=throttle_until(decision, now) if hinted else UNSET,
        **shares,
        **_replay(metadata),
    )


def banned(ban: Ban, now: float) -> WarmPathBan:
    return WarmPathBan(
        source=ban.source,
        target=ban.target or "",
        name=ban.name or "",
        source_share=ban.source_share,
        competing_share=ban.competing_share,
        retry_after_ms=max(1, round(1000 * (ban.until - now))),
        throttle_until=datetime.fromtimestamp(ban.until, UTC),
    )


def retry_after_ms(decision: Decision) -> int:
    """Returns whole milliseconds, at least 1: a hint of 0 would invite an immediate retry."""
    return max(1, round(1000 * (decision.wait_seconds or 0.0)))


def throttle_until(decision: Decision, now: datetime) -> datetime:
    return datetime.fromtimestamp(now.timestamp() + (decision.wait_seconds or 0.0), UTC)


def invalid(raw: bytes, source: str, decision: Decision, now: datetime) -> CommandInvalid:
    """Returns an event with the readable fields of the message. `source` comes from the credentials alone."""
    found = salvage(raw)
    sent_at = _instant(found.get("metadata.timestamp"))
    skew: dict[str, Any] = {}
    if decision.reason in _TIMESTAMPS and isinstance(sent_at, datetime):
        seconds = round((now - sent_at).total_seconds(), 3)
        skew = {"skew_seconds": seconds, "sent_at": sent_at, "received_at": now}
    return CommandInvalid(
        reason=decision.reason,
        command_id=_uuid(found.get("metadata.id")),
        source=source,
        target=found.get("command.target", UNSET),
        name=found.get("command.name", UNSET),
        timestamp=sent_at,
        **skew,
        **({} if decision.envelope is None else _replay(decision.envelope.metadata)),
    )


def _replay(metadata: Metadata) -> dict[str, Any]:
    if metadata.replayed is UNSET or isinstance(metadata.replay_id, UnsetType):
        return {}
    return {"replay": True, "replay_reason": metadata.replay_reason, "replay_id": UUID(metadata.replay_id)}


def _uuid(text: str | None) -> UUID | UnsetType:
    try:
        return UUID(text) if text is not None else UNSET
    except ValueError:
        return UNSET


def _instant(text: str | None) -> datetime | UnsetType:
    try:
        found = datetime.fromisoformat(text) if text is not None else None
    except ValueError:
        return UNSET
    return found if found is not None and found.tzinfo is not None else UNSET
