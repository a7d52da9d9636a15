"""Carries out what the outbox owes: messages for queues outside Postgres, tasks for runtimes without a queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from uuid import UUID

import msgspec

from interlock.adapters.lowwater import low_water
from interlock.adapters.notifications import Wakeups
from interlock.adapters.postgres import Database, Row, queries
from interlock.adapters.queue import Outgoing, Queue
from interlock.failpoints import failpoint
from interlock.kernel.isolation import CONTENT_ERRORS, set_aside
from interlock.settings import Settings
from interlock.wire import ClaimRequest

_sql = queries("effects")
_BATCH = 500
_RETRY_SECONDS = 5.0


class TaskRef(msgspec.Struct, frozen=True):
    """A task by its id; one of a run with a shard of its own by its place in the run."""

    task_id: UUID | None = None
    run_id: UUID | None = None
    start: int | None = None
    end: int | None = None
    org_id: UUID | None = None
    """Of the outbox row, not of its body."""

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
"""Runtime and task; False when it cannot take the task now."""


_ref = msgspec.json.Decoder(TaskRef)


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
                    connection, kinds=["send", "invoke"], most=_BATCH, retry_seconds=_RETRY_SECONDS, since=look.since
                )
                look.reached = max((row["was_due_at"] for row in rows), default=None) or await _sql.clock(connection)
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
        for queue, owed in by_queue.items():
            # One message per key: a batch may owe the same wake-up twice.
            unique = {row["dedupe_key"] or row["outbox_id"]: row for row in owed}
            await self._queue.send_batch(queue, [_message(row) for row in unique.values()])
        return [row["outbox_id"] for row in rows]

    async def _invoke_all(self, rows: list[Row]) -> list[int]:
        """Each by itself: a task that cannot be started is tried again later, and holds nobody else up."""
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
