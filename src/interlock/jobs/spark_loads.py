"""Spark tasks that the platform creates: their payloads, and the loads of lists that are too long for one process.

A compressed list and a CSV list cannot be split at line ends. The ingest reads them itself, however long they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec
import structlog
from msgspec import Raw

from interlock.jobs.ingest import Outcome
from interlock.jobs.ingest_records import Pending, Records
from interlock.jobs.run_sources import announce
from interlock.jobs.staged_lists import StagedList
from interlock.jobs.submission import ClosedRuns
from interlock.jobs.task_rows import BadList
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.result_packs import results_prefix
from interlock.tasks.shards import run_task_id
from interlock.telemetry import TASKS_CREATED
from interlock.wire.attempts import ListLoad, RunExport
from interlock.wire.base import TaskStatus
from interlock.wire.jobs import JobRequest, ListFormat, Policy

log = structlog.get_logger()

_sql = queries(__name__, "ingest")
RUNTIME: Final = "spark"
_POLICY: Final = Policy(max_attempts=3, non_retryable=["BadList", "StateDatabaseRefused"])
_MAX_RUNS: Final = 1000
_PAUSE_SECONDS: Final = 1.0


async def has_spark_worker(connection: Connection, queue: str) -> bool:
    found: bool = await _sql.has_spark_worker(connection, queue=queue)
    return found


class SparkIngests(Periodic):
    """Hands lists over to Spark, and notifies the ingest when they are loaded."""

    name = "ingests_on_spark"
    seconds = _PAUSE_SECONDS

    def __init__(self, database: Database, settings: Settings, records: Records) -> None:
        self._database = database
        self._settings = settings
        self._records = records
        self._closed_runs = ClosedRuns(database, settings)
        self._queue = settings.runtime(RUNTIME).queue

    # Handover to Spark

    async def take(self, pending: Pending, staged: StagedList) -> bool:
        """Returns False if the list is not for Spark or no Spark worker exists: then the ingest reads it itself."""
        source = staged.source
        if source.bytes < self._settings.spark_threshold_bytes or source.format is ListFormat.CSV:
            return False
        async with self._database.connection() as connection:
            if not await has_spark_worker(connection, self._queue):
                return False
        if await staged.check():
            return False
        shard = await self._records.shard(pending)
        if shard is None:
            return False
        await self._database.run(functools.partial(self._hand_over, pending=pending))
        TASKS_CREATED.labels(runtime=RUNTIME).inc()
        return True

    async def _hand_over(self, connection: Connection, *, pending: Pending) -> None:
        request = JobRequest(operator=LIST_LOAD, runtime=RUNTIME, policy=_POLICY, tasks=[Raw(b"{}")])
        accepted = await self._closed_runs.within(connection, request, pending.org_id)
        await _sql.set_load_task(
            connection, run_id=pending.run_id, org_id=pending.org_id, load_task=run_task_id(accepted.run_id, 0)
        )

    # Handover back to the ingest

    async def run_once(self) -> int:
        """Sends the message of lists whose task has ended, successfully or not."""

        async def work(connection: Connection) -> int:
            rows: list[Row] = await _sql.loads_on_spark(connection, limit=_MAX_RUNS)
            if rows:
                await announce(connection, self._settings, [row["run_id"] for row in rows])
            return 0

        return await self._database.run(work)

    async def settle(self, pending: Pending, load_task: UUID) -> Outcome:
        """Returns the outcome of the Spark task."""
        async with self._database.connection() as connection:
            row: Row | None = await _sql.load_task_state(connection, task_id=load_task)
        if row is not None and row["status"] == TaskStatus.COMPLETED:
            return Outcome.LOADED
        if row is not None and row["dead"] and row["error_class"] == "BadList":
            raise BadList("bad_list", row["error_message"])
        if row is not None and not row["dead"] and row["status"] != TaskStatus.CANCELED:
            return Outcome.RUNNING
        log.warning("list.not_loaded_by_spark", run_id=str(pending.run_id), effect="the ingest reads it")
        await self._database.run(functools.partial(self._take_back, pending=pending, load_task=load_task))
        return Outcome.GIVEN_BACK

    async def _take_back(self, connection: Connection, *, pending: Pending, load_task: UUID) -> None:
        which = {"run_id": pending.run_id, "org_id": pending.org_id, "load_task": load_task}
        if await _sql.clear_load_task(connection, **which) is not None:
            # Waits for a load that is still running; the next load finds that the list is no longer its own.
            await connection.execute(f"truncate interlock.tasks_{pending.shard:d}")
            await _sql.forget_chunks(connection, run_id=pending.run_id)


BATCH_QUERY: Final = "batch_query"
"""The operator that runs batch queries on Spark."""
LIST_LOAD: Final = "list_load"


class _Staged(msgspec.Struct):
    prefix: str
    format: str
    parts: list[msgspec.Raw]


_staged = msgspec.json.Decoder(_Staged)


async def list_loads(connection: Connection, settings: Settings, held: Sequence[Row]) -> dict[UUID, ListLoad]:
    """Returns the loads by task, for tasks that an ingest created."""
    asking = [row["task_id"] for row in held if row["operator"] == LIST_LOAD]
    found = [await _sql.ingest_of_load(connection, task_id=task_id) for task_id in asking]
    return {row["load_task"]: _load(row, settings) for row in found if row is not None}


def _load(row: Row, settings: Settings) -> ListLoad:
    staged = _staged.decode(row["source"])
    return ListLoad(
        run_id=row["run_id"],
        shard=row["shard"],
        format=staged.format,
        parts=[f"{staged.prefix}{number:05}" for number in range(1, len(staged.parts) + 1)],
        line_limit=settings.payload_limit_bytes,
        slot_pointer=row["concurrency_key"],
    )


_exports_sql = queries(__name__, "exports")

RUN_EXPORT: Final = "run_export"
"""The operator that runs on Spark."""
MANIFEST: Final = "manifest.json"


def export_prefix(root: str, org_id: UUID, export_id: UUID) -> str:
    return f"{root}/exports/{org_id}/_runs/{export_id}/"


def rows_prefix(root: str, org_id: UUID, export_id: UUID) -> str:
    return f"{export_prefix(root, org_id, export_id)}rows/"


def attempt_prefix(root: str, org_id: UUID, export_id: UUID, attempt: int) -> str:
    return f"{export_prefix(root, org_id, export_id)}{attempt}/"


def staged_uri(rows: str, number: int) -> str:
    return f"{rows}{number:06}.jsonl"


async def run_exports(connection: Connection, root: str, held: Sequence[Row]) -> dict[UUID, RunExport]:
    """Returns the exports by task. A task that no export created gets none."""
    asking = {row["task_id"]: row for row in held if row["operator"] == RUN_EXPORT}
    if not asking:
        return {}
    rows = await _exports_sql.exports_of_tasks(connection, task_ids=list(asking))
    return {row["task_id"]: _grant(root, row, asking[row["task_id"]]["attempt"]) for row in rows}


def _grant(root: str, row: Row, attempt: int) -> RunExport:
    which = (root, row["org_id"], row["export_id"])
    return RunExport(
        export_id=row["export_id"],
        run_id=row["run_id"],
        format=row["format"],
        stretches=-(-(row["last_index"] + 1) // row["stretch"]),
        rows_prefix=rows_prefix(*which),
        packs_prefix=results_prefix(root, row["run_id"]),
        prefix=attempt_prefix(*which, attempt),
    )


def batch_prefix(root: str, org_id: UUID, task_id: UUID | None) -> str:
    """Returns the prefix of a batch query; each attempt writes to its own folder below it."""
    return f"{root}/exports/{org_id}/_batch/{task_id}/"
