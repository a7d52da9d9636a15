"""Exports of whole runs as files: Parquet, JSON lines or zip.

A loop copies the rows of the run's tasks to objects, one stretch of indexes at a time. So no long transaction reads the
state database, and Spark needs no credentials for it. A Spark task then joins the rows with the packed results, writes
one file per stretch, and finally the manifest with the checksums.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.errors import Conflict, NotFound
from interlock.failpoints import failpoint
from interlock.http.cursors import number_cursor
from interlock.jobs.spark_loads import MANIFEST, RUN_EXPORT, attempt_prefix, export_prefix, rows_prefix, staged_uri
from interlock.jobs.submission import ClosedRuns
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.idempotency import Repeat, once
from interlock.tasks.reads import Reads
from interlock.tasks.shards import run_task_id
from interlock.telemetry import TASKS_CREATED
from interlock.wire.base import TaskStatus
from interlock.wire.jobs import (
    ExportFormat,
    ExportManifest,
    ExportPart,
    ExportRequest,
    ExportState,
    ExportView,
    JobRequest,
    Policy,
)

_sql = queries(__name__, "exports")

RUNTIME: Final = "spark"
STRETCH: Final = 10_000
URL_SECONDS: Final = 24 * 3600.0
_POLICY: Final = Policy(max_attempts=5)
_MAX_MANIFEST_BYTES: Final = 64 << 20
_PAUSE_SECONDS: Final = 1.0


class Exports:
    def __init__(self, database: Database, settings: Settings, objects: Objects, reads: Reads) -> None:
        self._database = database
        self._settings = settings
        self._objects = objects
        self._reads = reads

    async def start(self, job: str, request: ExportRequest, org_id: UUID, repeat: Repeat) -> ExportView:
        run = await self._reads.run_of_job(job, request.run, org_id)
        if run["ended_at"] is None:
            raise Conflict(
                f"Run {run['run_id']} is {run['state']}: a run can be exported once it has ended.", code="run_not_ended"
            )

        async def work(connection: Connection) -> ExportView:
            view = _view(await self._begin(connection, run, request.format))
            await failpoint("export.before_commit")
            return view

        endpoint = f"POST /v1/jobs/{run['job_id']}/exports"
        return await once(self._database, self._settings, org_id, endpoint, repeat, ExportView, 202, work)

    async def _begin(self, connection: Connection, run: Row, form: ExportFormat) -> Row:
        row: Row = await _sql.insert_export(
            connection,
            org_id=run["org_id"],
            job_id=run["job_id"],
            run_id=run["run_id"],
            format=form.value,
            stretch=STRETCH,
            last_index=run["last_index"],
        )
        await _sql.expect_export(
            connection,
            place=export_prefix(self._objects.root, row["org_id"], row["export_id"]),
            seconds=self._settings.export_days * 86_400,
            keep=self._settings.replaced_files_seconds,
        )
        return row

    async def export(self, job: str, export_id: UUID, org_id: UUID, cursor: str | None, limit: int) -> ExportView:
        """Returns the export with freshly signed URLs of its files."""
        job_id = (await self._reads.find_job(job, org_id))["job_id"]
        async with self._database.connection() as connection:
            row = await _sql.find_export(connection, export_id=export_id, job_id=job_id, org_id=org_id)
        if row is None:
            raise NotFound(f"Job {job!r} has no export {export_id}; old exports are deleted with their runs.")
        view = _view(row)
        if view.state is not ExportState.COMPLETED:
            return view
        return await self._with_files(view, row, number_cursor(cursor, 0), limit)

    async def _with_files(self, view: ExportView, row: Row, start: int, limit: int) -> ExportView:
        prefix = attempt_prefix(self._objects.root, row["org_id"], row["export_id"], row["attempt"])
        expires = row["created_at"] + timedelta(days=self._settings.export_days)
        raw = await self._objects.read(f"{prefix}{MANIFEST}", _MAX_MANIFEST_BYTES)
        if raw is None or expires <= self._database.clock.now():
            raise NotFound(
                f"The files of export {view.export_id} have expired and were deleted; create another export."
            )
        manifest = msgspec.json.decode(raw, type=ExportManifest)
        page = manifest.parts[start : start + limit]
        return msgspec.structs.replace(
            view,
            rows=manifest.rows,
            bytes=manifest.bytes,
            manifest_url=await self._objects.sign("GET", f"{prefix}{MANIFEST}", URL_SECONDS),
            parts=[await self._signed(prefix, part) for part in page],
            next_cursor=str(start + limit) if start + limit < len(manifest.parts) else None,
        )

    async def _signed(self, prefix: str, part: ExportPart) -> ExportPart:
        return msgspec.structs.replace(part, url=await self._objects.sign("GET", f"{prefix}{part.name}", URL_SECONDS))


class ExportStaging(Periodic):
    """Copies the rows of runs to be exported, and submits the Spark task that writes the files."""

    name = "exports"
    seconds = _PAUSE_SECONDS

    def __init__(self, database: Database, settings: Settings, objects: Objects) -> None:
        self._database = database
        self._objects = objects
        self._closed_runs = ClosedRuns(database, settings)

    async def run_once(self) -> int:
        return await self._database.run(self._stretch)

    async def _stretch(self, connection: Connection) -> int:
        """Stages one stretch of one export. After a crash before the commit, the same objects are written again."""
        export = await _sql.next_export(connection)
        if export is None:
            return 0
        first, task_id = export["next_index"], None
        # If the run was deleted meanwhile, the Spark task finds the remaining rows missing and reports that.
        if first <= export["last_index"] and export["shard"] is not None:
            await self._stage(connection, export, first)
            first = min(first + export["stretch"], export["last_index"] + 1)
        if first > export["last_index"] or export["shard"] is None:
            task_id = await self._submit(connection, export)
        await _sql.staged(connection, export_id=export["export_id"], next_index=first, task_id=task_id)
        await failpoint("export_staging.before_commit")
        return 1

    async def _stage(self, connection: Connection, export: Row, first: int) -> None:
        rows = await _sql.rows_of_stretch(
            connection,
            shard=export["shard"],
            run_id=export["run_id"],
            first=first,
            last=first + export["stretch"] - 1,
        )
        place = rows_prefix(self._objects.root, export["org_id"], export["export_id"])
        lines = "".join(f"{row['line']}\n" for row in rows)
        await self._objects.put(staged_uri(place, first // export["stretch"]), lines.encode())

    async def _submit(self, connection: Connection, export: Row) -> UUID:
        request = JobRequest(operator=RUN_EXPORT, runtime=RUNTIME, policy=_POLICY, tasks=[Raw(b"{}")])
        accepted = await self._closed_runs.within(connection, request, export["org_id"])
        TASKS_CREATED.labels(runtime=RUNTIME).inc()
        return run_task_id(accepted.run_id, 0)


def _view(row: Row) -> ExportView:
    state = _state(row)
    return ExportView(
        export_id=row["export_id"],
        job_id=row["job_id"],
        run_id=row["run_id"],
        format=ExportFormat(row["format"]),
        state=state,
        staged=row["next_index"],
        of=row["last_index"] + 1,
        created_at=row["created_at"],
        task_id=row["task_id"],
        error=row["error"] if state is ExportState.FAILED else None,
    )


def _state(row: Row) -> ExportState:
    if row["task_id"] is None:
        return ExportState.STAGING
    if row["status"] == TaskStatus.COMPLETED:
        return ExportState.COMPLETED
    # A missing task was deleted by retention, long after it ended.
    over = row["status"] in (None, TaskStatus.CANCELED) or row["dead"]
    return ExportState.FAILED if over else ExportState.RUNNING
