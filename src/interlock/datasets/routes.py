"""Endpoints for datasets: registry, lineage, published batches; data and credentials of attempts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

from litestar import Response, get, post
from litestar.openapi.spec import Operation, RequestBody
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from interlock.access.guards import capability_guard, claims_of, principal_of, user_guard, worker_guard
from interlock.access.tokens import require_binding
from interlock.datasets.build import datasets_of
from interlock.datasets.registry import MAX_DEPTH
from interlock.http.ranges import bound_of
from interlock.http.requests import Cursor, Http, Limit
from interlock.wire.access import CredentialsRequest, TaskCredentials
from interlock.wire.attempts import DataReply, DataRequest
from interlock.wire.datasets import (
    BufferPage,
    BufferView,
    DatasetEventPage,
    DatasetPage,
    DatasetView,
    Direction,
    Lineage,
    PartitionPage,
    PublishStatus,
)

From = Annotated[
    str | None,
    QueryParameter(name="from", required=False, max_length=60, description="first position or date, inclusive"),
]
To = Annotated[
    str | None,
    QueryParameter(name="to", required=False, max_length=60, description="last position or date, inclusive"),
]
Depth = Annotated[
    int,
    QueryParameter(
        name="depth", ge=1, le=MAX_DEPTH, description="maximum number of jobs between the dataset and another one"
    ),
]


@get(
    "/v1/datasets",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Datasets that the key may read",
)
async def list_datasets(request: Http, cursor: Cursor = None, limit: Limit = 100) -> DatasetPage:
    return await datasets_of(request).registry.datasets(principal_of(request), cursor, limit)


@get(
    "/v1/datasets/{dataset:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="A dataset and its versions",
    description="Identify it by uuid, by published name, or as dag:job:output.",
)
async def get_dataset(request: Http, dataset: FromPath[str]) -> DatasetView:
    return await datasets_of(request).registry.dataset(dataset, principal_of(request))


@get(
    "/v1/datasets/{dataset:str}/partitions",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Partitions of a version, in order",
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
    within = (None if first is None else bound_of(first), None if last is None else bound_of(last))
    return await datasets_of(request).registry.partitions(
        dataset, principal_of(request), version=version, within=within, cursor=cursor, limit=limit
    )


@get(
    "/v1/datasets/{dataset:str}/lineage",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Lineage of a dataset: the jobs and datasets before and after it",
)
async def get_lineage(
    request: Http, dataset: FromPath[str], direction: FromQuery[Direction] = Direction.BOTH, depth: Depth = 10
) -> Lineage:
    return await datasets_of(request).lineage.lineage(dataset, principal_of(request), direction, depth)


@get(
    "/v1/datasets/{dataset:str}/events",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Change events of a dataset, newest first",
)
async def list_events(
    request: Http, dataset: FromPath[str], cursor: Cursor = None, limit: Limit = 100
) -> DatasetEventPage:
    return await datasets_of(request).registry.events(dataset, principal_of(request), cursor, limit)


@get(
    "/v1/buffers",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Published batches, newest first",
    description="Omits rejected rows; get the batch itself to see them.",
)
async def list_buffers(
    request: Http, status: FromQuery[PublishStatus | None] = None, cursor: Cursor = None, limit: Limit = 100
) -> BufferPage:
    return await datasets_of(request).buffers.page(principal_of(request).org_id, status, cursor, limit)


@get(
    "/v1/buffers/{publish_id:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="A published batch: its status and its invalid rows",
)
async def get_buffer(request: Http, publish_id: FromPath[UUID]) -> BufferView:
    return await datasets_of(request).buffers.show(publish_id, principal_of(request).org_id)


@post(
    "/v1/buffers/{publish_id:str}/redrive",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Retry a batch that was rejected or given up",
)
async def redrive_buffer(request: Http, publish_id: FromPath[UUID]) -> BufferView:
    return await datasets_of(request).buffers.redrive(publish_id, principal_of(request).org_id)


@post(
    "/internal/task-data",
    guards=[worker_guard],
    status_code=200,
    summary="Inputs and output locations of leased attempts",
)
async def task_data(request: Http, data: JSONBody[DataRequest]) -> DataReply:
    return await datasets_of(request).files.data(data.items)


@dataclass
class _BodyOptional(Operation):
    """Documents that the request body is optional."""

    def __post_init__(self) -> None:
        if isinstance(self.request_body, RequestBody):
            self.request_body.required = False


@post(
    "/v1/task/credentials",
    guards=[capability_guard],
    status_code=200,
    summary="Credentials for the object prefixes of the attempt, valid until its lease ends",
    operation_class=_BodyOptional,
)
async def task_credentials(
    request: Http, data: JSONBody[CredentialsRequest | None] = None
) -> Response[TaskCredentials]:
    claims, fence = claims_of(request), data or CredentialsRequest()
    require_binding(claims, fence.task_id or claims.task_id, fence.attempt or claims.attempt)
    minted = await datasets_of(request).credentials.mint(claims, fence.lease_token)
    return Response(minted, status_code=200, headers={"Cache-Control": "no-store"})


HANDLERS = [
    list_datasets,
    get_dataset,
    list_partitions,
    get_lineage,
    list_events,
    list_buffers,
    get_buffer,
    redrive_buffer,
]


DISPATCHER_HANDLERS = [
    task_data,
    task_credentials,
]
