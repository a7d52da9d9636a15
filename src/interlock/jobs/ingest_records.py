"""Records of an ingest: its steps, its end, and the closing of open runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final
from uuid import UUID

import msgspec
import pyarrow as pa
import structlog

from interlock.failpoints import failpoint
from interlock.jobs.run_sources import Place, ScopesSource, StagedSource
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.runs import end_runs, record_run_events
from interlock.tasks.shards import SMALL_SHARD, drop
from interlock.telemetry import INGESTS, TASKS_CREATED
from interlock.wire.base import RunState

_sql = queries(__name__, "ingest")


async def close_open_run(
    connection: Connection, run_id: UUID, org_id: UUID, *, now: datetime, retention_days: float
) -> None:
    """Closes an open run. It ends with its last task, which may have ended already. A closed run is unchanged."""
    if await _sql.close_run(connection, run_id=run_id, org_id=org_id) is not None:
        await end_if_over(connection, run_id, now=now, retention_days=retention_days)


async def end_if_over(connection: Connection, run_id: UUID, *, now: datetime, retention_days: float) -> None:
    """Ends the run if all tasks have ended. After the latch no task may report any more, so nothing else would."""
    ended = await end_runs(connection, [run_id])
    if ended:
        await record_run_events(connection, ended, ended=ended, now=now, retention_days=retention_days)


log = structlog.get_logger()

_source: Final = msgspec.json.Decoder(StagedSource | ScopesSource)
_MESSAGES: Final = 5000
"""Messages per transaction."""


class Overtaken(Exception):
    """Another process has continued the ingest, from a source that has changed since this one read it."""


class Step(StrEnum):
    LOADING = "Loading"
    FINISHING = "Finishing"
    ENQUEUING = "Enqueuing"
    DONE = "Done"
    FAILED = "Failed"
    CANCELED = "Canceled"


@dataclass(frozen=True)
class Pending:
    """An unfinished ingest, with the settings it needs of its run and job."""

    run_id: UUID
    org_id: UUID
    job_id: UUID
    shard: int
    step: Step
    source: StagedSource | ScopesSource
    load_task: UUID | None
    runtime: str
    queue: str | None
    held: bool
    """Messages are sent as the queue has room for its tasks; see backfills.py."""
    priority: int
    max_attempts: int
    slot_pointer: str | None
    total: int | None
    unwanted: bool
    """Canceled, or marked for deletion."""


class Records:
    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    async def pending(self, run_id: UUID) -> Pending | None:
        """Returns None if the ingest is settled or the run is gone."""
        async with self._database.connection() as connection:
            row: Row | None = await _sql.ingest_of(connection, run_id=run_id)
        if row is None or row["settled_at"] is not None or row["ended_at"] is not None:
            return None
        return Pending(
            run_id=row["run_id"],
            org_id=row["org_id"],
            job_id=row["job_id"],
            shard=row["shard"],
            step=Step(row["step"]),
            source=_source.decode(row["source"]),
            load_task=row["load_task"],
            runtime=row["runtime"],
            queue=row["queue"],
            held=row["held"],
            priority=row["priority"],
            max_attempts=row["max_attempts"],
            slot_pointer=row["concurrency_key"],
            total=row["total"],
            unwanted=row["cancel_requested"] or row["delete_requested"],
        )

    async def place(self, pending: Pending) -> Place:
        async with self._database.connection() as connection:
            row: Row | None = await _sql.last_chunk(connection, run_id=pending.run_id)
        return Place() if row is None else Place(row["part"], row["end_byte"], row["next_line"], row["reached"])

    # Runs with their own shard, step by step

    async def shard(self, pending: Pending) -> int | None:
        """Creates the run's shard as a bare table. Returns None if the run is no longer wanted."""
        return await self._database.run(functools.partial(self._shard, pending=pending))

    async def _shard(self, connection: Connection, *, pending: Pending) -> int | None:
        which = {"run_id": pending.run_id, "org_id": pending.org_id}
        if await _sql.lock_loading(connection, **which) is None:
            return None
        shard = await _sql.shard_of_run(connection, run_id=pending.run_id)
        if shard == SMALL_SHARD:
            row = await _sql.give_shard(connection, **which)
            if row is None:
                return None
            shard = row["shard"]
        made = await _sql.create_shard(
            connection,
            number=shard,
            job_id=pending.job_id,
            max_attempts=pending.max_attempts,
            priority=pending.priority,
            **which,
        )
        await failpoint("ingest.before_shard_commit")
        return shard if made else None

    async def loaded(self, pending: Pending) -> None:
        async def work(connection: Connection) -> None:
            which = {"run_id": pending.run_id, "org_id": pending.org_id}
            # Waits for a process that has found more rows and is loading them now: those rows count too.
            if await _sql.lock_loading(connection, **which) is not None:
                sums = await _sql.sum_of_chunks(connection, run_id=pending.run_id)
                await _sql.set_loaded(connection, total=sums["total"], last_index=sums["last_index"], **which)
            await failpoint("ingest.before_loaded_commit")

        await self._database.run(work)

    async def counted(self, pending: Pending) -> None:
        """Sets the total, before anything that could end the run."""

        async def work(connection: Connection) -> None:
            await _sql.set_run_total(connection, run_id=pending.run_id, org_id=pending.org_id)
            await failpoint("ingest.before_total_commit")

        await self._database.run(work)

    async def enqueued(self, pending: Pending) -> None:
        while not pending.held and not await self._database.run(functools.partial(self._enqueue, pending=pending)):
            continue

    async def _enqueue(self, connection: Connection, *, pending: Pending) -> bool:
        row: Row | None = await _sql.enqueue_run_ranges(
            connection,
            run_id=pending.run_id,
            org_id=pending.org_id,
            queue=pending.queue,
            priority=pending.priority,
            limit=_MESSAGES,
            direct=self._settings.queue_direct,
        )
        await failpoint("ingest.before_enqueue_commit")
        return row is None or bool(row["done"])

    async def latched(self, pending: Pending) -> None:
        async def work(connection: Connection) -> None:
            row = await _sql.latch_ingested(connection, run_id=pending.run_id, org_id=pending.org_id)
            if row is not None:
                await self._end_if_over(connection, pending.run_id)
            await failpoint("ingest.before_latch_commit")

        await self._database.run(work)
        INGESTS.labels(result="done").inc()

    async def _end_if_over(self, connection: Connection, run_id: UUID) -> None:
        now, kept = self._database.clock.now(), self._settings.retention_days
        await end_if_over(connection, run_id, now=now, retention_days=kept)

    # Small runs, in one step

    async def small(self, pending: Pending, table: pa.Table, lines: int) -> None:
        """Writes into the shard that small runs share: tasks, total, messages and latch in one transaction."""

        async def work(connection: Connection) -> None:
            which = {"run_id": pending.run_id, "org_id": pending.org_id}
            if await _sql.lock_loading(connection, **which) is None:
                return  # another process has done it
            if await _sql.shard_of_run(connection, run_id=pending.run_id) != SMALL_SHARD:
                raise Overtaken
            await _sql.set_loaded(connection, total=table.num_rows, last_index=lines - 1, **which)
            await _sql.insert_ingested(
                connection,
                job_id=pending.job_id,
                max_attempts=pending.max_attempts,
                priority=pending.priority,
                indexes=table.column("task_index").to_pylist(),
                payloads=table.column("payload").to_pylist(),
                slot_keys=_slot_keys(table),
                **which,
            )
            await _sql.set_run_total(connection, **which)
            if not pending.held:
                await self._enqueue(connection, pending=pending)
            await _sql.latch_ingested(connection, **which)
            await self._end_if_over(connection, pending.run_id)
            await failpoint("ingest.before_small_commit")

        await self._database.run(work)
        TASKS_CREATED.labels(runtime=pending.runtime).inc(table.num_rows)
        INGESTS.labels(result="done").inc()

    # Runs that end without tasks

    async def failed(self, pending: Pending, reason: str) -> None:
        await self._end(pending, Step.FAILED, RunState.FAILED, reason)

    async def canceled(self, pending: Pending) -> None:
        await self._end(pending, Step.CANCELED, RunState.CANCELED, None)

    async def _end(self, pending: Pending, step: Step, state: RunState, reason: str | None) -> None:
        async def work(connection: Connection) -> int | None:
            row: Row | None = await _sql.end_ingest(
                connection, run_id=pending.run_id, org_id=pending.org_id, step=step, state=state, reason=reason
            )
            if row is not None:
                over = [pending.run_id]
                now, kept = self._database.clock.now(), self._settings.retention_days
                await record_run_events(connection, over, ended=over, now=now, retention_days=kept)
            await failpoint("ingest.before_end_commit")
            return None if row is None else row["shard"]

        shard = await self._database.run(work)
        if shard is not None:
            INGESTS.labels(result=step.value.lower()).inc()
            # Loaded rows belong to no task that anyone has seen.
            if shard != SMALL_SHARD and not await drop(self._database, shard):
                log.info("shard.left", run_id=str(pending.run_id), effect="it is deleted with the run")


def _slot_keys(table: pa.Table) -> list[str | None]:
    if "slot_key" not in table.column_names:
        return [None] * table.num_rows
    keys: list[str | None] = table.column("slot_key").to_pylist()
    return keys
