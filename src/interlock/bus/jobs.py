"""Routes that end in a job: a command becomes a trigger of it, and that a task."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from interlock.adapters.postgres import Connection, queries
from interlock.kernel.isolation import UNSTORABLE

_sql = queries("sources")

_COMMAND: Final = "command"


async def trigger(
    connection: Connection, org_id: UUID, dag: str, job: str, *, source: str, command_id: str, body: str
) -> bool:
    """Whether there was a job to trigger. In a savepoint: a payload that cannot be stored spoils no other command."""
    rows = await _sql.source_generations(connection, org_id=org_id, dag_name=dag, name=job)
    jobs = [row["job_id"] for row in rows if row["kind"] == _COMMAND]
    if not jobs:
        return False
    try:
        async with connection.transaction():
            await _sql.accept_triggers(
                connection,
                job_ids=jobs,
                dedupe_keys=[f"command:{source}:{command_id}"] * len(jobs),
                payloads=[body] * len(jobs),
            )
    except UNSTORABLE:
        return False
    return True
