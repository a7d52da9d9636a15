"""Datasets on the gateway: what there is, who makes it of what, what is to be made again."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from litestar import Request, get, post
from litestar.datastructures import State
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.dags.dataset_lineage import MAX_DEPTH
from interlock.dags.registry import HIGHEST, LOWEST
from interlock.kernel.reads import MAX_PAGE
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

Http = Request[Any, Any, State]
Cursor = Annotated[
    str | None, QueryParameter(name="cursor", required=False, description="next_cursor of the last page")
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]
_FARTHEST = 4_600_000_000_000_000_000
"""A little below what a position may be: a limit in a document is a float, and this one is the same there."""
From = Annotated[
    int | None,
    QueryParameter(name="from", required=False, ge=-_FARTHEST, le=_FARTHEST, description="first place, inclusive"),
]
To = Annotated[
    int | None,
    QueryParameter(name="to", required=False, ge=-_FARTHEST, le=_FARTHEST, description="last place, inclusive"),
]
Start = Annotated[int, QueryParameter(name="start", ge=-_FARTHEST, le=_FARTHEST, description="first place, inclusive")]
End = Annotated[int, QueryParameter(name="end", ge=-_FARTHEST, le=_FARTHEST, description="last place, inclusive")]
Depth = Annotated[
    int, QueryParameter(name="depth", ge=1, le=MAX_DEPTH, description="most jobs between the dataset and another")
]


@get(
    "/v1/datasets",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Datasets that the key may read",
)
async def list_datasets(request: Http, cursor: Cursor = None, limit: Limit = 100) -> DatasetPage:
    return await kernel_of(request).registry.datasets(principal_of(request), cursor, limit)


@get(
    "/v1/datasets/{dataset:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="A dataset and its versions",
    description="By uuid, by published name, or as dag:job:output.",
)
async def get_dataset(request: Http, dataset: FromPath[str]) -> DatasetView:
    return await kernel_of(request).registry.dataset(dataset, principal_of(request))


@get(
    "/v1/datasets/{dataset:str}/partitions",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Partitions of a version, in their order",
)
async def list_partitions(
    request: Http,
    dataset: FromPath[str],
    version: FromQuery[UUID | None] = None,
    first: From = None,
    last: To = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> PartitionPage:
    within = (LOWEST if first is None else first, HIGHEST if last is None else last)
    return await kernel_of(request).registry.partitions(
        dataset, principal_of(request), version=version, within=within, cursor=cursor, limit=limit
    )


@get(
    "/v1/datasets/{dataset:str}/lineage",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Who makes it of what, and who makes what of it",
)
async def get_lineage(
    request: Http, dataset: FromPath[str], direction: FromQuery[Direction] = Direction.BOTH, depth: Depth = 10
) -> Lineage:
    return await kernel_of(request).dataset_lineage.lineage(dataset, principal_of(request), direction, depth)


@get(
    "/v1/datasets/{dataset:str}/events",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Its changes as they were told, newest first",
)
async def list_events(
    request: Http, dataset: FromPath[str], cursor: Cursor = None, limit: Limit = 100
) -> DatasetEventPage:
    return await kernel_of(request).registry.events(dataset, principal_of(request), cursor, limit)


@post(
    "/v1/datasets/{dataset:str}/invalidate",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Have a range made again, and what follows from it; dry_run counts",
)
async def invalidate(request: Http, dataset: FromPath[str], data: JSONBody[InvalidateRequest]) -> Invalidated:
    return await kernel_of(request).invalidations.invalidate(dataset, data, principal_of(request))


@get(
    "/v1/dags/{dag:str}/jobs/{job:str}/explain",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Why a job has done a scope, or has not",
)
async def explain_scope(
    request: Http, dag: FromPath[str], job: FromPath[str], start: Start, end: End
) -> ScopeExplanation:
    return await kernel_of(request).scope_explanations.explain(dag, job, principal_of(request).org_id, start, end)


HANDLERS = [
    list_datasets,
    get_dataset,
    list_partitions,
    get_lineage,
    list_events,
    invalidate,
    explain_scope,
]
