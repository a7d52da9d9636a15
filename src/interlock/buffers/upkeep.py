"""What keeps buffered datasets in order without being told: lost messages, and files that nobody needs any more."""

from __future__ import annotations

import asyncio
import functools
from typing import Final
from uuid import UUID

import msgspec
import structlog

from interlock.adapters.objects import Objects
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.buffers.heavy import staging_prefix
from interlock.buffers.messages import rearm
from interlock.buffers.store import Store
from interlock.errors import InterlockError
from interlock.failpoints import failpoint
from interlock.kernel.loop import Periodic
from interlock.settings import BUFFER_QUEUE, Settings
from interlock.telemetry import FILES_SWEPT, SINK_BATCHES
from interlock.wire import BatchRefusal, PublishStatus

log = structlog.get_logger()

_sql = queries("buffers")

_PAGE: Final = 1_000
_FILES: Final = 200
_AT_ONCE: Final = 8
_AGAIN_SECONDS: Final = 600.0
_FIRST: Final = UUID(int=0)


class BufferReconciler(Periodic):
    """Sends the message of a batch that waits and has none; gives up one that its sinks did not survive."""

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
        """How many were seen to, and where the next page begins."""
        rows: list[Row] = await _sql.without_message(
            connection, after=after, most=_PAGE, queue=BUFFER_QUEUE, grace=self._settings.reconcile_grace_seconds
        )
        await self._send(connection, [row for row in rows if not row["dead"]])
        for row in rows:
            if row["dead"]:
                await self._give_up(connection, row)
        (page,) = await _sql.open_page(connection, after=after, most=_PAGE)
        return len(rows), page["last"] if page["found"] == _PAGE else None

    async def _send(self, connection: Connection, rows: list[Row]) -> None:
        if rows:
            await rearm(connection, rows, self._settings)
            log.info("batches.announced_again", batches=len(rows))

    async def _give_up(self, connection: Connection, row: Row) -> None:
        refusal = BatchRefusal(
            code="too_many_receives",
            detail="Its message was received too often without being settled: no sink has survived it. See the log of "
            "the sink, and redrive the batch.",
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
    """Deletes the files of batches that are loaded, or were refused and not redriven, once their time is over; and what
    a load on Spark has staged, when the sink died before it could drop it."""

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
            due: list[Row] = await _sql.take_sweeps(connection, most=_FILES, again=_AGAIN_SECONDS)
        if not due:
            return 0
        await failpoint("buffer_sweep.taken")
        gone = await asyncio.gather(*(self._delete(row) for row in due))
        swept = [row["publish_id"] for row, deleted in zip(due, gone, strict=True) if deleted]
        # From here on the record alone says that the rows are there, and it is final.
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
