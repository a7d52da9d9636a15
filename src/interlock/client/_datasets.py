"""Calls for datasets and published batches: one method per endpoint."""

from __future__ import annotations

from uuid import UUID

import msgspec

from interlock.client._caller import Caller, path, query
from interlock.wire import (
    BufferPage,
    BufferView,
    DatasetEventPage,
    DatasetPage,
    DatasetView,
    Direction,
    Invalidated,
    InvalidateRequest,
    Lineage,
    PartitionPage,
    PublishStatus,
    ScopeExplanation,
)

PAGE = 100


class BufferCalls:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def page(
        self, status: PublishStatus | None = None, cursor: str | None = None, limit: int = PAGE
    ) -> BufferPage:
        target = query("/v1/buffers", status=status, cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, msgspec.json.Decoder(BufferPage))

    async def show(self, publish_id: UUID) -> BufferView:
        return await self._caller.call("GET", path("v1", "buffers", publish_id), msgspec.json.Decoder(BufferView))

    async def redrive(self, publish_id: UUID) -> BufferView:
        """Redrives a dead batch.

        Not retried after a lost reply: the second call would fail because the batch is Pending.
        """
        target = path("v1", "buffers", publish_id, "redrive")
        return await self._caller.call("POST", target, msgspec.json.Decoder(BufferView), repeatable=False)


class DatasetCalls:
    """A dataset is identified by its UUID, its published name, or `dag:job:output`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> DatasetPage:
        target = query("/v1/datasets", cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, msgspec.json.Decoder(DatasetPage))

    async def show(self, dataset: UUID | str) -> DatasetView:
        return await self._caller.call("GET", path("v1", "datasets", dataset), msgspec.json.Decoder(DatasetView))

    async def partition_page(
        self,
        dataset: UUID | str,
        cursor: str | None = None,
        limit: int = PAGE,
        *,
        version: UUID | None = None,
        within: tuple[int, int] | None = None,
    ) -> PartitionPage:
        """Returns partitions that overlap `within`, of the current version unless `version` is given."""
        first, last = within or (None, None)
        target = query(
            path("v1", "datasets", dataset, "partitions"),
            **{"version": version, "from": first, "to": last, "cursor": cursor, "limit": limit},
        )
        return await self._caller.call("GET", target, msgspec.json.Decoder(PartitionPage))

    async def event_page(self, dataset: UUID | str, cursor: str | None = None, limit: int = PAGE) -> DatasetEventPage:
        target = query(path("v1", "datasets", dataset, "events"), cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, msgspec.json.Decoder(DatasetEventPage))

    async def lineage(
        self, dataset: UUID | str, direction: Direction = Direction.BOTH, depth: int | None = None
    ) -> Lineage:
        target = query(path("v1", "datasets", dataset, "lineage"), direction=direction, depth=depth)
        return await self._caller.call("GET", target, msgspec.json.Decoder(Lineage))

    async def invalidate(self, dataset: UUID | str, request: InvalidateRequest) -> Invalidated:
        """Invalidates a scope. Not retried after a lost reply: a second call would invalidate it again."""
        target = path("v1", "datasets", dataset, "invalidate")
        decoder = msgspec.json.Decoder(Invalidated)
        return await self._caller.call("POST", target, decoder, request, repeatable=request.dry_run)

    async def explain(self, dag: str, job: str, start: int, end: int) -> ScopeExplanation:
        """Explains why a job has or has not processed a scope."""
        target = query(path("v1", "dags", dag, "jobs", job, "explain"), start=start, end=end)
        return await self._caller.call("GET", target, msgspec.json.Decoder(ScopeExplanation))
