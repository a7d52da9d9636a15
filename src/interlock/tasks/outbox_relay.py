"""Processes the outbox: messages for queues outside Postgres, and tasks for runtimes without a queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from uuid import UUID

import msgspec

from interlock.failpoints import failpoint
from interlock.settings import Settings
from interlock.stores.low_water import low_water
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import (
    CONTENT_ERRORS,
    Connection,
    Database,
    Row,
    database_time,
    isolated,
    queries,
    set_aside,
)
from interlock.tasks.queue import Outgoing, Queue
from interlock.wire.attempts import ClaimRequest

_sql = queries(__name__, "effects")
_BATCH = 500
_RETRY_SECONDS = 5.0


class TaskRef(msgspec.Struct, frozen=True):
    """A task by its id, or by its run and index if the run has its own shard."""

    task_id: UUID | None = None
    run_id: UUID | None = None
    start: int | None = None
    end: int | None = None
    org_id: UUID | None = None
    """Taken from the outbox row, not from its body."""

    def claim(self, worker_id: str, *, tokens: bool = True) -> ClaimRequest:
        return ClaimRequest(
            worker_id=worker_id,
            task_id=self.task_id,
            run_id=self.run_id,
            start=self.start,
            end=self.end,
            tokens=tokens,
        )


Invoke = Callable[[str, TaskRef], Awaitable[bool]]
"""Takes a runtime and a task; returns False if the task cannot be started now."""


_ref = msgspec.json.Decoder(TaskRef)


async def make_due(connection: Connection, runtimes: Sequence[str], *, orgs: Sequence[UUID] | None, limit: int) -> int:
    """Makes the oldest waiting rows of these runtimes due now, and returns their number. `orgs` limits it to some."""
    return len(await _sql.make_due(connection, targets=list(runtimes), orgs=orgs, limit=limit))


class Relay:
    name = "relay"

    def __init__(self, database: Database, settings: Settings, queue: Queue, invoke: Invoke, wakeups: Wakeups) -> None:
        self.seconds = settings.relay_seconds
        self._database = database
        self._queue = queue
        self._invoke = invoke
        self._wakeups = wakeups
        self._water = low_water()

    async def idle(self, seconds: float) -> None:
        await self._wakeups.wait("outbox", seconds)

    async def run_once(self) -> int:
        with self._water.look(await self._database.oldest_begin()) as look:
            async with self._database.connection() as connection:
                rows = await _sql.take_outbox(
                    connection, kinds=["send", "invoke"], limit=_BATCH, retry_seconds=_RETRY_SECONDS, since=look.since
                )
                look.reached = max((row["was_due_at"] for row in rows), default=None) or await database_time(connection)
        await failpoint("relay.taken")
        done = await self._send([row for row in rows if row["kind"] == "send"])
        done += await self._invoke_all([row for row in rows if row["kind"] == "invoke"])
        await failpoint("relay.sent")
        if done:
            async with self._database.connection() as connection:
                await _sql.delete_outbox(connection, ids=done)
        return len(done)

    async def _send(self, rows: list[Row]) -> list[int]:
        by_queue: defaultdict[str, list[Row]] = defaultdict(list)
        for row in rows:
            by_queue[row["target"]].append(row)
        aside = set[int]()
        for queue, owed in by_queue.items():
            # One message per key: a batch may have the same wake-up twice.
            unique = {row["dedupe_key"] or row["outbox_id"]: row for row in owed}
            _, bad = await isolated(self.name, list(unique.values()), partial(self._send_to, queue))
            aside |= {row["outbox_id"] for row, _ in bad}
        return [row["outbox_id"] for row in rows if row["outbox_id"] not in aside]

    async def _send_to(self, queue: str, rows: Sequence[Row]) -> None:
        await self._queue.send(queue, [_message(row) for row in rows])

    async def _invoke_all(self, rows: list[Row]) -> list[int]:
        """Starts each task separately: one that cannot be started is retried later and delays no other."""
        done = []
        for row in rows:
            try:
                if await self._invoke(row["target"], _task_of(row)):
                    done.append(row["outbox_id"])
            except CONTENT_ERRORS as error:
                set_aside(self.name, error)
        return done


def _task_of(row: Row) -> TaskRef:
    return msgspec.structs.replace(_ref.decode(row["body"]), org_id=row["org_id"])


def _message(row: Row) -> Outgoing:
    share = {"org_id": row["org_id"], "share_id": row["share_id"]}
    return Outgoing(row["body"], row["priority"], row["dedupe_key"], **share)
