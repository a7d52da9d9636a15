"""Files of rows, committed as partitions of a source as every attempt does: claim, write, marker, complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import asyncpg
import msgspec
import numpy as np
import pyarrow.parquet as pq

from bench.harness import Installation
from bench.spark.transformation import ARROW, LOGS_PER_BLOCK, rows_of
from interlock.client import WorkerClient
from interlock.schemas import MARKER, Column, DatasetSchema, Marker, hash_of
from interlock.wire.attempts import (
    ClaimReply,
    ClaimRequest,
    Completion,
    CompletionBatch,
    DataRequest,
    Event,
    Output,
    OutputData,
    Release,
)
from interlock.wire.dags import SourceEvent
from interlock.wire.datasets import InvalidateRequest

DAG: Final = "bench"
_KINDS: Final = {"int64": "bigint", "int32": "int", "string": "string", "timestamp[us, tz=UTC]": "timestamp"}
SCHEMA: Final = DatasetSchema(
    [Column(field.name, _KINDS[str(field.type)], field.nullable) for field in ARROW], "block_number"
)


@dataclass(frozen=True)
class Partition:
    start: int
    end: int
    path: Path
    bytes: int


@dataclass(frozen=True)
class Shape:
    """Size of a source: the number of partitions, and of rows in each."""

    partitions: int
    rows: int

    @property
    def blocks(self) -> int:
        """Returns the number of blocks per partition."""
        return -(-self.rows // LOGS_PER_BLOCK)

    @property
    def end(self) -> int:
        return self.partitions * self.blocks - 1


class Pipeline:
    """The deployed DAG. The benchmark feeds its sources; workers do its other jobs."""

    def __init__(self, here: Installation, connection: asyncpg.Connection[Any], worker: WorkerClient) -> None:
        self._here, self._connection, self._worker = here, connection, worker

    async def tasks(self, job: str, count: int) -> list[UUID]:
        """Waits until `count` tasks of the job are queued, and returns all queued ones."""
        query = (
            "select t.task_id from interlock.tasks t join interlock.jobs j using (job_id)"
            " where j.name = $1 and j.current and t.status = 'Queued' order by t.task_id"
        )
        while len(rows := await self._connection.fetch(query, job)) < count:  # noqa: ASYNC110 - the dispatcher makes them
            await asyncio.sleep(0.02)
        return [row["task_id"] for row in rows]

    async def bring(self, job: str, shape: Shape, log: Callable[[str], None]) -> list[Partition]:
        """Writes the files of a source, then commits them all."""
        scopes = [(number * shape.blocks, (number + 1) * shape.blocks - 1) for number in range(shape.partitions)]
        payloads = [msgspec.Raw(msgspec.json.encode({"start": start, "end": end})) for start, end in scopes]
        async with self._here.client() as client:
            await client.sources.send(DAG, job, [SourceEvent(payload=payload) for payload in payloads])
        random = np.random.default_rng(7)
        written: list[tuple[Partition, Completion]] = []
        for claim, (start, end) in zip(await self._claims(job, shape.partitions), scopes, strict=True):
            (grant,) = await self._grants(claim)
            written.append(await asyncio.to_thread(_written, claim, grant, start, end, shape.rows, random))
        log(f"{job}: {len(written)} files, {sum(one.bytes for one, _ in written) / 1e6:,.0f} MB")
        reply = await self._worker.complete(CompletionBatch(items=[done for _, done in written]))
        assert not reply.refused, reply.refused[0]
        return [partition for partition, _ in written]

    async def _claims(self, job: str, count: int) -> list[ClaimReply]:
        request = ClaimRequest(worker_id="bench", task_ids=await self.tasks(job, count), tokens=False)
        claims = (await self._worker.claim(request)).claims
        assert len(claims) == count
        return claims

    async def _grants(self, claim: ClaimReply) -> list[OutputData]:
        reply = await self._worker.task_data(DataRequest(items=[release_of(claim)]))
        assert not reply.refused, reply.refused[0]
        return reply.items[0].outputs

    async def last_commit(self) -> int:
        found: int = await self._connection.fetchval("select coalesce(max(commit_id), 0) from interlock.partitions")
        return found

    async def again(self, job: str, output: str, end: int) -> None:
        """Invalidates all partitions of an output."""
        request = InvalidateRequest(start=0, end=end, reason="measured again")
        async with self._here.client() as client:
            await client.datasets.invalidate(f"{DAG}:{job}:{output}", request)

    async def made(self, job: str, count: int, after: int) -> int:
        """Waits for `count` partitions of the job newer than the commit `after`. Returns their number of rows."""
        query = (
            "select count(*) as made, sum(p.row_count) as rows from interlock.jobs j"
            " join interlock.dataset_versions v on v.job_id = j.job_id"
            " join interlock.partitions p on p.dataset_version = v.dataset_version and p.commit_id > $2"
            " and p.location is not null where j.name = $1 and j.current"
        )
        failed = (
            "select a.error_message from interlock.tasks t join interlock.jobs j using (job_id)"
            " join interlock.attempts a using (task_id) where j.name = $1 and a.outcome = 'Failed' limit 1"
        )
        while True:
            found = await self._connection.fetchrow(query, job, after)
            assert found is not None
            if found["made"] >= count:
                return int(found["rows"])
            if problem := await self._connection.fetchval(failed, job):
                raise RuntimeError(f"A task has failed: {problem}")
            await asyncio.sleep(0.02)


def release_of(claim: ClaimReply) -> Release:
    """Returns the fence of an attempt, which is the content of a release."""
    assert claim.task_id
    assert claim.attempt
    assert claim.lease_token
    return Release(task_id=claim.task_id, attempt=claim.attempt, lease_token=claim.lease_token)


def _written(
    claim: ClaimReply, grant: OutputData, start: int, end: int, rows: int, random: Any
) -> tuple[Partition, Completion]:
    folder = Path(grant.write_prefix.removeprefix("file://"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{grant.name}_{start}_{end}.parquet"
    pq.write_table(rows_of(start, rows, random), path, compression="zstd", store_schema=False)
    size = path.stat().st_size
    marker = Marker(file=path.name, row_count=rows, bytes=size, schema=SCHEMA, min=start, max=end)
    (folder / MARKER).write_bytes(msgspec.json.encode(marker))
    ref: dict[str, Any] = {"dataset_uuid": grant.dataset_uuid, "dataset_version": grant.dataset_version}
    scope: dict[str, Any] = {"partition_key": f"{start}-{end}", "start": start, "end": end}
    output = Output(
        location=grant.write_prefix + path.name,
        row_count=rows,
        bytes=size,
        schema_hash=hash_of(SCHEMA),
        **ref,
        **scope,
    )
    fence = release_of(claim)
    done = Completion(
        task_id=fence.task_id,
        attempt=fence.attempt,
        lease_token=fence.lease_token,
        status="Completed",
        outputs=[output],
        events=[Event(**ref, **scope)],
    )
    return Partition(start, end, path, size), done
