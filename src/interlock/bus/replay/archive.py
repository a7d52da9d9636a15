"""The archive of accepted commands: a loop writes them as partitions of a dataset of each tenant.

rows taken under a lease ─► a file under the attempt's prefix ─► one commit: partition, event, position; rows deleted
        ▲                          │ the process dies
        └──────────────────────────┘ the next attempt takes the same rows; the sweep deletes the file
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID, uuid4, uuid5

import pyarrow as pa
import pyarrow.parquet as pq

from interlock.access.tokens import write_prefix
from interlock.bus.path.delivery import Accepted, unpacked
from interlock.datasets.files import WrittenPrefix, expect_files
from interlock.errors import BadRequest, Conflict, Forbidden
from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.schemas import Column, DatasetSchema, Marker, hash_of
from interlock.settings import Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import CONTENT_ERRORS, Connection, Database, Row, queries, set_aside
from interlock.tasks import dataset_changes
from interlock.tasks.dataset_changes import Change
from interlock.wire.attempts import Event, Output

_TIME: Final = pa.timestamp("us", tz="UTC")
_COLUMNS: Final = (
    ("position", pa.int64(), "bigint", False),
    ("command_id", pa.string(), "string", False),
    ("source", pa.string(), "string", False),
    ("target", pa.string(), "string", False),
    ("name", pa.string(), "string", False),
    ("timestamp", _TIME, "timestamp", False),
    ("accepted_at", _TIME, "timestamp", False),
    ("version_id", pa.string(), "string", False),
    ("payload", pa.string(), "string", False),
    ("replay_id", pa.string(), "string", True),
    ("replay_reason", pa.string(), "string", True),
)
_ARROW: Final = pa.schema([pa.field(name, kind, nullable=nullable) for name, kind, _, nullable in _COLUMNS])

SCHEMA: Final = DatasetSchema([Column(name, kind, nullable) for name, _, kind, nullable in _COLUMNS], "position")


def parquet(packs: Sequence[tuple[bytes, datetime]], position: int) -> bytes:
    """Returns a file of the packs; each comes with the time at which it was accepted."""
    found = [(unpacked(pack), accepted_at) for pack, accepted_at in packs]
    commands = [each for some, _ in found for each in some]
    moments = [accepted_at for some, accepted_at in found for _ in some]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, _ARROW, compression="zstd", store_schema=False, write_page_index=True) as writer:
        writer.write_table(pa.Table.from_arrays(_arrays(commands, moments, position), schema=_ARROW))
    return bytes(sink.getvalue())


def _arrays(commands: Sequence[Accepted], moments: Sequence[datetime], position: int) -> list[pa.Array]:
    """Builds the table by columns: a tenth of the cost of rows."""
    columns: dict[str, Sequence[object]] = {
        "position": range(position, position + len(commands)),
        "command_id": [each.metadata.id for each in commands],
        "source": [each.command.source for each in commands],
        "target": [each.command.target for each in commands],
        "name": [each.command.name for each in commands],
        "accepted_at": moments,
        "version_id": [each.metadata.version_id for each in commands],
        "payload": [bytes(each.command.payload).decode() for each in commands],
        "replay_id": [each.metadata.replay_id for each in commands],
        "replay_reason": [each.metadata.replay_reason for each in commands],
    }
    # Signed timestamps may have nanoseconds; the archive keeps microseconds.
    signed = pa.array([each.metadata.timestamp for each in commands]).cast(pa.timestamp("ns", tz="UTC"))
    columns["timestamp"] = signed.cast(_TIME, safe=False)
    return [pa.array(columns[field.name], field.type) for field in _ARROW]


# The loop that writes the archive

_sql = queries(__name__, "archive")

NAME: Final = "bus_commands"
"""The name of each tenant's dataset of accepted commands."""
_FILE: Final = "commands.parquet"
_FULL: Final = {"rows": 10_000, "commands": 50_000}
"""Limits of one file; a row holds the commands of one write."""
_MAX_BYTES: Final = 32 * 2**20
"""Limit of the packed rows of one file, which are held in memory."""
_TENANTS: Final = 50
_LEASE_SECONDS: Final = 120.0
_FIRST: Final = UUID(int=0)


