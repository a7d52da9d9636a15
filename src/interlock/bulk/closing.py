"""The end of a run that took tasks as they came."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from interlock.adapters.postgres import Connection, queries
from interlock.kernel.webhook_events import tell_of_runs

_sql = queries("ingest")
_runs_sql = queries("runs")


async def close_open_run(
    connection: Connection, run_id: UUID, org_id: UUID, *, now: datetime, retention_days: float
) -> None:
    """It ends with its last task, which may have ended before. One that is closed is left as it is."""
    if await _sql.close_run(connection, run_id=run_id, org_id=org_id) is not None:
        await end_if_over(connection, run_id, now=now, retention_days=retention_days)


async def end_if_over(connection: Connection, run_id: UUID, *, now: datetime, retention_days: float) -> None:
    """After the latch: nothing more may come to be folded into the run, and so nobody else would end it."""
    ended = [row["run_id"] for row in await _runs_sql.end_runs(connection, run_ids=[run_id])]
    if ended:
        await tell_of_runs(connection, ended, ended=ended, now=now, retention_days=retention_days)
