"""Queries that run on Spark: a task of the built-in operator batch_query, which reads pinned versions.

One transaction writes the task, its inputs and the end of the query's record. The job's edges define what the task may
read, and the dispatcher decides where it writes. A task with a forged payload therefore reaches nothing.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.failpoints import failpoint
from interlock.jobs.spark_loads import BATCH_QUERY
from interlock.jobs.submission import ClosedRuns
from interlock.query.records import Record, close_record
from interlock.query.relations import Granted
from interlock.stores.postgres import Connection, Database, queries
from interlock.tasks.completion import run_task_id
from interlock.telemetry import TASKS_CREATED
from interlock.wire.jobs import JobRequest, Policy
from interlock.wire.queries import QueryOutcome

_sql = queries(__name__, "queries")

RUNTIME: Final = "spark"
_EVERYTHING: Final = {"start": -(2**62), "end": 2**62}
"""Scope of the inputs."""
_POLICY: Final = Policy(max_attempts=3, non_retryable=["BadConfig", "UnsafeQuery"])


class BatchQueries:
    def __init__(self, database: Database, closed_runs: ClosedRuns) -> None:
        self._database = database
        self._closed_runs = closed_runs

    async def submit(self, record: Record, sql: str, relations: Granted) -> UUID:
        """Creates the task that runs the query and returns its id. The statement has passed the SQL gate."""
        request = _job(record, sql, relations)

        async def work(connection: Connection) -> UUID:
            return await self._write(connection, record, request, relations)

        task_id = await self._database.run(work)
        TASKS_CREATED.labels(runtime=RUNTIME).inc()
        return task_id

    async def _write(self, connection: Connection, record: Record, request: JobRequest, relations: Granted) -> UUID:
        org_id = record.asker.org_id
        accepted = await self._closed_runs.within(connection, request, org_id)
        versions = [version.dataset_version for version in relations.values()]
        await _sql.insert_query_edges(connection, job_id=accepted.job_id, org_id=org_id, versions=versions)
        record.batch_task_id = run_task_id(accepted.run_id, 0)
        record.outcome = QueryOutcome.BATCHED
        await close_record(connection, record)
        await failpoint("batch_query.before_commit")
        return record.batch_task_id


def _job(record: Record, sql: str, relations: Granted) -> JobRequest:
    payload: dict[str, Any] = {
        "query_id": str(record.query_id),
        "sql": sql,
        "relations": list(relations),
        **_EVERYTHING,
    }
    return JobRequest(operator=BATCH_QUERY, runtime=RUNTIME, policy=_POLICY, tasks=[Raw(msgspec.json.encode(payload))])
