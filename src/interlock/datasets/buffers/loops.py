"""The loops of one sink process, with those that repair lost messages and delete old files."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from uuid import UUID

import msgspec
import structlog

from interlock.datasets.buffers.records import Records, rearm
from interlock.datasets.buffers.sink import Sink, SparkLoads, staging_prefix
from interlock.datasets.buffers.store import Store
from interlock.errors import InterlockError
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic, Service
from interlock.settings import BUFFER_QUEUE, Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.queue import Queue
from interlock.telemetry import FILES_SWEPT, SINK_BATCHES
from interlock.wire.datasets import BatchRefusal, PublishStatus

_CONNECTIONS: Final = 4
"""Connections to the data database: two groups being written, one sweep, one spare."""
_PASSES: Final = 2
"""Concurrent passes of the sink: one reads its messages' batches while the rows of the other are written. The sink
itself limits the memory that both use."""


@asynccontextmanager
async def services(
    settings: Settings, database: Database, queue: Queue, objects: Objects, data_url: str, *, wait_seconds: float
) -> AsyncIterator[list[Service]]:
    async with Store.open(data_url, size=_CONNECTIONS) as store:
        records = Records(database, settings)
        loads = SparkLoads(database, settings, store, records)
        sink = Sink(settings, queue, objects, store, records, loads, wait_seconds=wait_seconds)
        yield [
            *[sink] * _PASSES,
            loads,
            BufferReconciler(database, settings),
            BufferSweeper(database, settings, objects, store),
        ]


log = structlog.get_logger()

_sql = queries(__name__, "buffers")

_PAGE: Final = 1_000
_FILES: Final = 200
_AT_ONCE: Final = 8
_AGAIN_SECONDS: Final = 600.0
_FIRST: Final = UUID(int=0)


class BufferReconciler(Periodic):
    """Resends lost messages of waiting batches, and fails a batch that crashes every sink."""

    name = "buffer_reconciler"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.reconcile_seconds
        self._database = database
        self._settings = settings

    async def run_once(self) -> int:
        after, found = _FIRST, 0
        while True:
            page, last = await self._database.run(functools.partial(self._page, after=after))
            found += page
            if last is None:
                return found
            after = last

    async def _page(self, connection: Connection, *, after: UUID) -> tuple[int, UUID | None]:
        """Returns the number of batches handled, and where the next page starts."""
        rows: list[Row] = await _sql.without_message(
            connection, after=after, limit=_PAGE, queue=BUFFER_QUEUE, grace=self._settings.reconcile_grace_seconds
        )
        await self._send(connection, [row for row in rows if not row["dead"]])
        for row in rows:
            if row["dead"]:
                await self._give_up(connection, row)
        (page,) = await _sql.open_page(connection, after=after, limit=_PAGE)
        return len(rows), page["last"] if page["found"] == _PAGE else None

    async def _send(self, connection: Connection, rows: list[Row]) -> None:
        if rows:
            await rearm(connection, rows, self._settings)
            log.info("batches.announced_again", batches=len(rows))

    async def _give_up(self, connection: Connection, row: Row) -> None:
        refusal = BatchRefusal(
            code="too_many_receives",
            detail="Its message was received too many times without being settled: every sink crashed on it. See the "
            "log of the sink, and redrive the batch.",
        )
        await _sql.set_settled(
            connection,
            publish_id=row["publish_id"],
            org_id=row["org_id"],
            status=PublishStatus.FAILED,
            refusal=msgspec.json.encode(refusal).decode(),
            keep_seconds=self._settings.buffer_refused_days * 86_400,
        )
        SINK_BATCHES.labels(result="failed").inc()


class BufferSweeper(Periodic):
    """Deletes the expired files of loaded batches, and of refused ones that were not redriven. Also drops the staging
    tables of Spark loads that a crashed sink left behind."""

    name = "buffer_sweep"

    def __init__(self, database: Database, settings: Settings, objects: Objects, store: Store) -> None:
        self.seconds = settings.sweep_seconds
        self._database = database
        self._objects = objects
        self._store = store
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    async def run_once(self) -> int:
        return await self._sweep_files() + await self._sweep_stagings()

    async def _sweep_stagings(self) -> int:
        found = await self._store.stagings(_FILES)
        if not found:
            return 0
        async with self._database.connection() as connection:
            over: list[Row] = await _sql.loads_over(connection, task_ids=found)
        for row in over:
            await self._store.drop_staging(staging_prefix(row["task_id"]))
        return len(over)

    async def _sweep_files(self) -> int:
        async with self._database.transaction() as connection:
            due: list[Row] = await _sql.take_sweeps(connection, limit=_FILES, again=_AGAIN_SECONDS)
        if not due:
            return 0
        await failpoint("buffer_sweep.taken")
        gone = await asyncio.gather(*(self._delete(row) for row in due))
        swept = [row["publish_id"] for row, deleted in zip(due, gone, strict=True) if deleted]
        # From here on, only the record shows that the rows are loaded, and the record is final.
        await self._store.forget(swept)
        await failpoint("buffer_sweep.before_forgotten")
        async with self._database.connection() as connection:
            await _sql.swept(connection, publish_ids=swept)
        FILES_SWEPT.inc(len(swept))
        return len(swept)

    async def _delete(self, row: Row) -> bool:
        async with self._at_once:
            try:
                await self._objects.delete(row["batch_uri"])
            except InterlockError as error:
                log.warning("batch.not_deleted", publish_id=str(row["publish_id"]), reason=error.detail)
                return False
            return True
