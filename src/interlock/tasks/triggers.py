"""Acceptance of triggers: requests to start a source job, from webhook calls, schedules, commands and users."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from interlock.stores.postgres import Connection, queries

_sql = queries(__name__, "triggers")


async def accept_triggers(
    connection: Connection, job_ids: Sequence[UUID], dedupe_keys: Sequence[str], payloads: Sequence[str]
) -> int:
    """Stores one trigger per job id, and returns the number of new ones: a known dedupe key is a duplicate.

    Raises one of UNSTORABLE if a payload is not JSON that PostgreSQL can store.
    """
    row = await _sql.accept_triggers(connection, job_ids=job_ids, dedupe_keys=dedupe_keys, payloads=payloads)
    return int(row["accepted"])
