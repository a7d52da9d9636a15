"""Tasks of a run once more, as a run of their own: all of them, the failed ones, or those behind a filter.

A few are written at once. For many, a loop copies their payloads to a list, a stretch at a time, and the run is then
ingested as of any list that somebody has uploaded.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.adapters.objects import Objects
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.bulk.messages import announce
from interlock.bulk.sources import StagedPart, StagedSource, part_uri
from interlock.bulk.uploads import upload_prefix
from interlock.errors import BadRequest, Conflict
from interlock.failpoints import failpoint
from interlock.kernel.idempotency import Repeat, once
from interlock.kernel.loop import Periodic
from interlock.kernel.reads import Reads
from interlock.kernel.submission import Submissions
from interlock.settings import Settings
from interlock.wire import JobAccepted, ListFormat, RerunRequest, RunState

_sql = queries("reruns")
_ingest_sql = queries("ingest")

STRETCH: Final = 10_000
_LISTED: Final = {"Failed", "Canceled"}
"""What an index finds, wherever it lies."""
_PAUSE_SECONDS: Final = 1.0
_parts = msgspec.json.Decoder(list[StagedPart])


class Reruns:
    def __init__(self, database: Database, settings: Settings, submissions: Submissions, reads: Reads) -> None:
        self._database = database
        self._settings = settings
        self._submissions = submissions
        self._reads = reads

    async def rerun(self, job: str, request: RerunRequest, org_id: UUID, repeat: Repeat) -> JobAccepted:
        """At once when there are few; else written down, and copied in the background."""
        run = await self._reads.run_of_job(job, request.run, org_id)
        row = await self._reads.find_job(job, org_id)
        if row["dag_name"] is not None:
            raise Conflict(
                "This is a job of a DAG: have its scopes computed again with a backfill.", code="job_of_a_dag"
            )
        if run["ingesting"]:
            raise Conflict(
                f"The list of run {run['run_id']} is still being read: run it again when it is complete.",
                code="run_ingesting",
            )

        async def work(connection: Connection) -> JobAccepted:
            few = await self._few(connection, run, request, org_id)
            if few is not None:
                accepted = await self._submissions.run_of(connection, row, few, run["retention_days"])
            else:
                accepted = await self._many(connection, row, run, request)
            await failpoint("rerun.before_commit")
            return accepted

        endpoint = f"POST /v1/jobs/{row['job_id']}/rerun"
        return await once(self._database, self._settings, org_id, endpoint, repeat, JobAccepted, 202, work)

    async def _few(self, connection: Connection, run: Row, request: RerunRequest, org_id: UUID) -> list[Raw] | None:
        """None when there are many, or may be: nothing here looks at more than a few thousand."""
        most, bounds = self._settings.sync_threshold, _bounds(request, run)
        listed = request.status and set(request.status) <= _LISTED
        looked_at = run["failed"] + run["canceled"] if listed else bounds["last"] - bounds["first"] + 1
        if looked_at > 10 * most:
            return None
        find = _sql.payloads_by_status if listed else _sql.payloads_in_stretch
        rows = await find(
            connection,
            shard=run["shard"],
            run_id=run["run_id"],
            org_id=org_id,
            statuses=request.status or None,
            error_class=request.error_class,
            most=most + 1,
            **bounds,
        )
        return [Raw(row["payload"].encode()) for row in rows] if len(rows) <= most else None

    async def _many(self, connection: Connection, job: Row, run: Row, request: RerunRequest) -> JobAccepted:
        if job["queue"] is None:
            raise BadRequest(
                f"Runtime {job['runtime']!r} has no queue: it takes at most {self._settings.sync_threshold} tasks at "
                "once. Narrow them with `status`, `first` and `last`.",
                code="runtime_without_queue",
            )
        made = await _ingest_sql.insert_ingesting_run(
            connection,
            org_id=job["org_id"],
            job_id=job["job_id"],
            range_size=self._settings.range_size,
            max_concurrency=run["max_concurrency"],
            rate_key=run["rate_key"],
            rate_per_second=run["rate_per_second"],
            tolerated_share=run["tolerated_share"],
            deadline_seconds=None,
            retention_days=run["retention_days"],
            open=False,
        )
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
        return JobAccepted(
            job_id=job["job_id"],
            run_id=made["run_id"],
            state=RunState(made["state"]),
            total=None,
            deduplicated=0,
            tasks_url=f"/v1/jobs/{job['job_id']}/tasks",
            status_url=f"/v1/jobs/{job['job_id']}",
        )


class RerunCopies(Periodic):
    """Copies the payloads of tasks that are to run once more, and has them ingested."""

    name = "reruns"
    seconds = _PAUSE_SECONDS

    def __init__(self, database: Database, settings: Settings, objects: Objects) -> None:
        self._database = database
        self._settings = settings
        self._objects = objects

    async def run_once(self) -> int:
        return await self._database.run(self._stretch)

    async def _stretch(self, connection: Connection) -> int:
        """One stretch of one rerun. A crash before the commit copies it again, to the same place."""
        rerun = await _sql.next_rerun(connection)
        if rerun is None:
            return 0
        if rerun["of_shard"] is None or rerun["unwanted"] or rerun["next_index"] > rerun["last_index"]:
            await self._hand_over(connection, rerun)
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
            first=first,
            last=min(first + STRETCH - 1, rerun["last_index"]),
            most=STRETCH,
        )
        parts = _parts.decode(rerun["parts"])
        if rows:
            parts.append(await self._write(rerun, len(parts) + 1, [row["payload"] for row in rows]))
        encoded = msgspec.json.encode(parts).decode()
        await _sql.rerun_copied(connection, run_id=rerun["run_id"], next_index=first + STRETCH, parts=encoded)

    async def _write(self, rerun: Row, part: int, payloads: list[str]) -> StagedPart:
        # Line feeds in JSON are nothing but space between its parts: in strings they are escaped.
        lines = "".join(f"{payload}\n" for payload in (one.replace("\n", " ").replace("\r", " ") for one in payloads))
        found = await self._objects.put(part_uri(self._prefix(rerun), part), lines.encode())
        return StagedPart(etag=found.etag, size=found.size)

    async def _hand_over(self, connection: Connection, rerun: Row) -> None:
        """Of a run that was deleted meanwhile, as far as it was copied. What nobody wants, the ingest leaves."""
        parts = _parts.decode(rerun["parts"])
        if not parts:
            found = await self._objects.put(part_uri(self._prefix(rerun), 1), b"")
            parts = [StagedPart(etag=found.etag, size=found.size)]
        source = StagedSource(
            upload_id=rerun["upload_id"],
            prefix=self._prefix(rerun),
            format=ListFormat.JSONL,
            sha256=None,
            parts=parts,
        )
        await _sql.set_parts(connection, upload_id=rerun["upload_id"], parts=len(parts))
        await _ingest_sql.insert_ingest(
            connection,
            run_id=rerun["run_id"],
            org_id=rerun["org_id"],
            source=msgspec.json.encode(source).decode(),
        )
        await announce(connection, self._settings, [rerun["run_id"]])
        await _sql.end_rerun(connection, run_id=rerun["run_id"])

    def _prefix(self, rerun: Row) -> str:
        return upload_prefix(self._objects.root, rerun["org_id"], rerun["upload_id"])


def _bounds(request: RerunRequest, run: Row) -> dict[str, Any]:
    last = run["last_index"] if request.last is None else min(request.last, run["last_index"])
    return {"first": request.first, "last": last}
