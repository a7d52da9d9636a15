"""The sink: receives pointers to published batches from a queue and loads their rows, each batch once.

    receive ─► record ─► read, check ─► rows + ledger row ─► record Loaded + event ─► ack
                              │          (data database)       (state database)
                              └─► record Refused, with lines and reasons ─► ack

The database record decides, never the message. After a crash between two steps, the earlier steps are repeated: the
ledger row in the data database shows that the rows are loaded, and the record in the state database shows that readers
were notified.

For a batch that is too large for the sink itself, a Spark task reads and checks it, and the sink commits the rows. The
task writes to a staging table of its attempt, and records its findings in another. However the task ends, nothing of
that is visible: the commit is the same as for every other batch.
"""

from __future__ import annotations

import asyncio
import functools
import random
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from uuid import UUID

import msgspec
import structlog
from msgspec import Raw

from interlock.datasets.buffers import batch, binary_copy
from interlock.datasets.buffers.batch import BadBatch, Batch, Source
from interlock.datasets.buffers.records import Loaded, Pointer, Publish, Records, publish_of
from interlock.datasets.buffers.store import Part, Staged, Store, Target
from interlock.datasets.files import BUFFER_LOAD
from interlock.errors import InterlockError, TooLarge
from interlock.failpoints import failpoint
from interlock.jobs.spark_loads import has_spark_worker
from interlock.jobs.submission import ClosedRuns
from interlock.processes.loop import Periodic
from interlock.settings import BUFFER_QUEUE, Settings
from interlock.stores.objects import Objects
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.queue import Handle, Queue, Received
from interlock.tasks.shards import run_task_id
from interlock.telemetry import SINK_BATCHES, SINK_ROWS, TASKS_CREATED
from interlock.wire.base import TaskStatus
from interlock.wire.datasets import BatchRefusal, PublishStatus
from interlock.wire.jobs import JobRequest, Policy

log = structlog.get_logger()

_pointer = msgspec.json.Decoder(Pointer)

_MESSAGES: Final = 200
_WAIT_SECONDS: Final = 10.0
_VISIBILITY_SECONDS: Final = 120.0
_TOGETHER_BYTES: Final = 8 << 20
"""Limit per transaction, about what the server keeps of a temporary table in memory. A batch up to it is small."""
_TOGETHER_BATCHES: Final = 1_000
_FETCHES: Final = 8
_GROUPS: Final = 2
"""Dataset versions processed concurrently: one is read and checked here while another is written by the database."""
_LONGEST_PAUSE_SECONDS: Final = 60.0


class Heavy(Protocol):
    """Loads batches that are too large for the sink itself."""

    async def take(self, target: Target, sized: Sequence[Sized]) -> bool:
        """Returns True if it has taken the batches durably, so that their messages are no longer needed."""


@dataclass(frozen=True)
class Sized:
    publish: Publish
    bytes: int


@dataclass(frozen=True)
class _Read:
    publish: Publish
    batch: Batch
    bytes: int


