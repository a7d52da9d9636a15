"""The queue port on a Postgres table: SKIP LOCKED, visibility timeout, dead letters, LISTEN/NOTIFY wake-ups."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from interlock.adapters.lowwater import LowWater, low_water
from interlock.adapters.notifications import Wakeups
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.adapters.queue import DeadLetter, Handle, Outgoing, Received
from interlock.adapters.shares import Key, Shares, Waiting
from interlock.failpoints import armed, failpoint

_sql = queries("queue")
_POLL_SECONDS = 1.0
"""How long a lost notification can go unnoticed."""
_STATS_LIMIT = 100_000
_NORMAL, _BULK = 0, 1
_LOOK_SECONDS = 0.25
"""For how long it holds, at least, who waits and what they have running."""
_LOOK_SHARE = 0.02
"""Of the time, at most, goes to finding that out."""
_MOST_SHARES = 1000
_OLDEST_SHARE = 0.1
"""Of the batches, so many go to whoever has waited longest: nothing waits for a turn that does not come."""
_NOBODY = (UUID(int=0), UUID(int=0))


@dataclass
class _Crowd:
    """Who waits in a queue, as far as this process knows. Nobody asks while all who wait are served at once."""

    lanes: tuple[Shares, Shares] = field(default_factory=lambda: (Shares(), Shares()))
    after: list[Key] = field(default_factory=lambda: [_NOBODY, _NOBODY])
    full: bool = False
    """The last batch was: there may be more than can be served."""
    look_at: float = 0.0

    @property
    def mixed(self) -> bool:
        return any(len(lane) > 1 for lane in self.lanes)


@dataclass(frozen=True)
class _Batch:
    """What is asked for at once: so many messages, of whom, and how many of the normal lane as they come."""

    most: int
    turns: list[tuple[int, Waiting, int]]
    as_they_come: int


class PgQueue:
    def __init__(
        self,
        database: Database,
        wakeups: Wakeups,
        *,
        max_receives: int = 20,
        bulk_share: float = 0.1,
        dice: Callable[[], float] = random.random,
    ) -> None:
        self._database = database
        self._wakeups = wakeups
        self._max_receives = max_receives
        self._bulk_share = bulk_share
        self._dice = dice
        self._crowds: defaultdict[str, _Crowd] = defaultdict(_Crowd)
        self._waters: defaultdict[str, tuple[LowWater[datetime], LowWater[datetime]]] = defaultdict(
            lambda: (low_water(), low_water())  # normal, bulk
        )

    async def send(self, queue: str, message: Outgoing) -> None:
        await self.send_batch(queue, [message])

    async def send_batch(self, queue: str, messages: Sequence[Outgoing]) -> None:
        # The last of each key: one statement cannot re-arm the same message twice.
        unique = list({m.dedupe_key if m.dedupe_key is not None else n: m for n, m in enumerate(messages)}.values())
        if not unique:
            return
        async with self._database.transaction() as connection:
            await _sql.send(
                connection,
                queue=queue,
                bodies=[m.body for m in unique],
                priorities=[m.priority for m in unique],
                org_ids=[m.org_id for m in unique],
                share_ids=[m.share_id for m in unique],
                dedupe_keys=[m.dedupe_key for m in unique],
                delays=[m.delay_seconds for m in unique],
            )
            await _sql.notify(connection, queue=queue)

    async def receive(self, queue: str, *, wait_seconds: float, most: int, visibility_seconds: float) -> list[Received]:
        deadline = time.monotonic() + wait_seconds
        topic = f"queue:{queue}"
        while True:
            messages, next_visible = await self._take(queue, most, visibility_seconds)
            left = deadline - time.monotonic()
            if messages:
                # There may be more than this receiver took: let the next waiter look.
                self._wakeups.wake(topic)
                return messages
            if left <= 0 or self._wakeups.closed:
                return []
            pause = min(left, _POLL_SECONDS, max(next_visible, 0.005))
            await self._wakeups.wait(topic, pause)

    async def _take(self, queue: str, most: int, visibility: float) -> tuple[list[Received], float]:
        crowd = self._crowds[queue]
        if crowd.full and time.monotonic() >= crowd.look_at:
            await self._look(queue, crowd)
        if crowd.mixed and self._dice() >= _OLDEST_SHARE:
            messages = await self._take_in_turn(queue, crowd, most, visibility)
            if messages:
                return messages, 0.0
        messages, ahead = await self._take_oldest(queue, most, visibility)
        crowd.full = len(messages) == most
        return messages, ahead

    async def _look(self, queue: str, crowd: _Crowd) -> None:
        """Who waits. Of very many, others the next time."""
        crowd.look_at = time.monotonic() + _LOOK_SECONDS  # one looks, and the others go on with what they know
        started = time.monotonic()
        for lane in (_NORMAL, _BULK):
            org_id, share_id = crowd.after[lane]
            async with self._database.connection() as connection:
                rows = await _sql.waiting_shares(
                    connection, queue=queue, lane=lane, after_org=org_id, after_share=share_id, most=_MOST_SHARES
                )
            crowd.lanes[lane].found(_waiting(row) for row in rows if row["waits"])
            more = len(rows) == _MOST_SHARES
            crowd.after[lane] = (rows[-1]["org_id"], rows[-1]["share_id"]) if more else _NOBODY
        ended = time.monotonic()
        crowd.look_at = ended + max(_LOOK_SECONDS, (ended - started) / _LOOK_SHARE)

    async def _take_in_turn(self, queue: str, crowd: _Crowd, most: int, visibility: float) -> list[Received]:
        """What those get whose turn it is; the room that they leave, the next ones."""
        messages = list[Received]()
        reserved = self._reserved(most)  # once: each round that fills up the rest would give bulk another chance
        while len(messages) < most:
            batch = self._batch(crowd, most - len(messages), reserved)
            rows = await self._receive_in_turn(queue, batch, visibility)
            reserved = max(0, reserved - sum(row["priority"] == _BULK for row in rows))
            if not batch.as_they_come or all(row["priority"] == _BULK for row in rows):
                _note_exhausted(crowd, batch, rows)
            messages += [_received(row) for row in rows if not row["dead"]]
            if not batch.turns:
                break
        await failpoint("receive.committed")
        return messages

    def _batch(self, crowd: _Crowd, most: int, reserved: int) -> _Batch:
        """Normal before bulk, but the places that are bulk's first. A lane in which one share waits has no turns."""
        normal, bulk = crowd.lanes
        reserved = min(most, reserved) if len(bulk) else 0
        if len(normal) > 1:
            turns = [(_BULK, share, count) for share, count in bulk.next(reserved)]
            turns += [(_NORMAL, share, count) for share, count in normal.next(most - reserved)]
            return _Batch(most, turns, as_they_come=0)
        turns = [(_BULK, share, count) for share, count in bulk.next(most)]
        return _Batch(most, turns, as_they_come=most - reserved)

    async def _receive_in_turn(self, queue: str, batch: _Batch, visibility: float) -> list[Row]:
        with self._waters[queue][_NORMAL].look(await self._database.oldest_begin()) as look:

            async def work(connection: Connection) -> list[Row]:
                rows: list[Row] = await _sql.receive_in_turn(
                    connection,
                    queue=queue,
                    most=batch.most,
                    normal_most=batch.as_they_come,
                    normal_since=look.since,
                    lanes=[lane for lane, _, _ in batch.turns],
                    org_ids=[share.org_id for _, share, _ in batch.turns],
                    share_ids=[share.share_id for _, share, _ in batch.turns],
                    sinces=[share.since for _, share, _ in batch.turns],
                    mosts=[count for _, _, count in batch.turns],
                    visibility=visibility,
                    max_receives=self._max_receives,
                )
                await failpoint("receive.before_commit")
                return rows

            rows = await self._database.run(work, transaction=armed("receive.before_commit"))
            look.skipped = not batch.as_they_come
            if batch.as_they_come:
                look.reached = max((r["was_visible_at"] for r in rows if r["priority"] == _NORMAL), default=None)
        return rows

    async def _take_oldest(self, queue: str, most: int, visibility: float) -> tuple[list[Received], float]:
        normal_water, bulk_water = self._waters[queue]
        floor = await self._database.oldest_begin()
        with normal_water.look(floor) as normal, bulk_water.look(floor) as bulk:
            since = {"normal_since": normal.since, "bulk_since": bulk.since}

            async def work(connection: Connection) -> tuple[list[Row], Row | None]:
                rows: list[Row] = await _sql.receive(
                    connection,
                    queue=queue,
                    most=most,
                    reserved=self._reserved(most),
                    visibility=visibility,
                    max_receives=self._max_receives,
                    **since,
                )
                await failpoint("receive.before_commit")
                return rows, None if rows else await _sql.next_visible(connection, queue=queue, **since)

            rows, ahead = await self._database.run(work, transaction=armed("receive.before_commit"))
            for priority, look in enumerate((normal, bulk)):
                taken = [row["was_visible_at"] for row in rows if row["priority"] == priority]
                look.reached = max(taken, default=ahead["now"] if ahead is not None else None)
        await failpoint("receive.committed")
        messages = [_received(row) for row in rows if not row["dead"]]
        if ahead is None:
            return messages, 0.0
        return messages, _POLL_SECONDS if ahead["seconds"] is None else ahead["seconds"]

    def _reserved(self, most: int) -> int:
        """Places that bulk gets first: the share of a batch, by chance where that is less than one."""
        share = most * self._bulk_share
        return int(share) + (self._dice() < share - int(share))

    async def extend(self, queue: str, handles: Sequence[Handle], visibility_seconds: float) -> int:
        return await self._settle(_sql.extend, queue, handles, visibility=visibility_seconds)

    async def ack(self, queue: str, handles: Sequence[Handle]) -> int:
        return await self._settle(_sql.ack, queue, handles)

    async def nack(self, queue: str, handles: Sequence[Handle], delay_seconds: float) -> int:
        settled = await self._settle(_sql.nack, queue, handles, delay=delay_seconds)
        if settled and delay_seconds == 0:
            async with self._database.connection() as connection:
                await _sql.notify(connection, queue=queue)
        return settled

    async def bury(self, queue: str, handles: Sequence[Handle]) -> int:
        return await self._settle(_sql.bury, queue, handles)

    async def replace(self, queue: str, handle: Handle, body: str, *, delay_seconds: float = 0.0) -> int:
        known = _parsed(handle)
        if known is None:
            return 0
        async with self._database.connection() as connection:
            rows = await _sql.replace(
                connection, queue=queue, message_id=known[0], receipt=known[1], body=body, delay=delay_seconds
            )
        return len(rows)

    async def _settle(self, statement: Any, queue: str, handles: Sequence[Handle], **more: float) -> int:
        good = [pair for handle in handles if (pair := _parsed(handle)) is not None]
        if not good:
            return 0
        ids, receipts = [i for i, _ in good], [r for _, r in good]

        async def work(connection: Connection) -> int:
            rows = await statement(connection, queue=queue, ids=ids, receipts=receipts, **more)
            await failpoint("settle.before_commit")
            return len(rows)

        return await self._database.run(work, transaction=armed("settle.before_commit"))

    async def depth(self, queue: str) -> int:
        return int((await self._stats(queue))["depth"])

    async def in_flight(self, queue: str) -> int:
        return int((await self._stats(queue))["in_flight"])

    async def oldest_age(self, queue: str) -> float | None:
        age = (await self._stats(queue))["oldest_age"]
        return None if age is None else float(age)

    async def dead_letter_count(self, queue: str) -> int:
        return int((await self._stats(queue))["dead_letters"])

    async def _stats(self, queue: str) -> Any:
        async with self._database.connection() as connection:
            return await _sql.stats(connection, queue=queue, most=_STATS_LIMIT)

    async def dead_letters(self, queue: str, most: int) -> list[DeadLetter]:
        async with self._database.connection() as connection:
            rows = await _sql.dead_letters(connection, queue=queue, most=most)
        return [
            DeadLetter(str(r["message_id"]), r["body"], r["receives"], r["enqueued_at"], r["dead_at"]) for r in rows
        ]

    async def redrive(self, queue: str, most: int) -> int:
        async with self._database.transaction() as connection:
            rows = await _sql.redrive_messages(connection, queue=queue, most=most)
            await _sql.notify(connection, queue=queue)
        return len(rows)


def _note_exhausted(crowd: _Crowd, batch: _Batch, rows: Sequence[Row]) -> None:
    """Who got less than was there for them has no more for now."""
    left = {(lane, share.key): count for lane, share, count in batch.turns}
    for row in rows:
        key = row["priority"], (row["org_id"], row["share_id"])
        if key in left:
            left[key] -= 1
    for lane in (_NORMAL, _BULK):
        crowd.lanes[lane].exhausted([key for (of, key), count in left.items() if of == lane and count > 0])


def _waiting(row: Any) -> Waiting:
    return Waiting(row["org_id"], row["share_id"], row["visible_at"], max(row["size"], 1), max(row["running"], 0))


def _received(row: Any) -> Received:
    return Received(str(row["message_id"]), str(row["receipt"]), row["body"], row["receives"], row["enqueued_at"])


def _parsed(handle: Handle) -> tuple[int, UUID] | None:
    """A handle that cannot be one of ours counts like one that is stale."""
    try:
        number, receipt = int(handle.message_id), UUID(handle.receipt)
    except ValueError:
        return None
    return (number, receipt) if 0 < number < 2**63 else None
