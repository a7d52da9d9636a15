"""The SDK for datasets, as `Client.datasets`: one method per endpoint."""

from __future__ import annotations

from uuid import UUID

import msgspec

from interlock.client._caller import Caller, path, query
from interlock.wire import (
    DatasetEventPage,
    DatasetPage,
    DatasetView,
    Direction,
    Invalidated,
    InvalidateRequest,
    Lineage,
    PartitionPage,
    ScopeExplanation,
)

PAGE = 100


class DatasetCalls:
    """A dataset is named by its uuid, its published name, or as `dag:job:output`."""

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
        """Those that overlap `within`, of the current version unless another is named."""
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
        """Not tried again when the reply was lost: it would be made twice."""
        target = path("v1", "datasets", dataset, "invalidate")
        decoder = msgspec.json.Decoder(Invalidated)
        return await self._caller.call("POST", target, decoder, request, repeatable=request.dry_run)

    async def explain(self, dag: str, job: str, start: int, end: int) -> ScopeExplanation:
        """Why a job has done a scope, or has not."""
        target = query(path("v1", "dags", dag, "jobs", job, "explain"), start=start, end=end)
        return await self._caller.call("GET", target, msgspec.json.Decoder(ScopeExplanation))
