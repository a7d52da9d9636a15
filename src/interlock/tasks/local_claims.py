"""A claim that this process holds: its fence, its heartbeats, and the reports that end it."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime
from typing import Any

import structlog

from interlock.errors import Unavailable
from interlock.tasks.completion import Attempts
from interlock.wire import ClaimReply, Completion, Heartbeat

log = structlog.get_logger()


async def keep(tasks: Attempts, claim: ClaimReply, *, at_least_every: float = math.inf) -> None:
    """Renews the lease. Returns when a cancel is requested; raises when the lease is lost."""
    heartbeat = Heartbeat(**fence_of(claim))
    expires = given(claim.lease_expires_at)
    while True:
        third = max(0.1, (expires - datetime.now(UTC)).total_seconds() / 3)
        await asyncio.sleep(min(third, at_least_every))
        try:
            reply = await tasks.heartbeat_one(heartbeat)
        except Unavailable as error:
            log.warning("lease.heartbeat_missed", task_id=str(claim.task_id), reason=error.detail)
            continue
        if reply.cancel_requested:
            return
        expires = reply.lease_expires_at


def failure(claim: ClaimReply, error_class: str, message: str, **more: Any) -> Completion:
    return completion(claim, "Failed", error_class=error_class, error_message=message, **more)


def completion(claim: ClaimReply, status: Any, **more: Any) -> Completion:
    return Completion(status=status, **fence_of(claim), **more)


def fence_of(claim: ClaimReply) -> dict[str, Any]:
    return {
        "task_id": given(claim.task_id),
        "attempt": given(claim.attempt),
        "lease_token": given(claim.lease_token),
    }


def given(value: Any) -> Any:
    """Narrows an optional field. Claimed replies have every field; only NotClaimed replies omit some."""
    if value is None:
        raise ValueError("a claimed task without its lease")
    return value
