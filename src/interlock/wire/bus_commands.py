"""What whoever sends commands is answered."""

from __future__ import annotations

from datetime import datetime

from interlock.wire.base import Reply


class CommandVerdict(Reply, frozen=True, kw_only=True):
    """What became of one command. Telemetry tells the same, and what comes later."""

    command_id: str | None
    """None where the message was too broken to have one."""
    outcome: str
    """`delivered`, `escalated`, `duplicate`, `failed` or `invalid`."""
    reason: str | None = None
    """A short code: why it was escalated, failed or is invalid."""
    detail: str | None = None
    """A sentence that says what to change."""
    retry_after_ms: int | None = None
    """When trying again makes sense; nobody is held to it."""
    throttle_until: datetime | None = None


class CommandVerdicts(Reply, frozen=True, kw_only=True):
    """One for each command of the batch, in its order."""

    results: list[CommandVerdict]
