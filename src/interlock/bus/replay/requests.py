"""Requests for replays, by operators. sender.py carries them out."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import msgspec
import pyarrow.parquet as pq
import structlog
from msgspec import Struct

from interlock.access.principals import Principal
from interlock.bus.replay.archive import NAME, Archive
from interlock.errors import BadRequest, Conflict, NotFound
from interlock.http.cursors import LAST, next_cursor, uuid_cursor
from interlock.jobs.spark_loads import batch_prefix
from interlock.jobs.submission import ClosedRuns
from interlock.query.records import Asker, BatchQueries, Queries, StoredFile, batch_task
from interlock.query.relations import Version
from interlock.schemas import DatasetSchema
from interlock.settings import Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.result_packs import Packs
from interlock.wire.bus_messages import (
    ReplayFilters,
    ReplayOrigin,
    ReplayPage,
    ReplayRequest,
    ReplayState,
    ReplayView,
    SelectedCommand,
)
from interlock.wire.queries import QueryMode

log = structlog.get_logger()
_sql = queries(__name__, "replays")
_filters = msgspec.json.Decoder(ReplayFilters)


class Replays:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, request: ReplayRequest, caller: Principal) -> ReplayView:
        _check(request)
        async with self._database.transaction() as connection:
            row = await _sql.insert_replay(
                connection,
                org_id=caller.org_id,
                origin=request.origin.value,
                filters=msgspec.json.encode(request.filters).decode(),
                reason=request.reason,
                operator=caller.user,
                dry_run=request.dry_run,
                rate=request.rate,
                limit=request.limit,
            )
        log.info(
            "replay.requested",
            replay_id=str(row["replay_id"]),
            org=caller.org,
            operator=caller.user,
            reason=request.reason,
            dry_run=request.dry_run,
        )
        return view(row)

    async def page(self, caller: Principal, cursor: str | None, limit: int) -> ReplayPage:
        before = uuid_cursor(cursor, LAST)
        async with self._database.connection() as connection:
            rows = await _sql.list_replays(connection, org_id=caller.org_id, before=before, limit=limit)
        return ReplayPage(replays=[view(row) for row in rows], next_cursor=next_cursor(rows, limit, "replay_id"))

    async def replay(self, replay_id: UUID, caller: Principal) -> ReplayView:
        async with self._database.connection() as connection:
            row = await _sql.find_replay(connection, org_id=caller.org_id, replay_id=replay_id)
        if row is None:
            raise NotFound(f"There is no replay {replay_id} in this org.")
        return view(row)

    async def cancel(self, replay_id: UUID, caller: Principal) -> ReplayView:
        """Cancels a replay. Commands that were sent already are not affected."""
        async with self._database.transaction() as connection:
            row = await _sql.cancel_replay(connection, org_id=caller.org_id, replay_id=replay_id)
        if row is None:
            ended = await self.replay(replay_id, caller)
            raise Conflict(f"Replay {replay_id} is {ended.state} already.", code="replay_ended")
        return view(row)


def _check(request: ReplayRequest) -> None:
    filters = request.filters
    if (request.origin is ReplayOrigin.DEAD_LETTERS) != (filters.queue is not None):
        raise BadRequest(
            "`filters.queue` names the queue of the dead letters: origin dead-letters requires it, origin archive does "
            "not allow it.",
            code="bad_replay",
        )
    if any(moment is not None and moment.tzinfo is None for moment in (filters.since, filters.until)):
        raise BadRequest("`since` and `until` need a time zone, such as 2026-01-31T12:00:00Z.", code="bad_replay")
    if not request.reason.isprintable():
        raise BadRequest("`reason` must be one line of printable text.", code="bad_replay")


def filters_of(row: Row) -> ReplayFilters:
    return _filters.decode(row["filters"])


def view(row: Row) -> ReplayView:
    return ReplayView(
        replay_id=row["replay_id"],
        origin=ReplayOrigin(row["origin"]),
        filters=filters_of(row),
        reason=row["reason"],
        operator=row["operator"],
        dry_run=row["dry_run"],
        rate=row["rate"],
        limit=row["most"],
        state=ReplayState(row["state"]),
        task_id=row["task_id"],
        selected=row["selected"],
        sent=row["sent"],
        failed=row["failed"],
        detail=row["detail"],
        created_at=row["created_at"],
        ended_at=row["ended_at"],
    )


_schema = msgspec.json.Decoder(DatasetSchema)

_ROWS: Final = 5_000


class Result(Struct):
    """The result of the task."""

    files: list[StoredFile]
    row_count: int


class NotYet(Exception):
    """Raised while the archive is incomplete because another process still writes to it."""


class DidNotComplete(Exception):
    """Raised if the task that reads the archive did not complete. The text is the reason."""


_result = msgspec.json.Decoder(Result)


class ArchiveSelection:
    def __init__(self, database: Database, settings: Settings, objects: Objects, archive: Archive) -> None:
        self._database = database
        self._objects = objects
        self._archive = archive
        self._packs = Packs(database, objects, inline_bytes=settings.result_inline_bytes)
        self._queries = Queries(database, settings, objects, self._packs)
        self._batches = BatchQueries(database, ClosedRuns(database, settings))

    async def submit(self, row: Row) -> UUID | None:
        """Submits the task that reads the archive, and returns its id; None if there is no archive. All commands
        accepted before the request are archived first. Raises NotYet while another process writes some of them."""
        org_id = row["org_id"]
        if not await self._archive.complete(org_id, row["created_at"]):
            raise NotYet
        async with self._database.connection() as connection:
            found = await _sql.archive_of(connection, org_id=org_id)
            source = await source_of(connection, org_id, filters_of(row))
        if found is None or found["schema"] is None:
            return None
        version = Version(
            found["dataset_uuid"], found["dataset_version"], found["storage"], _schema.decode(found["schema"])
        )
        sql = selection(filters_of(row), source, row["most"])
        record = await self._queries.open(Asker(org_id, user=row["operator"]), QueryMode.BATCH, sql)
        return await self._batches.submit(record, sql, {NAME: version})

    async def result(self, row: Row) -> Result | None:
        """Returns None while the task runs. Raises DidNotComplete if it failed."""
        async with self._database.connection() as connection:
            task = await batch_task(connection, row["task_id"], row["org_id"])
        if task is None or task["status"] == "Canceled" or task["dead"]:
            raise DidNotComplete("it is gone" if task is None else task["error"] or task["status"])
        result = await self._packs.result_of(task) if task["status"] == "Completed" else None
        return None if result is None else self._own(row, _result.decode(result))

    def _own(self, row: Row, result: Result) -> Result:
        """Refuses a result with files outside the prefix that the task may write to."""
        own = batch_prefix(self._objects.root, row["org_id"], row["task_id"])
        if not all(file.uri.startswith(own) for file in result.files):
            raise DidNotComplete("it names files that are not its own")
        return result

    async def keep(self, connection: Connection, row: Row, result: Result) -> None:
        start = 0
        for file in result.files:
            data = await self._objects.read(file.uri)
            if data is None:
                raise DidNotComplete("its result has expired")
            for commands in await asyncio.to_thread(_rows, data):
                await _sql.insert_items(
                    connection,
                    replay_id=row["replay_id"],
                    start=start,
                    command_ids=[command.command_id for command in commands],
                    sources=[command.source for command in commands],
                    targets=[command.target for command in commands],
                    names=[command.name for command in commands],
                    payloads=[command.payload for command in commands],
                )
                start += len(commands)


def selection(filters: ReplayFilters, source: str | None, limit: int) -> str:
    """Returns the statement for Spark. Values are validated names, ids and times: none contains a quote."""
    conditions = [
        f"{column} = '{value}'"
        for column, value in (("source", source), ("target", filters.target), ("name", filters.name))
        if value is not None
    ]
    if filters.since is not None:
        conditions.append(f"accepted_at >= timestamp '{_moment(filters.since)}'")
    if filters.until is not None:
        conditions.append(f"accepted_at < timestamp '{_moment(filters.until)}'")
    if filters.command_ids is not None:
        listed = ", ".join(f"'{each}'" for each in filters.command_ids)
        conditions.append(f"command_id in ({listed})")
    where = f" where {' and '.join(conditions)}" if conditions else ""
    columns = ", ".join(SelectedCommand.__struct_fields__)
    return f"select {columns} from {NAME}{where} order by position limit {limit}"  # noqa: S608 - see above


def _moment(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f+00:00")


async def source_of(connection: Connection, org_id: UUID, filters: ReplayFilters) -> str | None:
    if filters.source is None:
        return None
    return f"{await _sql.org_name(connection, org_id=org_id)}/{filters.source}"


def _rows(data: bytes) -> list[list[SelectedCommand]]:
    return list(_batches(pq.ParquetFile(io.BytesIO(data))))


def _batches(file: pq.ParquetFile) -> Iterator[list[SelectedCommand]]:
    for batch in file.iter_batches(_ROWS):
        yield msgspec.convert(batch.to_pylist(), list[SelectedCommand])
