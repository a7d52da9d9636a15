"""The loops of one ingest process, with those that repair stuck ingests and delete old uploads."""

from __future__ import annotations

import functools
from typing import Final
from uuid import UUID

import structlog

from interlock.failpoints import failpoint
from interlock.jobs.backfills import HeldRuns
from interlock.jobs.ingest import Ingest
from interlock.jobs.ingest_records import Records, close_open_run
from interlock.jobs.run_sources import announce
from interlock.jobs.spark_loads import SparkIngests
from interlock.jobs.staged_lists import upload_prefix
from interlock.processes.loop import Periodic, Service
from interlock.settings import INGEST_QUEUE, Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.queue import Queue
from interlock.telemetry import FILES_SWEPT


def services(
    settings: Settings, database: Database, queue: Queue, objects: Objects, state_url: str, *, wait_seconds: float
) -> list[Service]:
    records = Records(database, settings)
    heavy = SparkIngests(database, settings, records)
    readers = [
        Ingest(settings, database, queue, objects, state_url, heavy, wait_seconds=wait_seconds)
        for _ in range(settings.ingest_concurrency)
    ]
    return [
        *readers,
        heavy,
        HeldRuns(database, settings),
        IngestReconciler(database, settings, records),
        UnwantedRuns(database, settings),
        UploadSweeper(database, settings, objects),
    ]


log = structlog.get_logger()

_sql = queries(__name__, "ingest")
_PAGE: Final = 1000
_UPLOADS: Final = 50
_AGAIN_SECONDS: Final = 600.0
_FIRST: Final = UUID(int=0)


class IngestReconciler(Periodic):
    """Resends lost messages of waiting ingests, and fails a run whose list crashes every ingest process."""

    name = "ingest_reconciler"

    def __init__(self, database: Database, settings: Settings, records: Records) -> None:
        self.seconds = settings.reconcile_seconds
        self._database = database
        self._settings = settings
        self._records = records

    async def run_once(self) -> int:
        after, found = _FIRST, 0
        while True:
            rows: list[Row] = await self._database.run(functools.partial(self._page, after=after))
            for row in rows:
                if row["dead"]:
                    await self._give_up(row)
            found += len(rows)
            if len(rows) < _PAGE:
                return found
            after = rows[-1]["run_id"]

    async def _page(self, connection: Connection, *, after: UUID) -> list[Row]:
        rows: list[Row] = await _sql.stuck_ingests(
            connection, after=after, limit=_PAGE, queue=INGEST_QUEUE, grace=self._settings.reconcile_grace_seconds
        )
        lost = [row["run_id"] for row in rows if not row["dead"]]
        if lost:
            await announce(connection, self._settings, lost)
            log.info("ingests.announced_again", runs=len(lost))
        return rows

    async def _give_up(self, row: Row) -> None:
        pending = await self._records.pending(row["run_id"])
        if pending is not None:
            await self._records.failed(
                pending,
                "Its message was received too many times without being settled: every ingest process crashed on the "
                "list. See the log of the ingest, and submit the list again.",
            )


class UnwantedRuns(Periodic):
    """Closes open runs that were canceled or that a run limit stopped: nothing else would close them."""

    name = "unwanted_runs"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.retry_seconds
        self._database = database
        self._settings = settings

    async def run_once(self) -> int:
        return await self._database.run(self._close)

    async def _close(self, connection: Connection) -> int:
        rows: list[Row] = await _sql.unwanted_open_runs(connection, limit=_PAGE)
        for row in rows:
            now, kept = self._database.clock.now(), self._settings.retention_days
            await close_open_run(connection, row["run_id"], row["org_id"], now=now, retention_days=kept)
        return len(rows)


class UploadSweeper(Periodic):
    """Deletes expired lists, except those that a run is still ingesting."""

    name = "upload_sweep"

    def __init__(self, database: Database, settings: Settings, objects: Objects) -> None:
        self.seconds = settings.sweep_seconds
        self._database = database
        self._objects = objects

    async def run_once(self) -> int:
        due = await self._database.run(self._take)
        for row in due:
            prefix = upload_prefix(self._objects.root, row["org_id"], row["upload_id"])
            FILES_SWEPT.inc(await self._objects.delete_under(prefix))
        if due:
            await failpoint("upload_sweep.before_forgotten")
            async with self._database.connection() as connection:
                await _sql.delete_uploads(connection, upload_ids=[row["upload_id"] for row in due])
        return len(due)

    async def _take(self, connection: Connection) -> list[Row]:
        """Takes expired uploads and postpones them, so that a failed sweep is retried later."""
        rows: list[Row] = await _sql.uploads_to_sweep(connection, limit=_UPLOADS)
        ids = [row["upload_id"] for row in rows]
        if not ids:
            return []
        used = {row["upload_id"] for row in await _sql.uploads_in_use(connection, upload_ids=ids)}
        await _sql.postpone_uploads(connection, upload_ids=ids, seconds=_AGAIN_SECONDS)
        return [row for row in rows if row["upload_id"] not in used]
