"""The logs of attempts: kept in chunks as workers report them, and read line by line.

Chunks of a run that are long together are packed into one object with the run's results; all others are rows. A chunk
beyond the first half of `task_log_bytes` is always a row, since newer ones replace it while the attempt runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Protocol
from uuid import UUID

import structlog

from interlock.errors import InterlockError, NotFound
from interlock.stores.postgres import Connection, Database, Row, isolated, queries
from interlock.tasks.result_packs import Packs, Place
from interlock.tasks.shards import by_shard
from interlock.wire.base import TaskStatus
from interlock.wire.logs import GAP, LETTERS, JobLog, JobLogLine, LogChunk, LogLine, LogsKept, TaskLog

log = structlog.get_logger()

_sql = queries(__name__, "logs")
PACKED_FROM: Final = 16_384
"""Chunks of one run in one report with at least this many bytes go into a pack."""
_LEFT_OUT: Final = "{} bytes left out: the log is longer than task_log_bytes"
_LOST: Final = "this part of the log is no longer available"


class Found(Protocol):
    """Finds tasks and runs for their readers."""

    async def task_row(self, task_id: UUID, org_id: UUID) -> Row: ...

    async def find_job(self, name_or_id: str, org_id: UUID) -> Row: ...

    async def run_of_job(self, name_or_id: str, run: str | None, org_id: UUID) -> Row: ...


@dataclass(frozen=True)
class _Sized:
    chunk: LogChunk
    body: bytes

    @property
    def lease_token(self) -> UUID:
        return self.chunk.lease_token


class Logs:
    def __init__(self, database: Database, packs: Packs, reads: Found, limit: int) -> None:
        self._database, self._packs, self._reads = database, packs, reads
        self._half = limit // 2

    # Writing

    async def keep(self, items: Sequence[LogChunk]) -> LogsKept:
        sized = [_Sized(item, item.text.encode("utf-8", "replace")) for item in items]
        kept = 0
        for shard, part in by_shard(sized, lambda one: one.lease_token).items():
            done, _ = await isolated("logs", part, partial(self._keep_in, shard))
            kept += sum(done)
        return LogsKept(kept=kept)

    async def _keep_in(self, shard: int, items: Sequence[_Sized]) -> int:
        places = await self._packed(items)

        async def work(connection: Connection) -> int:
            kept: int = await _sql.keep_logs(connection, shard=shard, half=self._half, **_arrays(items, places))
            return kept

        return await self._database.run(work, transaction=False)

    async def _packed(self, items: Sequence[_Sized]) -> dict[int, Place]:
        """Writes the chunks of each run to a pack if they are long together. Returns the places by position."""
        by_run: dict[UUID, list[int]] = {}
        for position, item in enumerate(items):
            if item.chunk.run_id is not None and item.chunk.start + len(item.body) <= self._half:
                by_run.setdefault(item.chunk.run_id, []).append(position)
        places: dict[int, Place] = {}
        for run_id, positions in by_run.items():
            bodies = [items[position].body for position in positions]
            if sum(map(len, bodies)) < PACKED_FROM:
                continue
            try:
                places |= zip(positions, await self._packs.write(run_id, bodies), strict=True)
            except InterlockError as error:
                # A log must not wait for the object store: its attempt waits for it.
                log.warning("logs.not_packed", run_id=str(run_id), code=error.code, reason=error.detail)
        return places

    # Reading

    async def of_task(self, task_id: UUID, org_id: UUID, *, attempt: int | None, after: int, limit: int) -> TaskLog:
        task = await self._reads.task_row(task_id, org_id)
        chosen = task["attempt"] if attempt is None else attempt
        if not 1 <= chosen <= task["attempt"]:
            raise NotFound(f"Task {task_id} has no attempt {chosen}; the latest is {task['attempt']}.")
        async with self._database.connection() as connection:
            rows = await _sql.logs_of_attempt(
                connection, org_id=org_id, task_id=task_id, attempt=chosen, after=after, limit=limit + 1
            )
        lines = [line for row in await self._read(rows[:limit]) for line in row.lines]
        return TaskLog(
            task_id=task_id,
            attempt=chosen,
            attempts=task["attempt"],
            ended=chosen < task["attempt"] or task["status"] not in (TaskStatus.QUEUED, TaskStatus.RUNNING),
            lines=lines,
            next=rows[:limit][-1]["log_id"] if rows else after,
            more=len(rows) > limit,
        )

    async def of_job(self, name_or_id: str, run: str | None, org_id: UUID, *, after: int, limit: int) -> JobLog:
        job, run_id = await self._reads.find_job(name_or_id, org_id), None
        if run is not None or not job["dag_name"]:
            run_id = (await self._reads.run_of_job(name_or_id, run, org_id))["run_id"]
        rows = await self._rows(org_id, job["job_id"], run_id, after, limit + 1)
        page = rows[:limit] if after else rows[:limit][::-1]
        lines = [
            JobLogLine(one.row["task_id"], one.row["attempt"], line.at, line.stream, line.text)
            for one in await self._read(page)
            for line in one.lines
        ]
        return JobLog(
            job_id=job["job_id"],
            run_id=run_id,
            lines=lines,
            next=page[-1]["log_id"] if page else after,
            more=bool(after) and len(rows) > limit,
        )

    async def _rows(self, org_id: UUID, job_id: UUID, run_id: UUID | None, after: int, limit: int) -> list[Row]:
        scope: dict[str, Any] = {"org_id": org_id, "scope_id": run_id or job_id, "limit": limit}
        async with self._database.connection() as connection:
            if after:
                read = _sql.next_logs_of_run if run_id else _sql.next_logs_of_job
                rows: list[Row] = await read(connection, after=after, **scope)
            else:
                rows = await (_sql.newest_logs_of_run if run_id else _sql.newest_logs_of_job)(connection, **scope)
        return rows

    async def _read(self, rows: Sequence[Row]) -> list[_Chunk]:
        chunks = []
        for row in rows:
            body = row["text"].encode() if row["text"] is not None else await self._packs.part(row)
            chunks.append(_Chunk(row, list(_lines(body, row["start"] - row["shown"], row["written_at"]))))
        return chunks


@dataclass(frozen=True)
class _Chunk:
    row: Row
    lines: list[LogLine]


def _lines(body: bytes | None, gap: int, written_at: datetime) -> Iterator[LogLine]:
    if gap > 0:
        yield LogLine(written_at, GAP, _LEFT_OUT.format(gap))
    if body is None:
        yield LogLine(written_at, GAP, _LOST)
        return
    for line in body.decode("utf-8", "replace").removesuffix("\n").split("\n"):
        digits, letter = line[:13], line[13:14]
        if digits.isascii() and digits.isdigit() and letter in LETTERS:
            yield LogLine(datetime.fromtimestamp(int(digits) / 1000, UTC), LETTERS[letter], line[14:])
        else:
            yield LogLine(written_at, LETTERS["r"], line)


def _arrays(items: Iterable[_Sized], places: dict[int, Place]) -> dict[str, list[Any]]:
    """Returns the arguments of keep_logs, hence Any."""
    rows = [(item, places.get(position)) for position, item in enumerate(items)]
    return {
        "task_ids": [item.chunk.task_id for item, _ in rows],
        "run_ids": [item.chunk.run_id for item, _ in rows],
        "attempts": [item.chunk.attempt for item, _ in rows],
        "leases": [item.chunk.lease_token for item, _ in rows],
        "starts": [item.chunk.start for item, _ in rows],
        "sizes": [len(item.body) for item, _ in rows],
        "texts": [item.chunk.text.replace("\x00", "\ufffd") if place is None else None for item, place in rows],
        "packs": [place.pack if place else None for _, place in rows],
        "offsets": [place.offset if place else None for _, place in rows],
    }
