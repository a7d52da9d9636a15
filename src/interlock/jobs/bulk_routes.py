"""Endpoints of bulk operations."""

from __future__ import annotations

from uuid import UUID

from litestar import Response, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, JSONBody, RawBody

from interlock.access.guards import principal_of, user_guard
from interlock.http.requests import Cursor, Http, Limit
from interlock.jobs.build import jobs_of
from interlock.jobs.routes import IdempotencyKey
from interlock.tasks.idempotency import Repeat
from interlock.wire.bulk_operations import BulkPage, BulkPreview, BulkRequest, BulkView

_PREVIEW = {200: ResponseSpec(BulkPreview, description="Dry run: nothing was changed", generate_examples=False)}


@post(
    "/v1/bulk-operations",
    guards=[user_guard],
    opt={"scope": "tasks:write"},
    status_code=202,
    summary="Act on all tasks or runs that match a filter; dry_run counts them",
    responses=_PREVIEW,
)
async def start_bulk_operation(
    request: Http, data: JSONBody[BulkRequest], body: RawBody, idempotency_key: IdempotencyKey = None
) -> Response[BulkView]:
    bulk, caller = jobs_of(request).bulk_operations, principal_of(request)
    if data.dry_run:
        preview: Response[BulkView] = Response(await bulk.preview(data, caller.org_id), status_code=200)  # type: ignore[arg-type]
        return preview
    repeat = Repeat(idempotency_key, body)
    return Response(await bulk.start(data, caller, repeat), status_code=202)


@get(
    "/v1/bulk-operations",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="Bulk operations, newest first: who did what to which tasks, and why",
)
async def list_bulk_operations(request: Http, cursor: Cursor = None, limit: Limit = 100) -> BulkPage:
    return await jobs_of(request).bulk_operations.page(principal_of(request).org_id, cursor, limit)


@get(
    "/v1/bulk-operations/{operation_id:str}",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="A bulk operation and its progress",
)
async def get_bulk_operation(request: Http, operation_id: FromPath[UUID]) -> BulkView:
    return await jobs_of(request).bulk_operations.operation(operation_id, principal_of(request).org_id)


@post(
    "/v1/bulk-operations/{operation_id:str}/cancel",
    guards=[user_guard],
    opt={"scope": "tasks:write"},
    status_code=200,
    summary="Stop a bulk operation after its current batch",
)
async def cancel_bulk_operation(request: Http, operation_id: FromPath[UUID]) -> BulkView:
    return await jobs_of(request).bulk_operations.cancel(operation_id, principal_of(request).org_id)


HANDLERS = [start_bulk_operation, list_bulk_operations, get_bulk_operation, cancel_bulk_operation]
