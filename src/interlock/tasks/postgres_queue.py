"""The queue on a Postgres table: SKIP LOCKED, visibility timeout, dead letters, fair shares between runs."""

from __future__ import annotations

import heapq
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from interlock.failpoints import armed, failpoint
from interlock.stores.low_water import LowWater, low_water
from interlock.stores.notifications import Wakeups
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.queue import DeadLetter, Handle, Outgoing, Received

_sql = queries(__name__, "queue")
_POLL_SECONDS = 1.0
"""Poll interval, and so the maximum delay after a lost notification."""
_STATS_LIMIT = 100_000
_NORMAL, _BULK = 0, 1
_LOOK_SECONDS = 0.25
"""Minimum time for which the list of waiting shares and their running tasks is reused."""
_LOOK_SHARE = 0.02
"""Maximum share of time for reading that list."""
_MAX_SHARES = 1000
_OLDEST_SHARE = 0.1
"""Share of batches that take the oldest messages, so that no message waits forever for its turn."""
_NO_KEY = (UUID(int=0), UUID(int=0))


@dataclass
class _QueueShares:
    """The shares that wait in a queue, as known to this process. They are read only after a full batch."""

    lanes: tuple[Shares, Shares] = field(default_factory=lambda: (Shares(), Shares()))
    after: list[Key] = field(default_factory=lambda: [_NO_KEY, _NO_KEY])
    full: bool = False
    """True if the last batch was full, so that there may be more messages than can be received."""
    read_after: float = 0.0

    @property
    def mixed(self) -> bool:
        return any(len(lane) > 1 for lane in self.lanes)


