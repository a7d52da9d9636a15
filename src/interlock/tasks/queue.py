"""The queue port, and the messages of tasks. Messages are wake-ups: at-least-once, roughly ordered, small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from uuid import UUID

from interlock.failpoints import failpoint
from interlock.stores.postgres import Connection, queries
from interlock.tasks.shards import SMALL_SHARD, shards_of_jobs

_sql = queries(__name__, "tasks")
_jobs_sql = queries(__name__, "jobs")


@dataclass(frozen=True)
class Outgoing:
    body: str
    """JSON text."""
    priority: int = 0
    """0 normal, 1 bulk."""
    dedupe_key: str | None = None
    """If a message with this key is still queued, sending re-arms it instead of adding another one."""
    delay_seconds: float = 0.0
    org_id: UUID | None = None
    share_id: UUID | None = None
    """The run or job of the message, for fair sharing of workers. None for messages without a task."""


@dataclass(frozen=True)
class Received:
    message_id: str
    receipt: str
    body: str
    receives: int
    enqueued_at: datetime


@dataclass(frozen=True)
class DeadLetter:
    message_id: str
    body: str
    receives: int
    enqueued_at: datetime
    dead_at: datetime


@dataclass(frozen=True)
class Handle:
    """Identifies one delivery. A later delivery of the same message makes it stale."""

    message_id: str
    receipt: str


class Queue(Protocol):
    """The queue port. Methods with handles return the number of handles that were still valid."""

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> None: ...

    async def receive(
        self, queue: str, *, wait_seconds: float, limit: int, visibility_seconds: float
    ) -> list[Received]: ...

    async def extend(self, queue: str, handles: Sequence[Handle], visibility_seconds: float) -> int: ...

    async def ack(self, queue: str, handles: Sequence[Handle]) -> int: ...

    async def nack(self, queue: str, handles: Sequence[Handle], delay_seconds: float) -> int: ...

    async def bury(self, queue: str, handles: Sequence[Handle]) -> int:
        """Turns messages into dead letters immediately, because they cannot be processed."""

    async def replace(self, queue: str, handle: Handle, body: str, *, delay_seconds: float = 0.0) -> int:
        """Settles a message partially: replaces its body with the remaining work and makes it visible again."""

    async def depth(self, queue: str) -> int: ...

    async def in_flight(self, queue: str) -> int: ...

    async def oldest_age(self, queue: str) -> float | None: ...

    async def dead_letters(self, queue: str, limit: int) -> list[DeadLetter]: ...

    async def dead_letter_count(self, queue: str) -> int: ...

    async def redrive(self, queue: str, limit: int) -> int: ...


async def enqueue(connection: Connection, task_ids: Sequence[UUID], *, direct: bool, shard: int = SMALL_SHARD) -> None:
    """Sends wake-ups for tasks that were just queued, in the transaction that queued them."""
    await _jobs_sql.enqueue_tasks(connection, shard=shard, task_ids=list(task_ids), direct=direct)


async def wake_parked(connection: Connection, jobs: Sequence[UUID], keys: Sequence[str], *, direct: bool) -> int:
    """Gives freed slots of these jobs and concurrency keys to parked tasks."""
    await _sql.lock_capped_jobs(connection, job_ids=list(jobs))
    woken = 0
    for shard in await shards_of_jobs(connection, jobs):
        rows = await _sql.unpark(connection, shard=shard, job_ids=list(jobs), keys=list(keys))
        if rows:
            await enqueue(connection, [row["task_id"] for row in rows], shard=shard, direct=direct)
        woken += len(rows)
    await failpoint("wake.before_commit")
    return woken