class Archive(Periodic):
    name = "archive"

    def __init__(self, database: Database, settings: Settings, objects: Objects) -> None:
        self.seconds = min(settings.archive_seconds, 5.0)
        self._database = database
        self._objects = objects
        self._wait = settings.archive_seconds
        self._grace = settings.sweep_grace_seconds
        self._after = _FIRST

    async def run_once(self) -> int:
        """Writes one file for each tenant that is due."""
        async with self._database.connection() as connection:
            found = await _sql.tenants_due(
                connection, after=self._after, wait_seconds=self._wait, limit=_TENANTS, **_FULL
            )
        self._after = found[-1]["org_id"] if len(found) == _TENANTS else _FIRST
        written = 0
        for row in found:
            try:
                written += await self.flush(row["org_id"])
            except (*CONTENT_ERRORS, BadRequest, Conflict, Forbidden) as error:
                # The commands of one org must not block the archive of another.
                set_aside(self.name, error, org_id=str(row["org_id"]))
        return written

    async def complete(self, org_id: UUID, moment: datetime) -> bool:
        """Writes everything that was accepted by `moment`. Returns False while another process writes some of it."""
        while await self._owes(org_id, moment):
            if not await self.flush(org_id):
                return not await self._owes(org_id, moment)
        return True

    async def _owes(self, org_id: UUID, moment: datetime) -> bool:
        async with self._database.connection() as connection:
            return bool(await _sql.owes(connection, org_id=org_id, moment=moment))

    async def flush(self, org_id: UUID) -> int:
        """Writes up to one file for one tenant. Returns 0 if there is nothing to write, or another process writes."""
        async with self._database.transaction() as connection:
            await _sql.make_archive(connection, org_id=org_id, dataset_uuid=uuid4(), dataset_version=uuid4(), name=NAME)
            taken = await _sql.take_archive(connection, org_id=org_id, lease_seconds=_LEASE_SECONDS)
            if taken is None:
                return 0
            rows = await _sql.waiting(connection, org_id=org_id, bytes=_MAX_BYTES, **_FULL)
            part = _Part(taken, rows, self._objects.root)
            if not rows:
                await _sql.release_archive(connection, org_id=org_id, attempt=taken["attempt"])
                return 0
            await self._expect(connection, part)
        data = await asyncio.to_thread(part.file)
        await self._objects.put(part.location, data)
        await failpoint("archive.written")
        return await self._database.run(lambda connection: self._commit(connection, part, len(data)))

    async def _expect(self, connection: Connection, part: _Part) -> None:
        timeout_at = part.taken["now"] + timedelta(seconds=_LEASE_SECONDS)
        prefix = WrittenPrefix(part.prefix, part.version, part.task_id, part.attempt, timeout_at, committed=True)
        await expect_files(connection, [prefix], grace=self._grace)

    async def _commit(self, connection: Connection, part: _Part, size: int) -> int:
        change = part.change(size)
        admitted = await dataset_changes.admit(connection, [change])
        for refusal in admitted.refused.values():
            raise refusal
        row = await _sql.settle_archive(
            connection, org_id=part.org_id, attempt=part.attempt, ids=part.ids, position=part.end + 1
        )
        if row is None:
            return 0
        await dataset_changes.write(connection, [change], admitted)
        await failpoint("archive.before_commit")
        return part.count


class _Part:
    """The rows of one attempt, and the location of their file."""

    def __init__(self, taken: Row, rows: Sequence[Row], root: str) -> None:
        self.taken = taken
        self.org_id: UUID = taken["org_id"]
        self.version: UUID = taken["dataset_version"]
        self.attempt: int = taken["attempt"]
        self._rows = rows
        self.ids: list[int] = [row["archive_id"] for row in rows]
        self.count: int = sum(row["commands_in"] for row in rows)
        self.start: int = taken["position"]
        self.end = self.start + self.count - 1
        # No task has this id. It identifies the part: the sweep checks by it whether the part was committed.
        self.task_id = uuid5(self.version, str(self.start))
        self.prefix = write_prefix(root, self.task_id, self.attempt, taken["dataset_uuid"], self.version)
        self.location = self.prefix + _FILE

    def file(self) -> bytes:
        return parquet([(row["accepted"], row["accepted_at"]) for row in self._rows], self.start)

    def change(self, size: int) -> Change:
        scope = {
            "dataset_uuid": self.taken["dataset_uuid"],
            "dataset_version": self.version,
            "partition_key": f"{self.start}-{self.end}",
            "start": self.start,
            "end": self.end,
        }
        output = Output(location=self.location, row_count=self.count, bytes=size, schema_hash=hash_of(SCHEMA), **scope)
        marker = Marker(file=_FILE, row_count=self.count, bytes=size, schema=SCHEMA, min=self.start, max=self.end)
        return Change(self.task_id, self.attempt, self.org_id, [Event(**scope)], [output], [self.prefix], {0: marker})


class ArchiveRetention(Periodic):
    name = "archive_retention"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.retention_seconds
        self._database = database
        self._age = settings.archive_days * 86_400
        self._after = _FIRST

    async def run_once(self) -> int:
        async with self._database.transaction() as connection:
            page = {"after": self._after, "tenants": _TENANTS}
            dropped: int = await _sql.drop_old(connection, age_seconds=self._age, limit=_TENANTS, **page)
            self._after = await _sql.last_of_page(connection, **page) or _FIRST
        return dropped