@dataclass(frozen=True)
class _Batch:
    """One receive: the number of messages, their shares, and how many of the normal lane to take in order."""

    limit: int
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
        random_fraction: Callable[[], float] = random.random,
    ) -> None:
        self._database = database
        self._wakeups = wakeups
        self._max_receives = max_receives
        self._bulk_share = bulk_share
        self._random_fraction = random_fraction
        self._shares: defaultdict[str, _QueueShares] = defaultdict(_QueueShares)
        self._waters: defaultdict[str, tuple[LowWater[datetime], LowWater[datetime]]] = defaultdict(
            lambda: (low_water(), low_water())  # normal, bulk
        )

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> None:
        # Keeps the last message of each key: one statement cannot re-arm the same message twice.
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

    async def receive(
        self, queue: str, *, wait_seconds: float, limit: int, visibility_seconds: float
    ) -> list[Received]:
        deadline = time.monotonic() + wait_seconds
        topic = f"queue:{queue}"
        while True:
            messages, next_visible = await self._take(queue, limit, visibility_seconds)
            left = deadline - time.monotonic()
            if messages:
                # There may be more messages than this receiver took: wake the next one.
                self._wakeups.wake(topic)
                return messages
            if left <= 0 or self._wakeups.closed:
                return []
            pause = min(left, _POLL_SECONDS, max(next_visible, 0.005))
            await self._wakeups.wait(topic, pause)

    async def _take(self, queue: str, limit: int, visibility: float) -> tuple[list[Received], float]:
        shares = self._shares[queue]
        if shares.full and time.monotonic() >= shares.read_after:
            await self._read_shares(queue, shares)
        if shares.mixed and self._random_fraction() >= _OLDEST_SHARE:
            messages = await self._take_in_turn(queue, shares, limit, visibility)
            if messages:
                return messages, 0.0
        messages, ahead = await self._take_oldest(queue, limit, visibility)
        shares.full = len(messages) == limit
        return messages, ahead

    async def _read_shares(self, queue: str, shares: _QueueShares) -> None:
        """Reads the waiting shares. If there are too many for one read, the next read continues."""
        shares.read_after = time.monotonic() + _LOOK_SECONDS  # only one caller reads; the others use the known list
        started = time.monotonic()
        for lane in (_NORMAL, _BULK):
            org_id, share_id = shares.after[lane]
            async with self._database.connection() as connection:
                rows = await _sql.waiting_shares(
                    connection, queue=queue, lane=lane, after_org=org_id, after_share=share_id, limit=_MAX_SHARES
                )
            shares.lanes[lane].found(_waiting(row) for row in rows if row["waits"])
            more = len(rows) == _MAX_SHARES
            shares.after[lane] = (rows[-1]["org_id"], rows[-1]["share_id"]) if more else _NO_KEY
        ended = time.monotonic()
        shares.read_after = ended + max(_LOOK_SECONDS, (ended - started) / _LOOK_SHARE)

    async def _take_in_turn(self, queue: str, shares: _QueueShares, limit: int, visibility: float) -> list[Received]:
        """Receives messages of the shares whose turn it is; the next shares use the remaining capacity."""
        messages = list[Received]()
        reserved = self._reserved(limit)  # computed once: each further round would give bulk another chance
        while len(messages) < limit:
            batch = self._batch(shares, limit - len(messages), reserved)
            rows = await self._receive_in_turn(queue, batch, visibility)
            reserved = max(0, reserved - sum(row["priority"] == _BULK for row in rows))
            if not batch.as_they_come or all(row["priority"] == _BULK for row in rows):
                _note_exhausted(shares, batch, rows)
            messages += [_received(row) for row in rows if not row["dead"]]
            if not batch.turns:
                break
        await failpoint("receive.committed")
        return messages

    def _batch(self, shares: _QueueShares, limit: int, reserved: int) -> _Batch:
        """Plans one receive: normal before bulk, except for the reserved part. A lane with one share needs no turns."""
        normal, bulk = shares.lanes
        reserved = min(limit, reserved) if len(bulk) else 0
        if len(normal) > 1:
            turns = [(_BULK, share, count) for share, count in bulk.next(reserved)]
            turns += [(_NORMAL, share, count) for share, count in normal.next(limit - reserved)]
            return _Batch(limit, turns, as_they_come=0)
        turns = [(_BULK, share, count) for share, count in bulk.next(limit)]
        return _Batch(limit, turns, as_they_come=limit - reserved)

    async def _receive_in_turn(self, queue: str, batch: _Batch, visibility: float) -> list[Row]:
        with self._waters[queue][_NORMAL].look(await self._database.oldest_begin()) as look:

            async def work(connection: Connection) -> list[Row]:
                rows: list[Row] = await _sql.receive_in_turn(
                    connection,
                    queue=queue,
                    limit=batch.limit,
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

    async def _take_oldest(self, queue: str, limit: int, visibility: float) -> tuple[list[Received], float]:
        normal_water, bulk_water = self._waters[queue]
        floor = await self._database.oldest_begin()
        with normal_water.look(floor) as normal, bulk_water.look(floor) as bulk:
            since = {"normal_since": normal.since, "bulk_since": bulk.since}

            async def work(connection: Connection) -> tuple[list[Row], Row | None]:
                rows: list[Row] = await _sql.receive(
                    connection,
                    queue=queue,
                    limit=limit,
                    reserved=self._reserved(limit),
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

    def _reserved(self, limit: int) -> int:
        """Returns how many messages are reserved for bulk: its share of a batch, with the fraction rounded randomly."""
        share = limit * self._bulk_share
        return int(share) + (self._random_fraction() < share - int(share))

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
            return await _sql.stats(connection, queue=queue, limit=_STATS_LIMIT)

    async def dead_letters(self, queue: str, limit: int) -> list[DeadLetter]:
        async with self._database.connection() as connection:
            rows = await _sql.dead_letters(connection, queue=queue, limit=limit)
        return [
            DeadLetter(str(r["message_id"]), r["body"], r["receives"], r["enqueued_at"], r["dead_at"]) for r in rows
        ]

    async def redrive(self, queue: str, limit: int) -> int:
        async with self._database.transaction() as connection:
            rows = await _sql.redrive_messages(connection, queue=queue, limit=limit)
            await _sql.notify(connection, queue=queue)
        return len(rows)


async def dead_by_queue(connection: Connection, queues: Sequence[str], *, limit: int) -> list[Row]:
    """Counts the dead letters of each queue that has any, up to `limit` each."""
    rows: list[Row] = await _sql.dead_by_queue(connection, queues=queues, limit=limit)
    return rows


def _note_exhausted(shares: _QueueShares, batch: _Batch, rows: Sequence[Row]) -> None:
    """Records shares that returned fewer messages than requested: they have no more for now."""
    left = {(lane, share.key): count for lane, share, count in batch.turns}
    for row in rows:
        key = row["priority"], (row["org_id"], row["share_id"])
        if key in left:
            left[key] -= 1
    for lane in (_NORMAL, _BULK):
        shares.lanes[lane].exhausted([key for (of, key), count in left.items() if of == lane and count > 0])


def _waiting(row: Any) -> Waiting:
    return Waiting(row["org_id"], row["share_id"], row["visible_at"], max(row["size"], 1), max(row["running"], 0))


def _received(row: Any) -> Received:
    return Received(str(row["message_id"]), str(row["receipt"]), row["body"], row["receives"], row["enqueued_at"])


def _parsed(handle: Handle) -> tuple[int, UUID] | None:
    """Parses a handle. An invalid handle counts as stale."""
    try:
        number, receipt = int(handle.message_id), UUID(handle.receipt)
    except ValueError:
        return None
    return (number, receipt) if 0 < number < 2**63 else None


_TOGETHER = 8
"""Maximum number of shares in one batch, because each further share is one more table to claim from."""

Key = tuple[UUID, UUID]
"""The org and the share."""


@dataclass(frozen=True)
class Waiting:
    """A waiting share, as last read."""

    org_id: UUID
    share_id: UUID
    since: datetime
    """Arrival of its oldest message."""
    size: int
    """Tasks per message."""
    running: int

    @property
    def key(self) -> Key:
        return self.org_id, self.share_id


@dataclass(order=True)
class _Place:
    """A heap entry: ordered by load, then by the time of the last service."""

    load: int
    served: int
    id: UUID


class Shares:
    """The shares of one lane. The times of last service survive `found`."""

    def __init__(self) -> None:
        self._waiting: dict[Key, Waiting] = {}
        self._orgs: list[_Place] = []
        self._of_org: dict[UUID, list[_Place]] = {}
        self._served: dict[Key | UUID, int] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def found(self, waiting: Iterable[Waiting]) -> None:
        self._waiting = {share.key: share for share in waiting}
        known = self._waiting.keys() | {share.org_id for share in self._waiting.values()}
        self._served = {key: served for key, served in self._served.items() if key in known}
        places: defaultdict[UUID, list[_Place]] = defaultdict(list)
        for share in self._waiting.values():
            places[share.org_id].append(_Place(share.running, self._served.get(share.key, 0), share.share_id))
        self._of_org = dict(places)
        self._orgs = [
            _Place(sum(place.load for place in of_org), self._served.get(org_id, 0), org_id)
            for org_id, of_org in places.items()
        ]
        heapq.heapify(self._orgs)
        for of_org in places.values():
            heapq.heapify(of_org)

    def next(self, limit: int) -> list[tuple[Waiting, int]]:
        """Returns the number of messages for each share of a batch."""
        picked: dict[Key, int] = {}
        step = -(-limit // _TOGETHER)
        while limit > 0 and self._orgs:
            count = min(step, limit)
            key = self._advance(count)
            picked[key] = picked.get(key, 0) + count
            limit -= count
        return [(self._waiting[key], count) for key, count in picked.items()]

    def exhausted(self, keys: Sequence[Key]) -> None:
        """Removes shares without further messages. Uses a linear search, because they are few."""
        for org_id, share_id in keys:
            if self._waiting.pop((org_id, share_id), None) is None:
                continue
            left = [place for place in self._of_org[org_id] if place.id != share_id]
            heapq.heapify(left)
            self._of_org[org_id] = left
            if not left:
                self._orgs = [place for place in self._orgs if place.id != org_id]
                heapq.heapify(self._orgs)

    def _advance(self, count: int) -> Key:
        org = self._orgs[0]
        share = self._of_org[org.id][0]
        key = (org.id, share.id)
        self._clock += 1
        self._served[key] = self._served[org.id] = self._clock
        given = count * self._waiting[key].size
        heapq.heapreplace(self._of_org[org.id], _Place(share.load + given, self._clock, share.id))
        heapq.heapreplace(self._orgs, _Place(org.load + given, self._clock, org.id))
        return key
