"""Side effects of a running attempt: dataset events, published batches, and the state of inline operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import msgspec

from interlock.access.tokens import write_grants
from interlock.errors import Conflict, Forbidden, InterlockError
from interlock.failpoints import failpoint
from interlock.settings import BUFFER_QUEUE, Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks import dataset_changes
from interlock.tasks.dataset_changes import Change
from interlock.tasks.shards import shard_of
from interlock.wire.attempts import BufferPublish, BufferPublished, EventBatch, EventsAccepted
from interlock.wire.jobs import DatasetRef

_sql = queries(__name__, "effects")
_tasks_sql = queries(__name__, "tasks")


class Effects:
    """Writes events and batch pointers that a running attempt reports."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    async def emit(self, batch: EventBatch, state: OperatorState | None = None) -> EventsAccepted | None:
        """Writes events and, in the same transaction, an operator's state.

        Returns None if the attempt does not hold the task.
        """

        async def work(connection: Connection) -> EventsAccepted | None:
            known = await _tasks_sql.outputs_of(connection, shard=shard_of(batch.lease_token), task_ids=[batch.task_id])
            if not known:
                return None
            try:
                dataset_changes.check(batch.events, [], _outputs(known[0]))
            except InterlockError:
                # An attempt that has ended learns only that, and not whether its events were valid.
                if await _locked(connection, batch) is None:
                    return None
                raise
            change = Change(batch.task_id, batch.attempt, known[0]["org_id"], batch.events)
            admitted = await dataset_changes.admit(connection, [change])
            if await _locked(connection, batch) is None:
                return None
            if batch.task_id in admitted.refused:
                raise admitted.refused[batch.task_id]
            accepted = await dataset_changes.write(connection, [change], admitted, shard=shard_of(batch.lease_token))
            if state is not None:
                await keep_state(connection, state)
            await failpoint("events.before_commit")
            return EventsAccepted(accepted=accepted, duplicates=len(batch.events) - accepted)

        return await self._database.run(work)

    async def publish(self, publish: BufferPublish) -> BufferPublished | None:
        """Writes the record and its queue message in one transaction. None if the attempt does not hold the task."""
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
        dataset_changes.check_granted(publish.dataset_uuid, publish.dataset_version, _outputs(row))
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
    """Compares whole segments, and rejects anything that a path resolver could read as a way out of the prefix."""
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
    """Returns the message that notifies the sink of a published batch."""
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


_state_sql = queries(__name__, "operator_state")


class StateMoved(Conflict):
    """Raised if another task wrote the state after this one read it. The caller must start again from the new state."""


@dataclass(frozen=True, slots=True)
class OperatorState:
    job_id: UUID
    name: str
    value: Any
    """JSON; None if there is no state yet."""
    version: int
    """The version that was read; 0 if there was no state."""


async def read_state(database: Database, job_id: UUID, name: str) -> OperatorState:
    async with database.connection() as connection:
        row = await _state_sql.read_state(connection, job_id=job_id, name=name)
    if row is None:
        return OperatorState(job_id, name, None, 0)
    return OperatorState(job_id, name, msgspec.json.decode(row["state"]), row["version"])


async def keep_state(connection: Connection, state: OperatorState) -> None:
    """Writes the state. Raises StateMoved if it changed since it was read, which must roll back the transaction."""
    version = await _state_sql.keep_state(
        connection,
        job_id=state.job_id,
        name=state.name,
        state=msgspec.json.encode(state.value).decode(),
        version=state.version,
    )
    if version is None:
        raise StateMoved(
            f"Another task changed the state of {state.name} after this one read it; the task is retried.",
            code="state_moved",
        )
