"""What became of a command, as far as a stage could tell."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from interlock.bus.envelope import Envelope
from interlock.bus.model import Ban, Escalation, Route
from interlock.wire.bus_events import FailureReason


class Outcome(StrEnum):
    DELIVERED = "delivered"
    """Durable where its route leads."""
    ESCALATED = "escalated"
    """Durable, for the slow stage to decide; telemetry will tell."""
    DUPLICATE = "duplicate"
    FAILED = "failed"
    INVALID = "invalid"


class Decision(Struct, gc=False):
    outcome: Outcome
    envelope: Envelope | None = None
    """None only for a message that is none."""
    reason: str = ""
    detail: str = ""
    """A sentence for whoever sent it."""
    route: Route | None = None
    """Of what is delivered."""
    wait_seconds: float | None = None
    """After which trying again makes sense."""
    ban: Ban | None = None
    """What keeps it from the fast stage, or out."""


def invalid(reason: str, detail: str, envelope: Envelope | None = None) -> Decision:
    return Decision(Outcome.INVALID, envelope, reason, detail)


def failed(
    envelope: Envelope, reason: FailureReason, *, wait_seconds: float | None = None, ban: Ban | None = None
) -> Decision:
    return Decision(Outcome.FAILED, envelope, reason.value, wait_seconds=wait_seconds, ban=ban)


def escalated(envelope: Envelope, reason: Escalation, *, ban: Ban | None = None) -> Decision:
    return Decision(Outcome.ESCALATED, envelope, reason.value, ban=ban)
