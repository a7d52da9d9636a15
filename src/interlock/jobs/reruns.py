"""Reruns: run the tasks of a run again as a new run; all tasks, the failed ones, or those that match a filter.

A few tasks are written immediately. For many, a loop copies their payloads to a list, one stretch at a time, and the
new run is then ingested like any uploaded list. A run whose own ingest failed has no tasks: its list is ingested again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.errors import BadRequest, Conflict
from interlock.failpoints import failpoint
from interlock.jobs.run_sources import StagedPart, StagedSource, announce, part_uri
from interlock.jobs.staged_lists import Uploads, upload_prefix
from interlock.jobs.submission import ClosedRuns, RunSettings, accepted
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.idempotency import Repeat, once
from interlock.tasks.reads import Reads
from interlock.tasks.runs import record_run_events
from interlock.wire.base import RunState
from interlock.wire.jobs import JobAccepted, ListFormat, RerunRequest

_sql = queries(__name__, "reruns")
_ingest_sql = queries(__name__, "ingest")

STRETCH: Final = 10_000
_ORIGINS_PER_ROW: Final = 500
"""Reading the origin of one task reads a whole row of them."""
_LISTED: Final = {"Failed", "Canceled"}
"""Statuses that an index covers, wherever the tasks are in the run."""
_PAUSE_SECONDS: Final = 1.0
_parts = msgspec.json.Decoder(list[StagedPart])
_source = msgspec.json.Decoder(StagedSource)


class Reruns:
    def __init__(
        self, database: Database, settings: Settings, closed: ClosedRuns, uploads: Uploads, reads: Reads
    ) -> None:
        self._database = database
        self._settings = settings
        self._closed = closed
        self._uploads = uploads
        self._reads = reads

    async def rerun(self, job: str, request: RerunRequest, org_id: UUID, repeat: Repeat) -> JobAccepted:
        """Starts a rerun. Few tasks are written immediately; many are copied in the background."""
        run = await self._reads.run_of_job(job, request.run, org_id)
        row = await self._reads.find_job(job, org_id)
        if row["dag_name"] is not None:
            raise Conflict(
                "This job belongs to a DAG: recompute its scopes with a backfill instead.", code="job_of_a_dag"
            )
        _require_ingested(run)

        async def work(connection: Connection) -> JobAccepted:
            unmade = await _sql.unmade_ingest(connection, run_id=run["run_id"], org_id=org_id)
            if unmade is not None:
                reply = await self._ingest_again(connection, row, run, unmade, request)
            elif (few := await self._few(connection, run, request, org_id)) is not None:
                payloads = [Raw(one["payload"].encode()) for one in few]
                reply = await self._closed.run_of(connection, row, payloads, RunSettings.of_run(run))
                await _keep_origins(connection, reply.run_id, 0, few)
            else:
                reply = await self._many(connection, row, run, request)
            await _sql.set_rerun_of(connection, run_id=reply.run_id, org_id=org_id, rerun_of=run["run_id"])
            await failpoint("rerun.before_commit")
            return reply

        endpoint = f"POST /v1/jobs/{row['job_id']}/rerun"
        return await once(self._database, self._settings, org_id, endpoint, repeat, JobAccepted, 202, work)

    async def _few(self, connection: Connection, run: Row, request: RerunRequest, org_id: UUID) -> list[Row] | None:
        """Returns payloads and origins, or None if there are or may be too many. Inspects at most a few thousand."""
        limit, bounds = self._settings.sync_threshold, _bounds(request, run)
        listed = request.status and set(request.status) <= _LISTED
        looked_at = run["failed"] + run["canceled"] if listed else bounds["last"] - bounds["first"] + 1
        if looked_at > 10 * limit:
            return None
        find = _sql.payloads_by_status if listed else _sql.payloads_in_stretch
        rows = await find(
            connection,
            shard=run["shard"],
            run_id=run["run_id"],
            org_id=org_id,
            statuses=request.status or None,
            error_class=request.error_class,
            of_rerun=run["rerun_of"] is not None,
            limit=limit + 1,
            **bounds,
        )
        return rows if len(rows) <= limit else None

    async def _ingest_again(
        self, connection: Connection, job: Row, run: Row, unmade: Row, request: RerunRequest
    ) -> JobAccepted:
        """Starts a new run of the same list. Filters are rejected: the old run has no tasks to filter."""
        run_id = run["run_id"]
        if request.status or request.error_class is not None or request.first or request.last is not None:
            raise Conflict(
                f"Run {run_id} has no tasks to filter, because its list was not ingested: rerun it without a filter to "
                "ingest the list again.",
                code="run_not_ingested",
            )
        source = _source.decode(unmade["source"])
        if not await self._uploads.keep_same(connection, source, job["org_id"]):
            raise Conflict(
                f"The list of run {run_id} was deleted or changed: upload it again, and submit it as a new run.",
                code="list_gone",
            )
        made = await self._ingesting_run(connection, job, run)
        await _ingest_sql.insert_ingest(
            connection, run_id=made["run_id"], org_id=job["org_id"], source=msgspec.json.encode(source).decode()
        )
        await announce(connection, self._settings, [made["run_id"]])
        return accepted(job, made)

    async def _many(self, connection: Connection, job: Row, run: Row, request: RerunRequest) -> JobAccepted:
        made = await self._ingesting_run(connection, job, run)
        seconds = self._settings.upload_hours * 3600
        upload = await _ingest_sql.insert_upload(connection, org_id=job["org_id"], parts=1, seconds=seconds)
        await _sql.insert_rerun(
            connection,
            run_id=made["run_id"],
            org_id=job["org_id"],
            of_run=run["run_id"],
            statuses=request.status or None,
            error_class=request.error_class,
            upload_id=upload["upload_id"],
            **_bounds(request, run),
        )
        return accepted(job, made)

    async def _ingesting_run(self, connection: Connection, job: Row, run: Row) -> Row:
        """Inserts a run without tasks so far, with the settings of `run`."""
        if job["queue"] is None:
            raise BadRequest(
                f"Runtime {job['runtime']!r} has no queue and accepts at most {self._settings.sync_threshold} tasks "
                "per run. Narrow the selection with `status`, `first` and `last`.",
                code="runtime_without_queue",
            )
        made: Row = await _ingest_sql.insert_ingesting_run(
            connection,
            org_id=job["org_id"],
            job_id=job["job_id"],
            range_size=self._settings.range_size,
            open=False,
            **RunSettings.of_run(run).columns,
        )
        return made


class RerunCopies(Periodic):
    """Copies the payloads of tasks to be rerun, and starts their ingest."""

    name = "reruns"
    seconds = _PAUSE_SECONDS

    def __init__(self, database: Database, settings: Settings, objects: Objects) -> None:
        self._database = database
        self._settings = settings
        self._objects = objects

    async def run_once(self) -> int:
        return await self._database.run(self._stretch)

    async def _stretch(self, connection: Connection) -> int:
        """Copies one stretch of one rerun. After a crash before the commit, the same object is written again."""
        rerun = await _sql.next_rerun(connection)
        if rerun is None:
            return 0
        if rerun["next_index"] > rerun["last_index"]:
            await self._hand_over(connection, rerun)
        elif rerun["unwanted"]:
            await self._abandon(connection, rerun, RunState.CANCELED, None)
        elif rerun["of_shard"] is None:
            reason = "The run that it repeats was deleted before all of its tasks were copied."
            await self._abandon(connection, rerun, RunState.FAILED, reason)
        else:
            await self._copy(connection, rerun)
        await failpoint("rerun_copies.before_commit")
        return 1

    async def _copy(self, connection: Connection, rerun: Row) -> None:
        first = rerun["next_index"]
        rows = await _sql.payloads_in_stretch(
            connection,
            shard=rerun["of_shard"],
            run_id=rerun["of_run"],
            org_id=rerun["org_id"],
            statuses=rerun["statuses"],
            error_class=rerun["error_class"],
            of_rerun=rerun["of_rerun"],
            first=first,
            last=min(first + STRETCH - 1, rerun["last_index"]),
            limit=STRETCH,
        )
        parts = _parts.decode(rerun["parts"])
        if rows:
            parts.append(await self._write(rerun, len(parts) + 1, [row["payload"] for row in rows]))
            await _keep_origins(connection, rerun["run_id"], rerun["copied"], rows)
        encoded = msgspec.json.encode(parts).decode()
        await _sql.rerun_copied(
            connection, run_id=rerun["run_id"], next_index=first + STRETCH, parts=encoded, copied=len(rows)
        )

    async def _write(self, rerun: Row, part: int, payloads: list[str]) -> StagedPart:
        # A line feed in JSON is only whitespace between tokens: inside strings it is escaped.
        lines = "".join(f"{payload}\n" for payload in (one.replace("\n", " ").replace("\r", " ") for one in payloads))
        found = await self._objects.put(part_uri(self._prefix(rerun), part), lines.encode())
        return StagedPart(etag=found.etag, size=found.size)

    async def _hand_over(self, connection: Connection, rerun: Row) -> None:
        """Inserts the ingest of the completely copied list. The ingest itself drops a canceled run."""
        parts = _parts.decode(rerun["parts"])
        if not parts:
            found = await self._objects.put(part_uri(self._prefix(rerun), 1), b"")
            parts = [StagedPart(etag=found.etag, size=found.size)]
        await self._insert_ingest(connection, rerun, parts)
        await announce(connection, self._settings, [rerun["run_id"]])

    async def _abandon(self, connection: Connection, rerun: Row, state: RunState, reason: str | None) -> None:
        """Ends a run whose list is incomplete. Without parts, a rerun of this run finds the list gone."""
        await self._insert_ingest(connection, rerun, [])
        over = [rerun["run_id"]]
        which = {"run_id": rerun["run_id"], "org_id": rerun["org_id"]}
        if await _ingest_sql.end_ingest(connection, step=state, state=state, reason=reason, **which):
            now, kept = self._database.clock.now(), self._settings.retention_days
            await record_run_events(connection, over, ended=over, now=now, retention_days=kept)

    async def _insert_ingest(self, connection: Connection, rerun: Row, parts: list[StagedPart]) -> None:
        source = StagedSource(
            upload_id=rerun["upload_id"],
            prefix=self._prefix(rerun),
            format=ListFormat.JSONL,
            sha256=None,
            parts=parts,
        )
        await _sql.set_parts(connection, upload_id=rerun["upload_id"], parts=max(1, len(parts)))
        await _ingest_sql.insert_ingest(
            connection,
            run_id=rerun["run_id"],
            org_id=rerun["org_id"],
            source=msgspec.json.encode(source).decode(),
        )
        await _sql.end_rerun(connection, run_id=rerun["run_id"])

    def _prefix(self, rerun: Row) -> str:
        return upload_prefix(self._objects.root, rerun["org_id"], rerun["upload_id"])


async def _keep_origins(connection: Connection, run_id: UUID, first_index: int, rows: Sequence[Row]) -> None:
    """Stores the original indexes of copied tasks, whose own indexes start at `first_index`."""
    if rows:
        origins = [row["origin"] for row in rows]
        await _sql.insert_origins(
            connection, run_id=run_id, first_index=first_index, origins=origins, stretch=_ORIGINS_PER_ROW
        )


def _require_ingested(run: Row) -> None:
    if run["open"]:
        raise Conflict(
            f"Run {run['run_id']} is open: close it before running it again.",
            code="run_ingesting",
        )
    if run["ingesting"]:
        raise Conflict(
            f"The list of run {run['run_id']} is still being ingested: run it again when that is complete.",
            code="run_ingesting",
        )


def _bounds(request: RerunRequest, run: Row) -> dict[str, Any]:
    last = run["last_index"] if request.last is None else min(request.last, run["last_index"])
    return {"first": request.first, "last": last}
