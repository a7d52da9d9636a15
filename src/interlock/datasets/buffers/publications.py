"""Published batches for users, and the messages that wake the sink."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

import msgspec

from interlock.errors import BadRequest, Conflict, NotFound
from interlock.failpoints import failpoint
from interlock.settings import BUFFER_QUEUE, Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.effects import buffer_message
from interlock.wire import BatchRefusal, BufferPage, BufferView, PublishStatus

_sql = queries("datasets", "buffers")


async def rearm(connection: Connection, publishes: Sequence[Row], settings: Settings) -> None:
    """Sends the messages of batches to be loaded, in the transaction that records them."""
    await _sql.rearm(
        connection,
        queue=BUFFER_QUEUE,
        bodies=[buffer_message(publish) for publish in publishes],
        dedupe_keys=[str(publish["publish_id"]) for publish in publishes],
        direct=settings.queue_direct,
    )


_registry_sql = queries("datasets", "registry")
_refusal = msgspec.json.Decoder(BatchRefusal)


class Buffers:
    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    async def page(self, org_id: UUID, status: PublishStatus | None, cursor: str | None, limit: int) -> BufferPage:
        """Returns a page of batches, newest first."""
        asked = {"org_id": org_id, "cursor": _cursor(cursor), "limit": limit}
        async with self._database.connection() as connection:
            if status is None:
                rows = await _sql.list_publishes(connection, **asked)
            else:
                rows = await _sql.list_publishes_by_status(connection, status=status, **asked)
            names = await _names(connection, rows, org_id)
        following = str(rows[-1]["publish_id"]) if len(rows) == limit else None
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


def _cursor(cursor: str | None) -> UUID | None:
    try:
        return None if cursor is None else UUID(cursor)
    except ValueError:
        raise BadRequest(
            "`cursor` is not one this server gave out; start again without it.", code="bad_cursor"
        ) from None


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