class Sink:
    """One of any number of sinks. Batches that two of them load at the same time are loaded once."""

    name = "sink"
    seconds = 0.1

    def __init__(
        self,
        settings: Settings,
        queue: Queue,
        objects: Objects,
        store: Store,
        records: Records,
        heavy: Heavy | None = None,
        *,
        wait_seconds: float = _WAIT_SECONDS,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._queue, self._objects, self._store, self._records, self._heavy = queue, objects, store, records, heavy
        self._limit = settings.sink_batch_limit_bytes
        self._heavy_bytes = settings.sink_spark_bytes
        self._tries = min(settings.sink_tries, settings.queue_max_receives)
        self._wait_seconds = wait_seconds
        self._jitter = jitter
        self._fetching = asyncio.Semaphore(_FETCHES)
        self._grouping = asyncio.Semaphore(_GROUPS)

    async def idle(self, seconds: float) -> None:
        """Sleeps. `run_once` has already waited for messages, except in tests."""
        await asyncio.sleep(seconds)

    async def run_once(self) -> int:
        messages = await self._queue.receive(
            BUFFER_QUEUE, wait_seconds=self._wait_seconds, limit=_MESSAGES, visibility_seconds=_VISIBILITY_SECONDS
        )
        if not messages:
            return 0
        await failpoint("sink.received")
        async with self._held(messages):
            pending = await self._pending(messages)
            groups = defaultdict[UUID, list[Publish]](list)
            for publish in pending:
                groups[publish.dataset_version].append(publish)
            outcomes = await asyncio.gather(
                *(self._group(group, pending) for group in groups.values()), return_exceptions=True
            )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        return len(messages)

    @asynccontextmanager
    async def _held(self, messages: Sequence[Received]) -> AsyncIterator[None]:
        """Extends the visibility timeout. If another process received the messages anyway, no harm would be done."""

        async def extend() -> None:
            while True:
                await asyncio.sleep(_VISIBILITY_SECONDS / 3)
                with suppress(InterlockError):
                    await self._queue.extend(BUFFER_QUEUE, _handles(messages), _VISIBILITY_SECONDS)

        extending = asyncio.create_task(extend())
        try:
            yield
        finally:
            extending.cancel()

    async def _pending(self, messages: Sequence[Received]) -> dict[Publish, list[Received]]:
        """Returns the batches to load in the order of publishing, with their messages. Acks all other messages."""
        readable = [(message, pointer) for message in messages if (pointer := _read(message)) is not None]
        found = await self._records.behind([pointer for _, pointer in readable])
        pending: dict[Publish, list[Received]] = {}
        first: dict[UUID, Publish] = {}
        for (message, _), publish in zip(readable, found, strict=True):
            if publish is not None and publish.pending:
                pending.setdefault(first.setdefault(publish.publish_id, publish), []).append(message)
        wanted = {message.message_id for each in pending.values() for message in each}
        useless = [message for message in messages if message.message_id not in wanted]
        if useless:
            SINK_BATCHES.labels(result="known").inc(len(useless))
            await self._queue.ack(BUFFER_QUEUE, _handles(useless))
        return dict(sorted(pending.items(), key=lambda item: item[0].publish_id))

    async def _group(self, group: Sequence[Publish], messages: dict[Publish, list[Received]]) -> None:
        """Loads the batches of one dataset version."""
        async with self._grouping:
            settled: list[Publish] = []
            try:
                await self._load(group, settled)
            except Exception as error:
                # Includes unforeseen errors: a batch that causes one must not block the others forever.
                left = [publish for publish in group if publish not in settled]
                settled += await self._later(left, messages, error)
            acked = [message for publish in settled for message in messages[publish]]
            if acked:
                await self._queue.ack(BUFFER_QUEUE, _handles(acked))

    async def _load(self, group: Sequence[Publish], settled: list[Publish]) -> None:
        """Loads a group, and appends each batch to `settled` as it is settled, whatever happens to the others."""
        target = group[0].target
        if target is None:
            for publish in group:
                await self._refuse(publish, _not_buffered(publish).refusal, settled)
            return
        sized = await self._sized(await self._unknown(target, group, settled), settled)
        if await self._taken(target, sized):
            settled += [one.publish for one in sized]
            return
        await self._load_parts(target, _together(sized), settled)

    async def _taken(self, target: Target, sized: Sequence[Sized]) -> bool:
        if self._heavy is None or sum(one.bytes for one in sized) < self._heavy_bytes:
            return False
        return await self._heavy.take(target, sized)

    async def _unknown(self, target: Target, group: Sequence[Publish], settled: list[Publish]) -> list[Publish]:
        """Returns the batches whose rows are not loaded yet. For the others, completes what a crash interrupted."""
        known = await self._store.committed(target, [publish.publish_id for publish in group])
        here = [publish for publish in group if publish.publish_id in known]
        await self._records.loaded([Loaded(publish, known[publish.publish_id], None) for publish in here])
        settled += here
        return [publish for publish in group if publish.publish_id not in known]

    async def _sized(self, group: Sequence[Publish], settled: list[Publish]) -> list[Sized]:
        found = await asyncio.gather(*(self._size(publish) for publish in group))
        sized = []
        for publish, size in zip(group, found, strict=True):
            if isinstance(size, BadBatch):
                await self._refuse(publish, size.refusal, settled)
            else:
                sized.append(Sized(publish, size))
        return sized

    async def _size(self, publish: Publish) -> int | BadBatch:
        async with self._fetching:
            found = await self._objects.head(publish.batch_uri)
        if found is None:
            return _missing()
        return _too_large(self._limit) if found.size > self._limit else found.size

    async def _load_parts(self, target: Target, parts: Sequence[Sequence[Sized]], settled: list[Publish]) -> None:
        """Reads and checks the next part while the database loads the current one."""
        ahead: asyncio.Task[list[_Read]] | None = None
        try:
            for part, following in zip(parts, [*parts[1:], None], strict=True):
                read = await (ahead or self._read_all(target, part, settled))
                ahead = None
                if following is not None:
                    ahead = asyncio.create_task(self._read_all(target, following, settled))
                await self._load_part(target, read, settled)
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    # One transaction

    async def _read_all(self, target: Target, part: Sequence[Sized], settled: list[Publish]) -> list[_Read]:
        with tempfile.TemporaryDirectory(prefix="interlock-sink-") as folder:
            found = await asyncio.gather(
                *(self._fetched(target, one, Path(folder) / str(number)) for number, one in enumerate(part))
            )
        sources = [source for source in found if isinstance(source, Source)]
        small = iter(await asyncio.to_thread(batch.read_all, sources, target.shape))
        read = []
        for one, fetched in zip(part, found, strict=True):
            outcome = next(small) if isinstance(fetched, Source) else fetched
            if isinstance(outcome, BadBatch):
                await self._refuse(one.publish, outcome.refusal, settled)
            else:
                read.append(_Read(one.publish, outcome, one.bytes))
        return read

    async def _fetched(self, target: Target, one: Sized, path: Path) -> Source | Batch | BadBatch:
        """Fetches a batch: a small one into memory, to be read with others; a large one into a private file."""
        publish = one.publish
        async with self._fetching:
            if one.bytes <= _TOGETHER_BYTES:
                with suppress(TooLarge):  # it has grown since its size was read, and is too large for memory now
                    data = await self._objects.read(publish.batch_uri, one.bytes)
                    return _missing() if data is None else Source(data, publish.batch_uri, publish.record_count)
            try:
                if await self._objects.read_to(publish.batch_uri, path, self._limit) is None:
                    return _missing()
                return await asyncio.to_thread(_parsed, path, publish, target)
            except TooLarge:
                return _too_large(self._limit)
            except BadBatch as bad:
                return bad

    async def _load_part(self, target: Target, read: Sequence[_Read], settled: list[Publish]) -> None:
        if not read:
            return None
        tables = [one.batch.table for one in read]
        rows = await asyncio.to_thread(binary_copy.together, tables, target.shape)
        parts = [Part(one.publish.publish_id, one.batch.table.num_rows) for one in read]
        try:
            committed = await self._store.load(target, parts, rows)
        except BadBatch as bad:
            if len(read) == 1:
                return await self._refuse(read[0].publish, bad.refusal, settled)
            # The database rejects one of them: load them one by one, so that only that one is refused.
            for one in read:
                await self._load_part(target, [one], settled)
            return None
        await self._records.loaded(
            [Loaded(one.publish, each, one.bytes) for one, each in zip(read, committed, strict=True)]
        )
        settled += [one.publish for one in read]
        SINK_BATCHES.labels(result="loaded").inc(len(read))
        SINK_ROWS.inc(sum(part.rows for part in parts))
        return None

    # Failures

    async def _refuse(self, publish: Publish, refusal: BatchRefusal, settled: list[Publish]) -> None:
        if await self._records.refused(publish, PublishStatus.REFUSED, refusal):
            SINK_BATCHES.labels(result="refused").inc()
            log.warning("batch.refused", publish_id=str(publish.publish_id), code=refusal.code)
        settled.append(publish)

    async def _later(
        self, left: Sequence[Publish], messages: dict[Publish, list[Received]], error: Exception
    ) -> list[Publish]:
        """Retries later, usually because a store is unavailable. Returns the batches given up after too many tries."""
        known = isinstance(error, InterlockError)
        trouble = error if isinstance(error, InterlockError) else InterlockError(type(error).__name__)
        given_up = []
        for publish in left:
            receives = max(message.receives for message in messages[publish])
            if receives >= self._tries:
                refusal = BatchRefusal(code=trouble.code, detail=f"Given up after {receives} tries: {trouble.detail}")
                await self._records.refused(publish, PublishStatus.FAILED, refusal)
                SINK_BATCHES.labels(result="failed").inc()
                given_up.append(publish)
            else:
                pause = min(_LONGEST_PAUSE_SECONDS, 2.0 ** (receives - 1)) * (0.5 + self._jitter() / 2)
                await self._queue.nack(BUFFER_QUEUE, _handles(messages[publish]), pause)
                SINK_BATCHES.labels(result="retried").inc()
        log.warning(
            "batches.not_loaded",
            reason=trouble.detail,
            batches=len(left),
            given_up=len(given_up),
            exc_info=None if known else error,
        )
        return given_up


def _read(message: Received) -> Pointer | None:
    try:
        return _pointer.decode(message.body)
    except msgspec.MsgspecError:
        log.warning("message.unreadable", queue=BUFFER_QUEUE, effect="dropped: it refers to no record")
        return None


def _parsed(path: Path, publish: Publish, target: Target) -> Batch:
    try:
        return batch.read(path, publish.batch_uri, target.shape, publish.record_count)
    finally:
        path.unlink()


def _handles(messages: Iterable[Received]) -> list[Handle]:
    return [Handle(message.message_id, message.receipt) for message in messages]


def _together(sized: Sequence[Sized]) -> list[list[Sized]]:
    """Groups neighbours into transactions of limited size."""
    parts: list[list[Sized]] = []
    room = 0
    for one in sized:
        if not parts or room < one.bytes or len(parts[-1]) >= _TOGETHER_BATCHES:
            parts.append([])
            room = _TOGETHER_BYTES
        parts[-1].append(one)
        room -= one.bytes
    return parts


def _not_buffered(publish: Publish) -> BadBatch:
    return BadBatch(
        "not_buffered",
        f"Dataset version {publish.dataset_version} accepts no batches: its storage is not `buffered`, or it was "
        "purged. Deploy the DAG with a buffered output, and publish to its current version.",
    )


def _missing() -> BadBatch:
    return BadBatch(
        "missing", "No file exists at batch_uri: write the file before publishing it, then redrive the batch."
    )


def _too_large(limit: int) -> BadBatch:
    detail = f"The batch has more than {limit} bytes (sink_batch_limit_bytes): write smaller batches."
    return BadBatch("too_large", detail)


_sql = queries(__name__, "buffers")
_refusal = msgspec.json.Decoder(BatchRefusal)

RUNTIME: Final = "spark"
_POLICY: Final = Policy(max_attempts=5)
_MAX_BATCHES: Final = 1_000
"""Batches per task; the rest goes to further tasks."""
_MAX_ENDED: Final = 1_000
_PAUSE_SECONDS: Final = 1.0


def staging_prefix(task_id: UUID) -> str:
    return f"staging_{task_id.hex}_"


def staging_of(task_id: UUID, attempt: int) -> str:
    return f"{staging_prefix(task_id)}{attempt}"


class SparkLoads(Periodic):
    """Hands batches over to Spark, and commits the rows that the tasks have staged."""

    name = "buffer_loads"
    seconds = _PAUSE_SECONDS

    def __init__(self, database: Database, settings: Settings, store: Store, records: Records) -> None:
        self._database = database
        self._store = store
        self._records = records
        self._closed_runs = ClosedRuns(database, settings)
        self._queue = settings.runtime(RUNTIME).queue

    # Handover to Spark

    async def take(self, target: Target, sized: Sequence[Sized]) -> bool:
        """Returns False if no Spark worker exists: then the sink loads the batches itself, however long it takes."""
        async with self._database.connection() as connection:
            if not await has_spark_worker(connection, self._queue):
                return False
        for start in range(0, len(sized), _MAX_BATCHES):
            publish_ids = [one.publish.publish_id for one in sized[start : start + _MAX_BATCHES]]
            await self._database.run(functools.partial(self._hand_over, target=target, publish_ids=publish_ids))
            TASKS_CREATED.labels(runtime=RUNTIME).inc()
        return True

    async def _hand_over(self, connection: Connection, *, target: Target, publish_ids: Sequence[UUID]) -> None:
        request = JobRequest(operator=BUFFER_LOAD, runtime=RUNTIME, policy=_POLICY, tasks=[Raw(b"{}")])
        accepted = await self._closed_runs.within(connection, request, target.org_id)
        await _sql.set_loading(
            connection,
            task_id=run_task_id(accepted.run_id, 0),
            publish_ids=list(publish_ids),
            org_id=target.org_id,
        )
        await failpoint("sink.before_handover_commit")

    # Handover back to the sink

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            ended: list[Row] = await _sql.ended_loads(connection, limit=_MAX_ENDED)
        for row in ended:
            await self._settle(row)
        return len(ended)

    async def _settle(self, row: Row) -> None:
        async with self._database.connection() as connection:
            rows = await _sql.publishes_of_load(connection, load_task=row["load_task"])
        publishes = [publish_of(each) for each in rows]
        staged: dict[UUID, Staged] = {}
        if row["status"] == TaskStatus.COMPLETED:
            staged = await self._store.staged(staging_of(row["load_task"], row["attempt"]))
        await self._commit(row, [one for one in publishes if _good(staged.get(one.publish_id))], staged)
        for publish in publishes:
            found = staged.get(publish.publish_id)
            if found is None:
                await self._records.refused(publish, PublishStatus.FAILED, _failed(row))
                SINK_BATCHES.labels(result="failed").inc()
            elif found.refusal is not None:
                await self._records.refused(publish, PublishStatus.REFUSED, _refusal.decode(found.refusal))
                SINK_BATCHES.labels(result="refused").inc()
        await self._store.drop_staging(staging_prefix(row["load_task"]))

    async def _commit(self, row: Row, good: Sequence[Publish], staged: dict[UUID, Staged]) -> None:
        target = good[0].target if good else None
        if target is None:
            return
        # Staged rows are numbered by the position of their batch among all batches of the task, refused ones included.
        numbered = sorted(staged)
        wanted = {publish.publish_id: publish for publish in good}
        parts = [Part(publish_id, staged[publish_id].rows) for publish_id in numbered]
        staging = staging_of(row["load_task"], row["attempt"])
        committed = await self._store.load_staged(target, parts, staging, leave_out=staged.keys() - wanted.keys())
        await self._records.loaded(
            [Loaded(wanted[one.publish_id], one, staged[one.publish_id].bytes) for one in committed]
        )
        SINK_BATCHES.labels(result="loaded").inc(len(committed))
        SINK_ROWS.inc(sum(one.rows for one in committed))
        log.info("batches.loaded_by_spark", load_task=str(row["load_task"]), batches=len(committed))


def _good(staged: Staged | None) -> bool:
    return staged is not None and staged.refusal is None


def _failed(row: Row) -> BatchRefusal:
    why = row["error_message"] or f"the task that loads it ended as {row['status'] or 'deleted'}"
    return BatchRefusal(code="load_failed", detail=f"The batch could not be loaded on Spark: {why}")
