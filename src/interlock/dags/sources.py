"""Sources of a DAG: the tasks of those that are always on, and how all of them stand."""

from __future__ import annotations

from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec
import structlog

from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.dags.definition import SourceKind
from interlock.errors import NotFound
from interlock.failpoints import failpoint
from interlock.kernel.loop import Periodic
from interlock.kernel.tasks import enqueue
from interlock.settings import Settings
from interlock.telemetry import SOURCE_RESTARTS
from interlock.wire import SourceList, SourceOutput, SourceState, SourceView

log = structlog.get_logger()

_sql = queries("sources")
_runs_sql = queries("runs")

STEADY_SECONDS: Final = 300.0
"""A source that ran this long had a good start: its next restart comes at once."""
LONGEST_WAIT_SECONDS: Final = 300.0
_KEPT_ATTEMPTS: Final = 100
"""Of a source, which has no end, the history of its attempts has one."""
_MOST: Final = 1000
_CAUSES: Final = {"Completed": "returned", "Canceled": "canceled", "Failed": "failed"}


class AlwaysOn(Periodic):
    """Sees to it that each active always_on source has one task that has not ended, under the same id for ever."""

    name = "sources"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.source_seconds
        self._database = database
        self._direct = settings.queue_direct

    async def run_once(self) -> int:
        started, restarted, stopped = await self._database.run(self._pass)
        for row in restarted:
            cause = _CAUSES[row["was"]]
            SOURCE_RESTARTS.labels(cause=cause).inc()
            log.warning(
                "source.restarted",
                dag=row["dag_name"],
                job=row["name"],
                task_id=str(row["task_id"]),
                cause=cause,
                restarts_in_a_row=row["restarts"],
            )
        return started + len(restarted) + stopped

    async def _pass(self, connection: Connection) -> tuple[int, list[Row], int]:
        if not await _runs_sql.only_one(connection, name=self.name):
            return 0, [], 0
        stopped = await _sql.stop_sources(connection, most=_MOST)
        await _sql.forget_sources(connection)
        started = await _sql.start_sources(connection, most=_MOST)
        restarted = await _sql.restart_sources(
            connection,
            most=_MOST,
            steady_seconds=STEADY_SECONDS,
            most_seconds=LONGEST_WAIT_SECONDS,
            kept=_KEPT_ATTEMPTS,
        )
        ids = [row["task_id"] for row in (*started, *restarted)]
        if ids:
            await enqueue(connection, ids, direct=self._direct)
        await failpoint("sources.before_commit")
        return len(started), restarted, len(stopped)


class Sources:
    """How sources stand."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of_dag(self, dag: str, org_id: UUID) -> SourceList:
        async with self._database.connection() as connection:
            rows = await _sql.list_sources(connection, org_id=org_id, dag_name=dag, most=_MOST)
            if not rows and not await _sql.dag_exists(connection, org_id=org_id, dag_name=dag):
                raise NotFound(f"There is no DAG {dag!r} in this org.")
        return SourceList(sources=[_view(row) for row in rows])


def _view(row: Row) -> SourceView:
    return SourceView(
        job=row["name"],
        job_id=row["job_id"],
        current=row["current"],
        kind=row["kind"],
        state=_state(row),
        since=_since(row),
        paused=row["pause_reason"],
        task_id=row["task_id"],
        attempt=row["attempt"],
        restarts=row["restarts"] or 0,
        worker_id=row["worker_id"],
        last_error=_error(row),
        last_error_at=row["failed_at"],
        next_at=row["next_at"],
        waiting=row["waiting"],
        hook=None if row["hook_id"] is None else f"/v1/hooks/{row['hook_id']}",
        outputs=msgspec.json.decode(row["outputs"], type=list[SourceOutput]),
    )


def _state(row: Row) -> SourceState:
    if row["pause_reason"] is not None:
        return SourceState.PAUSED
    if row["kind"] != SourceKind.ALWAYS_ON:
        return SourceState.READY
    match row["status"]:
        case "Running":
            return SourceState.RUNNING
        case "Queued":
            return SourceState.QUEUED
        case None:
            return SourceState.STARTING
        case _:
            return SourceState.RESTARTING


def _since(row: Row) -> datetime | None:
    """Since when it has been in its state."""
    column = {"Running": "started_at", "Queued": "queued_at"}.get(row["status"], "ended_at")
    if row["kind"] != SourceKind.ALWAYS_ON:
        column = "paused_since"
    since: datetime | None = row["paused_since" if row["pause_reason"] is not None else column]
    return since


def _error(row: Row) -> str | None:
    return None if row["error_class"] is None else f"{row['error_class']}: {row['error_message'] or ''}".rstrip(": ")
