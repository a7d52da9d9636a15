"""The ingest: takes runs from a queue and creates their tasks, from a staged list or from the scopes of a backfill.

    receive ─► chunks ─► shard ─► total ─► ranges ─► latch ─► ack
                 │     (keys, attached)  (messages)
                 └─► bad list: run Failed with the reason, message to the dead letters

The database record decides, never the message. A crash between two steps repeats only the interrupted step: the ledger
has the loaded chunks, and the record has the step.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from enum import Enum
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID

import msgspec
import pyarrow as pa
import structlog

from interlock.errors import InterlockError
from interlock.failpoints import failpoint
from interlock.jobs.backfills import HeldRuns, Scopes
from interlock.jobs.ingest_records import Overtaken, Pending, Records, Step
from interlock.jobs.run_sources import Batch, Place, ScopesSource, Source, StagedSource
from interlock.jobs.staged_lists import StagedList
from interlock.jobs.task_rows import BadList, Shape, ShardGone, ShardLoader, no_rows, not_json
from interlock.settings import INGEST_QUEUE, Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import UNSTORABLE, Database
from interlock.strict_json import first_not_strict
from interlock.tasks.queue import Handle, Queue, Received
from interlock.tasks.shards import SMALL_SHARD
from interlock.telemetry import INGEST_ROWS, INGESTS, TASKS_CREATED

log = structlog.get_logger()
T = TypeVar("T")

_WAIT_SECONDS: Final = 10.0
_VISIBILITY_SECONDS: Final = 60.0
_LONGEST_PAUSE_SECONDS: Final = 60.0


class _Wakeup(msgspec.Struct, frozen=True):
    run_id: UUID


_wakeup = msgspec.json.Decoder(_Wakeup)


class Outcome(Enum):
    LOADED = 1
    RUNNING = 2
    GIVEN_BACK = 3
    """The Spark load did not succeed: the ingest reads the list itself."""


class Heavy(Protocol):
    """Loads lists that are too large for one process."""

    async def take(self, pending: Pending, staged: StagedList) -> bool:
        """Returns True if it has taken the list durably, so that the message is no longer needed."""

    async def settle(self, pending: Pending, load_task: UUID) -> Outcome: ...


class Unwanted(Exception):
    """The run was canceled or deleted while its list was being read."""


class Ingest:
    """One of any number of ingest loops. A list that two of them read at the same time is loaded once."""

    name = "ingest"
    seconds = 0.1

    def __init__(
        self,
        settings: Settings,
        database: Database,
        queue: Queue,
        objects: Objects,
        state_url: str,
        heavy: Heavy | None = None,
        *,
        wait_seconds: float = _WAIT_SECONDS,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._database, self._queue, self._objects, self._heavy = database, queue, objects, heavy
        self._records, self._held_runs = Records(database, settings), HeldRuns(database, settings)
        self._settings = settings
        self._state_url = state_url
        self._tries = min(settings.ingest_tries, settings.queue_max_receives)
        self._wait_seconds = wait_seconds
        self._jitter = jitter

    async def idle(self, seconds: float) -> None:
        """Sleeps. `run_once` has already waited for messages, except in tests."""
        await asyncio.sleep(seconds)

    async def run_once(self) -> int:
        messages = await self._queue.receive(
            INGEST_QUEUE, wait_seconds=self._wait_seconds, limit=1, visibility_seconds=_VISIBILITY_SECONDS
        )
        for message in messages:
            await failpoint("ingest.received")
            async with self._held(message):
                await self._settle(message)
        return len(messages)

    @asynccontextmanager
    async def _held(self, message: Received) -> AsyncIterator[None]:
        """Extends the message's visibility timeout. If another process received it anyway, no harm would be done."""

        async def extend() -> None:
            while True:
                await asyncio.sleep(_VISIBILITY_SECONDS / 3)
                with suppress(InterlockError):
                    await self._queue.extend(INGEST_QUEUE, [_handle(message)], _VISIBILITY_SECONDS)

        extending = asyncio.create_task(extend())
        try:
            yield
        finally:
            extending.cancel()

    async def _settle(self, message: Received) -> None:
        """Processes a message and settles it in every case: acked, retried later, or dead."""
        pending = await self._pending(message)
        try:
            if pending is not None:
                await self._ingest(pending)
                if pending.held:
                    await self._held_runs.hand_out(pending.run_id)
        except BadList as bad:
            await self._give_up(message, pending, bad.detail)
        except asyncio.CancelledError:
            # On shutdown, the next process continues immediately from the last completed step.
            await self._queue.nack(INGEST_QUEUE, [_handle(message)], 0.0)
            raise
        except Exception as error:
            # Includes unforeseen errors: a list that causes one must not be retried forever.
            await self._later(message, pending, error)
        else:
            await self._queue.ack(INGEST_QUEUE, [_handle(message)])

    async def _pending(self, message: Received) -> Pending | None:
        try:
            run_id = _wakeup.decode(message.body).run_id
        except msgspec.MsgspecError:
            log.warning("message.unreadable", queue=INGEST_QUEUE, effect="dropped: it refers to no run")
            return None
        return await self._records.pending(run_id)

    async def _ingest(self, pending: Pending) -> None:
        """Continues from the step that the record has reached."""
        try:
            if pending.step is Step.LOADING and not await self._load(pending):
                return
            now = await self._records.pending(pending.run_id)
            if now is not None and now.step is Step.FINISHING:
                await self._finish(now)
                now = await self._records.pending(pending.run_id)
            if now is not None and now.step is Step.ENQUEUING:
                await self._records.enqueued(now)
                await failpoint("ingest.enqueued")
                await self._records.latched(now)
                await failpoint("ingest.latched")
                TASKS_CREATED.labels(runtime=now.runtime).inc(now.total or 0)
                log.info("run.ingested", run_id=str(now.run_id), tasks=now.total)
        except (ShardGone, Unwanted):
            left = await self._records.pending(pending.run_id)
            if left is not None and left.unwanted:
                await self._records.canceled(left)

    async def _load(self, pending: Pending) -> bool:
        """Returns True if this process continues with the ingest."""
        if pending.unwanted:
            raise Unwanted
        if isinstance(pending.source, ScopesSource):
            return await self._load_scopes(pending, pending.source)
        staged = self._staged(pending, pending.source)
        if self._heavy is not None and pending.load_task is not None:
            outcome = await self._heavy.settle(pending, pending.load_task)
            if outcome is Outcome.LOADED:
                await self._records.loaded(pending)
            if outcome is not Outcome.GIVEN_BACK:
                return outcome is Outcome.LOADED
        elif self._heavy is not None and await self._records.place(pending) == Place():
            if await self._heavy.take(pending, staged):
                return False
            # The run may have a shard by now.
            pending = await self._records.pending(pending.run_id) or pending
        return await self._stream(pending, staged)

    async def _load_scopes(self, pending: Pending, source: ScopesSource) -> bool:
        """Loads scopes. Concurrent readers may find different scopes; the loser restarts after the winner's batches."""
        while True:
            try:
                return await self._stream(pending, self._scopes(pending, source))
            except Overtaken:
                now = await self._records.pending(pending.run_id)
                if now is None or now.step is not Step.LOADING:
                    return True
                if now.unwanted:
                    raise Unwanted from None
                pending = now

    async def _stream(self, pending: Pending, source: Source) -> bool:
        place = await self._records.place(pending)
        async with aclosing(source.batches(place)) as batches:
            head = await self._head(batches)
            if place == Place() and pending.shard == SMALL_SHARD and self._is_small(head):
                await source.verify()
                await self._write_small(pending, head[0] if head else None)
                return False
            await self._load_all(pending, _chained(head, batches))
        await source.verify()
        await failpoint("ingest.loaded")
        await self._records.loaded(pending)
        return True

    async def _head(self, batches: AsyncIterator[Batch]) -> list[Batch]:
        """Returns the first batch, and the second if it is needed to decide whether the list is small."""
        first = await anext(batches, None)
        if first is None or first.table.num_rows >= self._settings.shard_threshold:
            second = None
        else:
            second = await anext(batches, None)
        return [batch for batch in (first, second) if batch is not None]

    def _is_small(self, head: Sequence[Batch]) -> bool:
        return len(head) < 2 and all(batch.table.num_rows < self._settings.shard_threshold for batch in head)

    async def _write_small(self, pending: Pending, batch: Batch | None) -> None:
        """Writes the tasks of a small list. `batch` is None if the list has no lines, and so the run no tasks."""
        table = no_rows(pending.run_id) if batch is None else batch.table
        try:
            await self._records.small(pending, table, batch.lines if batch is not None else 0)
        except UNSTORABLE:
            raise _unstorable(table) from None
        INGEST_ROWS.inc(table.num_rows)

    async def _load_all(self, pending: Pending, batches: AsyncIterator[Batch]) -> None:
        shard = await self._records.shard(pending)
        if shard is None:
            raise Unwanted
        await failpoint("ingest.shard_created")
        loader = await _in_thread(ShardLoader, self._state_url, pending.run_id, shard)
        try:
            async with aclosing(_read_ahead(batches)) as ahead:
                async for batch in ahead:
                    await self._load_one(pending, loader, batch)
        finally:
            await _in_thread(loader.close)

    async def _load_one(self, pending: Pending, loader: ShardLoader, batch: Batch) -> None:
        if await _in_thread(loader.load, batch):
            INGEST_ROWS.inc(batch.table.num_rows)
        elif batch.reached is not None:
            raise Overtaken
        elif not await self._is_loaded(pending, batch):
            raise Unwanted
        await failpoint("ingest.chunk_loaded")

    async def _is_loaded(self, pending: Pending, batch: Batch) -> bool:
        """Returns True if another process has loaded the batch. Chunks are loaded in order, so the place shows it."""
        place = await self._records.place(pending)
        return (place.part, place.byte) >= (batch.part, batch.end_byte)

    async def _finish(self, pending: Pending) -> None:
        if pending.unwanted:
            raise Unwanted
        loader = await _in_thread(ShardLoader, self._state_url, pending.run_id, pending.shard)
        try:
            if not await _in_thread(loader.finish):
                raise ShardGone
        finally:
            await _in_thread(loader.close)
        await failpoint("ingest.finished")
        await self._records.counted(pending)
        await failpoint("ingest.counted")

    def _staged(self, pending: Pending, source: StagedSource) -> StagedList:
        shape = Shape(source.format, self._settings.payload_limit_bytes, slot_pointer=pending.slot_pointer)
        return StagedList(self._objects, source, pending.run_id, shape)

    def _scopes(self, pending: Pending, source: ScopesSource) -> Scopes:
        named = (pending.run_id, pending.job_id, pending.slot_pointer)
        return Scopes(self._database, source, *named, batch_rows=self._settings.shard_threshold)

    # Failures

    async def _give_up(self, message: Received, pending: Pending | None, reason: str) -> None:
        if pending is not None:
            await self._records.failed(pending, reason)
            log.warning("run.not_ingested", run_id=str(pending.run_id), effect="the run has failed")
        await failpoint("ingest.failed")
        await self._queue.bury(INGEST_QUEUE, [_handle(message)])

    async def _later(self, message: Received, pending: Pending | None, error: Exception) -> None:
        """Retries later, usually because a store is unavailable, and gives up after the configured number of tries."""
        known = isinstance(error, InterlockError)
        detail = error.detail if isinstance(error, InterlockError) else type(error).__name__
        log.warning("ingest.failed", reason=detail, tries=message.receives, exc_info=None if known else error)
        if message.receives >= self._tries:
            await self._give_up(message, pending, f"Given up after {message.receives} tries: {detail}")
            return
        pause = min(_LONGEST_PAUSE_SECONDS, 2.0 ** (message.receives - 1)) * (0.5 + self._jitter() / 2)
        await self._queue.nack(INGEST_QUEUE, [_handle(message)], pause)
        INGESTS.labels(result="retried").inc()


async def _in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Runs a blocking function. A thread cannot be stopped: a cancellation waits for it before anything is closed."""
    working = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        raise


async def _chained(head: Sequence[Batch], rest: AsyncIterator[Batch]) -> AsyncIterator[Batch]:
    for batch in head:
        yield batch
    async for batch in rest:
        yield batch


async def _read_ahead(batches: AsyncIterator[Batch]) -> AsyncGenerator[Batch]:
    """Reads the next batch while the database loads the current one. Only these two are in memory."""

    async def following() -> Batch | None:
        return await anext(batches, None)

    ahead = asyncio.create_task(following())
    try:
        while (batch := await ahead) is not None:
            ahead = asyncio.create_task(following())
            yield batch
    finally:
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)


def _unstorable(table: pa.Table) -> BadList:
    """Names the offending line if it can be identified. PostgreSQL may reject a line that our own checks accept."""
    payloads = [payload.encode() for payload in table.column("payload").to_pylist()]
    found = first_not_strict(payloads)
    if found is None:
        return BadList("bad_json", "A line is not JSON, or has text that cannot be stored.")
    place, _ = found
    return not_json(table.column("task_index")[place].as_py())


def _handle(message: Received) -> Handle:
    return Handle(message.message_id, message.receipt)
