"""Names of the bus's queues. The org is in the name, so that no tenant can name another's."""

from __future__ import annotations

from uuid import UUID


def target_queue(org_id: UUID, queue: str) -> str:
    """Where a route of this org leads."""
    return f"bus:{org_id}:{queue}"


def telemetry_queue(org_id: UUID) -> str:
    return f"telemetry:{org_id}"
