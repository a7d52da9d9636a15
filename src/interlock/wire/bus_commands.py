"""Replies to senders of commands."""

from __future__ import annotations

from datetime import datetime

from interlock.wire.base import Reply


class CommandVerdict(Reply, frozen=True, kw_only=True):
    """The decision about one command. Telemetry reports it too, and the later decision about an escalated command."""

    command_id: str | None
    """None if the message could not be decoded."""
    outcome: str
    """`delivered`, `escalated`, `duplicate`, `failed` or `invalid`."""
    reason: str | None = None
    """A short code for the reason of `escalated`, `failed` or `invalid`."""
    detail: str | None = None
    """A sentence about what to change."""
    retry_after_ms: int | None = None
    """A hint: an earlier retry is unlikely to succeed."""
    throttle_until: datetime | None = None


class CommandVerdicts(Reply, frozen=True, kw_only=True):
    """One verdict for each command of the batch, in its order."""

    results: list[CommandVerdict]
