"""What of the archive is to be sent again: Spark reads it, as a batch query, and its result is written down.

The statement is made here of names, ids and times that were read as such. It goes the way of every batch query: a task
that may read this dataset and nothing else, and whose result is a file of its own.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import msgspec
import pyarrow.parquet as pq
from msgspec import Struct

from interlock.adapters.objects import Objects
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.bus.archive import NAME, Archive
from interlock.bus.replays import filters_of
from interlock.kernel.batch_queries import BatchQueries
from interlock.kernel.packs import Packs
from interlock.kernel.queries import Asker, Queries, StoredFile, batch_prefix
from interlock.kernel.query_relations import Version
from interlock.kernel.shards import SMALL_SHARD
from interlock.kernel.submission import Submissions
from interlock.schemas import DatasetSchema
from interlock.settings import Settings
from interlock.wire import QueryMode
from interlock.wire.bus_replays import ReplayFilters, SelectedCommand

_sql = queries("bus_replays")
_queries_sql = queries("queries")
_schema = msgspec.json.Decoder(DatasetSchema)

_ROWS: Final = 5_000


class Result(Struct):
    """Of the task."""

    files: list[StoredFile]
    row_count: int


class NotYet(Exception):
    """The archive lacks something that it will have in a moment."""


class DidNotComplete(Exception):
    """The task that reads the archive; the message says why."""


_result = msgspec.json.Decoder(Result)


class ArchiveSelection:
    def __init__(self, database: Database, settings: Settings, objects: Objects, archive: Archive) -> None:
        self._database = database
        self._objects = objects
        self._archive = archive
        self._packs = Packs(database, objects, inline_bytes=settings.result_inline_bytes)
        self._queries = Queries(database, settings, objects, self._packs)
        self._batches = BatchQueries(database, Submissions(database, settings))

    async def ask(self, row: Row) -> UUID | None:
        """The task that reads it; None if there is nothing to read. What was accepted when it was asked for is in the
        archive first. Raises NotYet while others are writing that."""
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
        """None while the task has not ended. Raises DidNotComplete."""
        async with self._database.connection() as connection:
            task = await _queries_sql.batch_task(
                connection, shard=SMALL_SHARD, task_id=row["task_id"], org_id=row["org_id"]
            )
        if task is None or task["status"] == "Canceled" or task["dead"]:
            raise DidNotComplete("it is gone" if task is None else task["error"] or task["status"])
        said = await self._packs.result_of(task) if task["status"] == "Completed" else None
        return None if said is None else self._own(row, _result.decode(said))

    def _own(self, row: Row, result: Result) -> Result:
        """What it says is read only where it may write."""
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


def selection(filters: ReplayFilters, source: str | None, most: int) -> str:
    """The statement for Spark. Values are names, ids and times that were read as such: none has a quote in it."""
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
    return f"select {columns} from {NAME}{where} order by position limit {most}"  # noqa: S608 - see above


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
