"""Records of published batches in the state database: listed for users, looked up by message, settled once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from uuid import UUID

import msgspec
from msgspec import Struct

from interlock.datasets.buffers.shape import Shape
from interlock.datasets.buffers.store import Committed, Target
from interlock.errors import Conflict, NotFound
from interlock.failpoints import failpoint
from interlock.http.cursors import next_cursor, uuid_cursor
from interlock.schemas import DatasetSchema
from interlock.settings import BUFFER_QUEUE, Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks import dataset_changes
from interlock.tasks.dataset_changes import BUFFERED, Change
from interlock.tasks.effects import buffer_message
from interlock.wire.attempts import Event
from interlock.wire.datasets import BatchRefusal, BufferPage, BufferView, PublishStatus

_sql = queries(__name__, "buffers")
_schema = msgspec.json.Decoder(DatasetSchema)
_DAY_SECONDS: Final = timedelta(days=1).total_seconds()


class _Producer(Struct, frozen=True):
    task_id: UUID
    attempt: int


class Pointer(Struct, frozen=True):
    """The fields of a message that identify its record."""

    dataset_uuid: UUID
    batch_uri: str
    producer: _Producer


@dataclass(frozen=True, eq=False)
class Publish:
    publish_id: UUID
    org_id: UUID
    task_id: UUID
    attempt: int
    dataset_uuid: UUID
    dataset_version: UUID
    batch_uri: str
    record_count: int
    status: PublishStatus
    target: Target | None
    """None for a dataset version that accepts no batches, or no longer does."""

    @property
    def pending(self) -> bool:
        return self.status is PublishStatus.PENDING


@dataclass(frozen=True)
class Loaded:
    publish: Publish
    committed: Committed
    bytes: int | None
    """None if its rows were already in the table."""


class Records:
    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._keep_loaded = settings.buffer_keep_seconds
        self._keep_refused = settings.buffer_refused_days * _DAY_SECONDS

    async def behind(self, pointers: Sequence[Pointer]) -> list[Publish | None]:
        """Returns the record of each pointer, or None if it does not exist."""
        async with self._database.connection() as connection:
            rows = await _sql.pointed_at(
                connection,
                task_ids=[pointer.producer.task_id for pointer in pointers],
                attempts=[pointer.producer.attempt for pointer in pointers],
                uuids=[pointer.dataset_uuid for pointer in pointers],
                uris=[pointer.batch_uri for pointer in pointers],
            )
        found = {row["n"]: publish_of(row) for row in rows}
        return [found.get(n) for n in range(1, len(pointers) + 1)]

    async def loaded(self, items: Sequence[Loaded]) -> None:
        """Marks batches of one org as loaded and emits their events, in one transaction. Skips settled ones."""
        if items:
            await self._database.run(lambda connection: self._loaded(connection, items))
            await failpoint("sink.state_committed")

    async def _loaded(self, connection: Connection, items: Sequence[Loaded]) -> None:
        changed = {item.publish.publish_id: _change(item) for item in items}
        admitted = await dataset_changes.admit(connection, list(changed.values()))
        org_id = items[0].publish.org_id
        rows = await _sql.lock_open(connection, publish_ids=list(changed), org_id=org_id)
        still = {row["publish_id"] for row in rows}
        fresh = [item for item in items if item.publish.publish_id in still]
        for item in fresh:
            if item.publish.task_id in admitted.refused:
                raise admitted.refused[item.publish.task_id]
        await dataset_changes.write(connection, [changed[item.publish.publish_id] for item in fresh], admitted)
        await _sql.set_loaded(
            connection,
            org_id=org_id,
            publish_ids=[item.publish.publish_id for item in fresh],
            batches=[item.committed.batch for item in fresh],
            rows=[item.committed.rows for item in fresh],
            bytes=[item.bytes for item in fresh],
            keep_seconds=self._keep_loaded,
        )
        await failpoint("sink.before_state_commit")

    async def refused(self, publish: Publish, status: PublishStatus, refusal: BatchRefusal) -> bool:
        """Records a refusal or failure. Returns False if the batch was settled before."""

        async def work(connection: Connection) -> bool:
            row = await _sql.set_settled(
                connection,
                publish_id=publish.publish_id,
                org_id=publish.org_id,
                status=status,
                refusal=msgspec.json.encode(refusal).decode(),
                keep_seconds=self._keep_refused,
            )
            await failpoint("sink.before_refusal_commit")
            return row is not None

        return await self._database.run(work)


def _change(item: Loaded) -> Change:
    publish = item.publish
    event = Event(
        dataset_uuid=publish.dataset_uuid, dataset_version=publish.dataset_version, cursor=item.committed.batch
    )
    return Change(publish.task_id, publish.attempt, publish.org_id, [event], by_sink=True)


def publish_of(row: Row) -> Publish:
    return Publish(
        publish_id=row["publish_id"],
        org_id=row["org_id"],
        task_id=row["task_id"],
        attempt=row["attempt"],
        dataset_uuid=row["dataset_uuid"],
        dataset_version=row["dataset_version"],
        batch_uri=row["batch_uri"],
        record_count=row["record_count"],
        status=PublishStatus(row["status"]),
        target=_target(row),
    )


def _target(row: Row) -> Target | None:
    if row["storage"] != BUFFERED or row["schema"] is None or row["purged_at"] is not None:
        return None
    shape = Shape.of(_schema.decode(row["schema"]), row["unique_key"], update=row["replace_rows"])
    return Target(row["dataset_version"], row["org_id"], shape)


async def rearm(connection: Connection, publishes: Sequence[Row], settings: Settings) -> None:
    """Sends the messages of batches to be loaded, in the transaction that records them."""
    await _sql.rearm(
        connection,
        queue=BUFFER_QUEUE,
        bodies=[buffer_message(publish) for publish in publishes],
        dedupe_keys=[str(publish["publish_id"]) for publish in publishes],
        direct=settings.queue_direct,
    )


async def waiting_long(connection: Connection, *, seconds: float, limit: int) -> int:
    """Counts pending batches that were published more than `seconds` ago, up to `limit`."""
    return int(await _sql.waiting_long(connection, seconds=seconds, limit=limit))


_registry_sql = queries(__name__, "registry")
_refusal = msgspec.json.Decoder(BatchRefusal)


class Buffers:
    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    async def page(self, org_id: UUID, status: PublishStatus | None, cursor: str | None, limit: int) -> BufferPage:
        """Returns a page of batches, newest first."""
        asked = {"org_id": org_id, "cursor": uuid_cursor(cursor, None), "limit": limit}
        async with self._database.connection() as connection:
            if status is None:
                rows = await _sql.list_publishes(connection, **asked)
            else:
                rows = await _sql.list_publishes_by_status(connection, status=status, **asked)
            names = await _names(connection, rows, org_id)
        following = next_cursor(rows, limit, "publish_id")
        # Only `show` includes the refused rows.
        return BufferPage(buffers=[_view(row, names, with_rows=False) for row in rows], next_cursor=following)

    async def show(self, publish_id: UUID, org_id: UUID) -> BufferView:
        async with self._database.connection() as connection:
            row = await self._row(connection, publish_id, org_id)
            return _view(row, await _names(connection, [row], org_id))

    async def redrive(self, publish_id: UUID, org_id: UUID) -> BufferView:
        async def work(connection: Connection) -> BufferView:
            row: Row | None = await _sql.redrive(connection, publish_id=publish_id, org_id=org_id)
            if row is None:
                raise _not_redriven(await self._row(connection, publish_id, org_id))
            await rearm(connection, [row], self._settings)
            await failpoint("buffer_redrive.before_commit")
            return _view(row, await _names(connection, [row], org_id))

        return await self._database.run(work)

    async def _row(self, connection: Connection, publish_id: UUID, org_id: UUID) -> Row:
        row: Row | None = await _sql.publish_by_id(connection, publish_id=publish_id, org_id=org_id)
        if row is None:
            raise NotFound(f"There is no published batch {publish_id} in this org.")
        return row


def _not_redriven(row: Row) -> Conflict:
    if row["status"] in (PublishStatus.REFUSED, PublishStatus.FAILED):
        return Conflict(
            "The file of this batch was deleted after buffer_refused_days: publish it again.", code="batch_swept"
        )
    return Conflict(
        f"This batch is {row['status']}: only a Refused or Failed batch can be redriven.", code="not_redrivable"
    )


async def _names(connection: Connection, rows: Iterable[Row], org_id: UUID) -> dict[UUID, str]:
    """Returns the dataset names as queries use them."""
    wanted = sorted({row["dataset_uuid"] for row in rows})
    found = await _registry_sql.names_of_datasets(connection, dataset_uuids=wanted, org_id=org_id) if wanted else []
    return {row["dataset_uuid"]: name for row in found if (name := _name(row))}


def _name(row: Row) -> str | None:
    published: list[str] = row["names"]
    if published or row["dag_name"] is None:
        return published[0] if published else None
    return f"{row['dag_name']}:{row['job_name']}:{row['output_name']}"


def _view(row: Row, names: Mapping[UUID, str], *, with_rows: bool = True) -> BufferView:
    refusal = None if row["refusal"] is None else _refusal.decode(row["refusal"])
    if refusal is not None and not with_rows:
        refusal = msgspec.structs.replace(refusal, rows=[])
    return BufferView(
        publish_id=row["publish_id"],
        dataset=names.get(row["dataset_uuid"]),
        dataset_uuid=row["dataset_uuid"],
        dataset_version=row["dataset_version"],
        task_id=row["task_id"],
        attempt=row["attempt"],
        batch_uri=row["batch_uri"],
        record_count=row["record_count"],
        status=PublishStatus(row["status"]),
        published_at=row["published_at"],
        settled_at=row["settled_at"],
        batch=row["batch"],
        rows=row["rows"],
        bytes=row["bytes"],
        redrives=row["redrives"],
        load_task=row["load_task"],
        swept_at=row["swept_at"],
        refusal=refusal,
    )
