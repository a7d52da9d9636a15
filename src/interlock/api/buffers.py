"""Published batches of buffered datasets on the gateway."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from litestar import Request, get, post
from litestar.datastructures import State
from litestar.params import FromPath, FromQuery, QueryParameter

from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.kernel.reads import MAX_PAGE
from interlock.wire import BufferPage, BufferView, PublishStatus

Http = Request[Any, Any, State]
Cursor = Annotated[
    str | None, QueryParameter(name="cursor", required=False, description="next_cursor of the last page")
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]


@get(
    "/v1/buffers",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Published batches, newest first",
    description="Without the rows of refusals, which the batch itself shows.",
)
async def list_buffers(
    request: Http, status: FromQuery[PublishStatus | None] = None, cursor: Cursor = None, limit: Limit = 100
) -> BufferPage:
    return await kernel_of(request).buffers.page(principal_of(request).org_id, status, cursor, limit)


@get(
    "/v1/buffers/{publish_id:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="A published batch: what became of it, and which of its rows are wrong",
)
async def get_buffer(request: Http, publish_id: FromPath[UUID]) -> BufferView:
    return await kernel_of(request).buffers.show(publish_id, principal_of(request).org_id)


@post(
    "/v1/buffers/{publish_id:str}/redrive",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Load a batch once more that was refused or given up",
)
async def redrive_buffer(request: Http, publish_id: FromPath[UUID]) -> BufferView:
    return await kernel_of(request).buffers.redrive(publish_id, principal_of(request).org_id)


HANDLERS = [list_buffers, get_buffer, redrive_buffer]
