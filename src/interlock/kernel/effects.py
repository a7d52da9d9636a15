"""What an attempt causes beyond its own status: dataset events, committed outputs, published batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from interlock.access.tokens import write_grants
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.errors import BadRequest, Forbidden
from interlock.failpoints import failpoint
from interlock.settings import BUFFER_QUEUE, Settings
from interlock.wire import (
    BufferPublish,
    BufferPublished,
    Completion,
    DatasetRef,
    Event,
    EventBatch,
    EventsAccepted,
    Output,
)

_sql = queries("effects")
_tasks_sql = queries("tasks")


def check_effects(events: Sequence[Event], outputs: Sequence[Output], granted: Sequence[DatasetRef]) -> None:
    """An attempt speaks only for the outputs of its own job, and in scopes that make sense."""
    for event in events:
        _check_scope(event)
        _check_granted(event.dataset_uuid, event.dataset_version, granted)
    slots = [(output.output_index, output.dataset_uuid) for output in outputs]
    if len(set(slots)) != len(slots):
        raise BadRequest("Two outputs have the same output_index and dataset_uuid.", code="duplicate_output")
    for output in outputs:
        _check_granted(output.dataset_uuid, output.dataset_version, granted)
        if output.partition_key is not None or output.start is not None or output.end is not None:
            _check_partition(output.partition_key, output.start, output.end)


def _check_granted(dataset: UUID, version: UUID, granted: Sequence[DatasetRef]) -> None:
    if not any(ref.dataset_uuid == dataset and ref.dataset_version == version for ref in granted):
        raise Forbidden(
            f"Dataset {dataset} version {version} is not an output of this job; declare it under `outputs`.",
            code="dataset_not_granted",
        )


def _check_scope(event: Event) -> None:
    partitioned = event.partition_key is not None or event.start is not None or event.end is not None
    if partitioned == (event.cursor is not None):
        raise BadRequest(
            "An event carries either `cursor`, or `partition_key` with `start` and `end`.",
            code="bad_event_scope",
        )
    if partitioned:
        _check_partition(event.partition_key, event.start, event.end)


def _check_partition(key: str | None, start: int | None, end: int | None) -> None:
    if start is None or end is None or start > end or key not in (None, f"{start}-{end}"):
        raise BadRequest(
            "A partition needs `start` <= `end`, both inclusive, and `partition_key` equal to '{start}-{end}'.",
            code="bad_partition",
        )


async def write_effects(connection: Connection, item: Completion, org_id: UUID) -> None:
    """Written in the transaction that completes the task: visible together or not at all."""
    if item.outputs:
        await _sql.insert_outputs(
            connection,
            task_id=item.task_id,
            org_id=org_id,
            attempt=item.attempt,
            indexes=[o.output_index for o in item.outputs],
            uuids=[o.dataset_uuid for o in item.outputs],
            versions=[o.dataset_version for o in item.outputs],
            bodies=[msgspec.json.encode(o).decode() for o in item.outputs],
        )
    if item.events:
        await _insert_events(connection, item.events, item.task_id, item.attempt, org_id)


async def _insert_events(
    connection: Connection, events: Sequence[Event], task_id: UUID, attempt: int, org_id: UUID
) -> int:
    rows = await _sql.insert_events(
        connection,
        org_id=org_id,
        task_id=task_id,
        attempt=attempt,
        uuids=[e.dataset_uuid for e in events],
        versions=[e.dataset_version for e in events],
        cursors=[e.cursor for e in events],
        keys=[None if e.cursor is not None else f"{e.start}-{e.end}" for e in events],
        starts=[e.start for e in events],
        ends=[e.end for e in events],
    )
    return len(rows)


class Effects:
    """Mid-task events and batch pointers of a running attempt."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    async def emit(self, batch: EventBatch) -> EventsAccepted | None:
        """None when the attempt does not hold the task."""
        async with self._database.transaction() as connection:
            row = await _locked(connection, batch)
            if row is None:
                return None
            check_effects(batch.events, [], _outputs(row))
            accepted = await _insert_events(connection, batch.events, batch.task_id, batch.attempt, row["org_id"])
            await failpoint("events.before_commit")
        return EventsAccepted(accepted=accepted, duplicates=len(batch.events) - accepted)

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
                body=_buffer_message(publish, row["org_id"]),
                dedupe_key=str(inserted["publish_id"]),
                direct=self._settings.queue_direct,
            )
            await failpoint("publish.before_commit")
        return BufferPublished(publish_id=inserted["publish_id"])

    def _check_batch(self, publish: BufferPublish, row: Row) -> None:
        _check_granted(publish.dataset_uuid, publish.dataset_version, _outputs(row))
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


def _buffer_message(publish: BufferPublish, org_id: UUID) -> str:
    message = {
        "kind": "buffer_batch",
        "org_id": org_id,
        "dataset_uuid": publish.dataset_uuid,
        "dataset_version": publish.dataset_version,
        "batch_uri": publish.batch_uri,
        "record_count": publish.record_count,
        "producer": {"task_id": publish.task_id, "attempt": publish.attempt},
    }
    return msgspec.json.encode(message).decode()


async def _locked(connection: Connection, fence: EventBatch | BufferPublish) -> Row | None:
    row: Row | None = await _tasks_sql.lock_attempt(
        connection, shard=0, task_id=fence.task_id, attempt=fence.attempt, lease_token=fence.lease_token
    )
    return row


def _outputs(row: Row) -> list[DatasetRef]:
    outputs: list[DatasetRef] = msgspec.json.decode(row["outputs"], type=list[DatasetRef])
    return outputs
