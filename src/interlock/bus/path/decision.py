"""Decisions about commands."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from interlock.bus.model import Ban, Escalation, Route
from interlock.wire.bus_events import FailureReason
from interlock.wire.commands import Envelope


class Outcome(StrEnum):
    DELIVERED = "delivered"
    """Durable at the destination of its route."""
    ESCALATED = "escalated"
    """Durable; the slow stage decides, and telemetry reports the decision."""
    DUPLICATE = "duplicate"
    FAILED = "failed"
    INVALID = "invalid"


class Decision(Struct, gc=False):
    outcome: Outcome
    envelope: Envelope | None = None
    """None only if the message could not be decoded."""
    reason: str = ""
    detail: str = ""
    """A sentence for the sender."""
    route: Route | None = None
    """Set for delivered commands and duplicates."""
    wait_seconds: float | None = None
    """Seconds after which a retry makes sense."""
    ban: Ban | None = None
    """The ban that escalated or refused the command."""


def invalid(reason: str, detail: str, envelope: Envelope | None = None) -> Decision:
    return Decision(Outcome.INVALID, envelope, reason, detail)


def failed(
    envelope: Envelope, reason: FailureReason, *, wait_seconds: float | None = None, ban: Ban | None = None
) -> Decision:
    return Decision(Outcome.FAILED, envelope, reason.value, wait_seconds=wait_seconds, ban=ban)


def escalated(envelope: Envelope, reason: Escalation, *, ban: Ban | None = None) -> Decision:
    return Decision(Outcome.ESCALATED, envelope, reason.value, ban=ban)
