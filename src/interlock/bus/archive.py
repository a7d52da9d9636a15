"""Writes what is owed to the archive, as partitions of each tenant's dataset of accepted commands.

taken, under a lease ─► a file under the attempt's prefix ─► one commit: partition, event, position; the rows are gone
        ▲                          │ this process dies
        └──────────────────────────┘ the next attempt takes the same rows, and the sweep finds the file
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID, uuid4, uuid5

from interlock.access.tokens import write_prefix
from interlock.adapters.objects import Objects
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.bus.archive_file import SCHEMA, parquet
from interlock.errors import BadRequest, Conflict, Forbidden
from interlock.failpoints import failpoint
from interlock.kernel import changes
from interlock.kernel.changes import Change
from interlock.kernel.isolation import CONTENT_ERRORS, set_aside
from interlock.kernel.loop import Periodic
from interlock.schemas import Marker, hash_of
from interlock.settings import Settings
from interlock.wire import Event, Output

_sql = queries("bus_archive")
_files_sql = queries("files")

NAME: Final = "bus_commands"
"""Under which each tenant's archive is published."""
_FILE: Final = "commands.parquet"
_FULL: Final = {"rows": 10_000, "commands": 50_000}
"""What is owed to one file at the most; a row holds what one write has accepted."""
_MOST_BYTES: Final = 32 * 2**20
"""Of such rows, packed: what the file is made of is in memory."""
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
        """A file of each tenant that is due."""
        async with self._database.connection() as connection:
            found = await _sql.tenants_due(
                connection, after=self._after, wait_seconds=self._wait, most=_TENANTS, **_FULL
            )
        self._after = found[-1]["org_id"] if len(found) == _TENANTS else _FIRST
        written = 0
        for row in found:
            try:
                written += await self.flush(row["org_id"])
            except (*CONTENT_ERRORS, BadRequest, Conflict, Forbidden) as error:
                # What one org has sent keeps no other org's commands from their archive.
                set_aside(self.name, error, org_id=str(row["org_id"]))
        return written

    async def complete(self, org_id: UUID, moment: datetime) -> bool:
        """All that was accepted by then is in the archive now; False while another process writes some of it."""
        while await self._owes(org_id, moment):
            if not await self.flush(org_id):
                return not await self._owes(org_id, moment)
        return True

    async def _owes(self, org_id: UUID, moment: datetime) -> bool:
        async with self._database.connection() as connection:
            return bool(await _sql.owes(connection, org_id=org_id, moment=moment))

    async def flush(self, org_id: UUID) -> int:
        """What is owed to one tenant's archive now, up to a file; 0 when another process is at it."""
        async with self._database.transaction() as connection:
            await _sql.make_archive(connection, org_id=org_id, dataset_uuid=uuid4(), dataset_version=uuid4(), name=NAME)
            taken = await _sql.take_archive(connection, org_id=org_id, lease_seconds=_LEASE_SECONDS)
            if taken is None:
                return 0
            rows = await _sql.waiting(connection, org_id=org_id, bytes=_MOST_BYTES, **_FULL)
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
        await _files_sql.expect_files(
            connection,
            places=[part.prefix],
            versions=[part.version],
            task_ids=[part.task_id],
            attempts=[part.attempt],
            timeouts=[part.taken["now"] + timedelta(seconds=_LEASE_SECONDS)],
            buffers=[False],
            grace=self._grace,
        )

    async def _commit(self, connection: Connection, part: _Part, size: int) -> int:
        change = part.change(size)
        admitted = await changes.admit(connection, [change])
        for refusal in admitted.refused.values():
            raise refusal
        row = await _sql.settle_archive(
            connection, org_id=part.org_id, attempt=part.attempt, ids=part.ids, position=part.end + 1
        )
        if row is None:
            return 0
        await changes.write(connection, [change], admitted)
        await failpoint("archive.before_commit")
        return part.count


class _Part:
    """What one attempt takes, and where it goes."""

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
        # No task has it: it names the part, for the sweep to tell whether it was committed.
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
            dropped: int = await _sql.drop_old(connection, age_seconds=self._age, most=_TENANTS, **page)
            self._after = await _sql.last_of_page(connection, **page) or _FIRST
        return dropped
