"""Queries that run on Spark: a task of the built-in operator batch_query, which reads pinned versions.

The task, what it reads and the end of the query's record are one transaction. What it may read stands in its job's
edges and where it writes is the dispatcher's to say, so that a task whose payload somebody made up reaches nothing.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.adapters.postgres import Connection, Database, queries
from interlock.failpoints import failpoint
from interlock.kernel.queries import BATCH_QUERY, Record, close_record
from interlock.kernel.query_relations import Granted
from interlock.kernel.submission import Submissions
from interlock.kernel.tasks import run_task_id
from interlock.telemetry import TASKS_CREATED
from interlock.wire import JobRequest, Policy, QueryOutcome

_sql = queries("queries")

RUNTIME: Final = "spark"
_EVERYTHING: Final = {"start": -(2**62), "end": 2**62}
"""The scope of its inputs."""
_POLICY: Final = Policy(max_attempts=3, non_retryable=["BadConfig", "UnsafeQuery"])


class BatchQueries:
    def __init__(self, database: Database, submissions: Submissions) -> None:
        self._database = database
        self._submissions = submissions

    async def submit(self, record: Record, sql: str, relations: Granted) -> UUID:
        """The task that has the query from now on. Its statement has passed the gate."""
        request = _job(record, sql, relations)

        async def work(connection: Connection) -> UUID:
            return await self._write(connection, record, request, relations)

        task_id = await self._database.run(work)
        TASKS_CREATED.labels(runtime=RUNTIME).inc()
        return task_id

    async def _write(self, connection: Connection, record: Record, request: JobRequest, relations: Granted) -> UUID:
        org_id = record.asker.org_id
        accepted = await self._submissions.within(connection, request, org_id)
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
