"""What a running attempt causes beyond its own status: dataset events and published batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

import msgspec

from interlock.access.tokens import write_grants
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.errors import Forbidden, InterlockError
from interlock.failpoints import failpoint
from interlock.kernel import changes
from interlock.kernel.changes import Change
from interlock.kernel.operator_state import OperatorState, keep_state
from interlock.kernel.shards import shard_of
from interlock.settings import BUFFER_QUEUE, Settings
from interlock.wire import BufferPublish, BufferPublished, DatasetRef, EventBatch, EventsAccepted

_sql = queries("effects")
_tasks_sql = queries("tasks")


class Effects:
    """Mid-task events and batch pointers of a running attempt."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    async def emit(self, batch: EventBatch, state: OperatorState | None = None) -> EventsAccepted | None:
        """None when the attempt does not hold the task. A state is kept exactly when the events are."""

        async def work(connection: Connection) -> EventsAccepted | None:
            known = await _tasks_sql.outputs_of(connection, shard=shard_of(batch.lease_token), task_ids=[batch.task_id])
            if not known:
                return None
            try:
                changes.check(batch.events, [], _outputs(known[0]))
            except InterlockError:
                # An attempt that is over hears that, and nothing about what it says.
                if await _locked(connection, batch) is None:
                    return None
                raise
            change = Change(batch.task_id, batch.attempt, known[0]["org_id"], batch.events)
            admitted = await changes.admit(connection, [change])
            if await _locked(connection, batch) is None:
                return None
            if batch.task_id in admitted.refused:
                raise admitted.refused[batch.task_id]
            accepted = await changes.write(connection, [change], admitted, shard=shard_of(batch.lease_token))
            if state is not None:
                await keep_state(connection, state)
            await failpoint("events.before_commit")
            return EventsAccepted(accepted=accepted, duplicates=len(batch.events) - accepted)

        return await self._database.run(work)

    async def publish(self, publish: BufferPublish) -> BufferPublished | None:
        """The record and its queue message are one transaction. None when the attempt does not hold the task."""
        async with self._database.transaction() as connection:
            row = await _locked(connection, publish)
            if row is None:
                return None
            self._check_batch(publish, row)
            inserted = await _sql.insert_publish(
                connection, org_id=row["org_id"], **msgspec.structs.asdict(_without_lease(publish))
            )
            if inserted is None:
                known = await _sql.existing_publish(connection, **_identity(publish))
                return BufferPublished(publish_id=known, duplicate=True)
            await _sql.send_message(
                connection,
                queue=BUFFER_QUEUE,
                body=buffer_message(msgspec.structs.asdict(publish) | {"org_id": row["org_id"]}),
                dedupe_key=str(inserted["publish_id"]),
                direct=self._settings.queue_direct,
            )
            await failpoint("publish.before_commit")
        return BufferPublished(publish_id=inserted["publish_id"])

    def _check_batch(self, publish: BufferPublish, row: Row) -> None:
        changes.check_granted(publish.dataset_uuid, publish.dataset_version, _outputs(row))
        grants = write_grants(self._settings.objects_root, publish.task_id, publish.attempt, _outputs(row))
        prefixes = [g.buffer_prefix for g in grants if g.dataset_uuid == publish.dataset_uuid]
        if not any(_lies_under(publish.batch_uri, prefix) for prefix in prefixes):
            raise Forbidden(
                "batch_uri must lie under this attempt's own buffer prefix (`outputs[].buffer_prefix` of the task).",
                code="batch_outside_prefix",
            )


class _Publish(msgspec.Struct, frozen=True):
    task_id: UUID
    attempt: int
    dataset_uuid: UUID
    dataset_version: UUID
    batch_uri: str
    record_count: int


def _without_lease(publish: BufferPublish) -> _Publish:
    return msgspec.convert(publish, _Publish, from_attributes=True)


def _identity(publish: BufferPublish) -> dict[str, Any]:
    return {
        "task_id": publish.task_id,
        "attempt": publish.attempt,
        "dataset_uuid": publish.dataset_uuid,
        "batch_uri": publish.batch_uri,
    }


def _lies_under(uri: str, prefix: str) -> bool:
    """Whole segments only, and nothing that a path resolver could read as a way out."""
    rest = uri.removeprefix(prefix)
    return (
        uri.startswith(prefix)
        and rest != ""
        and all(segment not in ("", ".", "..") for segment in rest.split("/"))
        and not any(c in rest for c in "*?%\\")
        and rest.isprintable()
    )


_OF_MESSAGE: Final = ("org_id", "dataset_uuid", "dataset_version", "batch_uri", "record_count")


def buffer_message(publish: Mapping[str, Any] | Row) -> str:
    """What stands in the record of a publish, as the sink is told of it."""
    producer = {"task_id": publish["task_id"], "attempt": publish["attempt"]}
    message = {"kind": "buffer_batch"} | {name: publish[name] for name in _OF_MESSAGE} | {"producer": producer}
    return msgspec.json.encode(message).decode()


async def _locked(connection: Connection, fence: EventBatch | BufferPublish) -> Row | None:
    row: Row | None = await _tasks_sql.lock_attempt(
        connection,
        shard=shard_of(fence.lease_token),
        task_id=fence.task_id,
        attempt=fence.attempt,
        lease_token=fence.lease_token,
    )
    return row


def _outputs(row: Row) -> list[DatasetRef]:
    outputs: list[DatasetRef] = msgspec.json.decode(row["outputs"], type=list[DatasetRef])
    return outputs
