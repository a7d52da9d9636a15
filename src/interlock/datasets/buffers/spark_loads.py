"""Loads batches that are too large for the sink itself: a Spark task reads and checks them, the sink commits the rows.

The task writes to a staging table of its attempt, and records its findings in another. However the task ends, nothing
of that is visible: the commit is the same as for every other batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import msgspec
import structlog
from msgspec import Raw

from interlock.datasets.buffers.records import Loaded, Publish, Records, publish_of
from interlock.datasets.buffers.sink import Sized
from interlock.datasets.buffers.store import Part, Staged, Store, Target
from interlock.datasets.files import BUFFER_LOAD
from interlock.failpoints import failpoint
from interlock.jobs.spark_loads import has_spark_worker
from interlock.jobs.submission import ClosedRuns
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.completion import run_task_id
from interlock.telemetry import SINK_BATCHES, SINK_ROWS, TASKS_CREATED
from interlock.wire.base import TaskStatus
from interlock.wire.datasets import BatchRefusal, PublishStatus
from interlock.wire.jobs import JobRequest, Policy

log = structlog.get_logger()

_sql = queries(__name__, "buffers")
_refusal = msgspec.json.Decoder(BatchRefusal)

RUNTIME: Final = "spark"
_POLICY: Final = Policy(max_attempts=5)
_MAX_BATCHES: Final = 1_000
"""Batches per task; the rest goes to further tasks."""
_MAX_ENDED: Final = 1_000
_PAUSE_SECONDS: Final = 1.0


def staging_prefix(task_id: UUID) -> str:
    return f"staging_{task_id.hex}_"


def staging_of(task_id: UUID, attempt: int) -> str:
    return f"{staging_prefix(task_id)}{attempt}"


class SparkLoads(Periodic):
    """Hands batches over to Spark, and commits the rows that the tasks have staged."""

    name = "buffer_loads"
    seconds = _PAUSE_SECONDS

    def __init__(self, database: Database, settings: Settings, store: Store, records: Records) -> None:
        self._database = database
        self._store = store
        self._records = records
        self._closed_runs = ClosedRuns(database, settings)
        self._queue = settings.runtime(RUNTIME).queue

    # Handover to Spark

    async def take(self, target: Target, sized: Sequence[Sized]) -> bool:
        """Returns False if no Spark worker exists: then the sink loads the batches itself, however long it takes."""
        async with self._database.connection() as connection:
            if not await has_spark_worker(connection, self._queue):
                return False
        for start in range(0, len(sized), _MAX_BATCHES):
            publish_ids = [one.publish.publish_id for one in sized[start : start + _MAX_BATCHES]]
            await self._database.run(functools.partial(self._hand_over, target=target, publish_ids=publish_ids))
            TASKS_CREATED.labels(runtime=RUNTIME).inc()
        return True

    async def _hand_over(self, connection: Connection, *, target: Target, publish_ids: Sequence[UUID]) -> None:
        request = JobRequest(operator=BUFFER_LOAD, runtime=RUNTIME, policy=_POLICY, tasks=[Raw(b"{}")])
        accepted = await self._closed_runs.within(connection, request, target.org_id)
        await _sql.set_loading(
            connection,
            task_id=run_task_id(accepted.run_id, 0),
            publish_ids=list(publish_ids),
            org_id=target.org_id,
        )
        await failpoint("sink.before_handover_commit")

    # Handover back to the sink

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            ended: list[Row] = await _sql.ended_loads(connection, limit=_MAX_ENDED)
        for row in ended:
            await self._settle(row)
        return len(ended)

    async def _settle(self, row: Row) -> None:
        async with self._database.connection() as connection:
            rows = await _sql.publishes_of_load(connection, load_task=row["load_task"])
        publishes = [publish_of(each) for each in rows]
        staged: dict[UUID, Staged] = {}
        if row["status"] == TaskStatus.COMPLETED:
            staged = await self._store.staged(staging_of(row["load_task"], row["attempt"]))
        await self._commit(row, [one for one in publishes if _good(staged.get(one.publish_id))], staged)
        for publish in publishes:
            found = staged.get(publish.publish_id)
            if found is None:
                await self._records.refused(publish, PublishStatus.FAILED, _failed(row))
                SINK_BATCHES.labels(result="failed").inc()
            elif found.refusal is not None:
                await self._records.refused(publish, PublishStatus.REFUSED, _refusal.decode(found.refusal))
                SINK_BATCHES.labels(result="refused").inc()
        await self._store.drop_staging(staging_prefix(row["load_task"]))

    async def _commit(self, row: Row, good: Sequence[Publish], staged: dict[UUID, Staged]) -> None:
        target = good[0].target if good else None
        if target is None:
            return
        # Staged rows are numbered by the position of their batch among all batches of the task, refused ones included.
        numbered = sorted(staged)
        wanted = {publish.publish_id: publish for publish in good}
        parts = [Part(publish_id, staged[publish_id].rows) for publish_id in numbered]
        staging = staging_of(row["load_task"], row["attempt"])
        committed = await self._store.load_staged(target, parts, staging, leave_out=staged.keys() - wanted.keys())
        await self._records.loaded(
            [Loaded(wanted[one.publish_id], one, staged[one.publish_id].bytes) for one in committed]
        )
        SINK_BATCHES.labels(result="loaded").inc(len(committed))
        SINK_ROWS.inc(sum(one.rows for one in committed))
        log.info("batches.loaded_by_spark", load_task=str(row["load_task"]), batches=len(committed))


def _good(staged: Staged | None) -> bool:
    return staged is not None and staged.refusal is None


def _failed(row: Row) -> BatchRefusal:
    why = row["error_message"] or f"the task that loads it ended as {row['status'] or 'deleted'}"
    return BatchRefusal(code="load_failed", detail=f"The batch could not be loaded on Spark: {why}")
