"""Backfills, and the pauses of backpressure: a part of the public listener."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from litestar import Request, get, post
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody, QueryParameter

from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.kernel.reads import MAX_PAGE
from interlock.wire import BackfillAnswer, BackfillPage, BackfillRequest, BackfillView, PausePage

Http = Request[Any, Any, State]
Cursor = Annotated[
    str | None, QueryParameter(name="cursor", required=False, description="next_cursor of the last page")
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]


@get(
    "/v1/pauses",
    guards=[user_guard],
    opt={"scope": "queues:read"},
    summary="Jobs that are held back: why, since when, along which path",
)
async def list_pauses(request: Http, cursor: Cursor = None, limit: Limit = 100) -> PausePage:
    return await kernel_of(request).pauses.page(principal_of(request).org_id, cursor, limit)


@post(
    "/v1/dags/{dag:str}/jobs/{job:str}/backfills",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Compute a job's scopes in a range again; dry_run counts them",
)
async def start_backfill(
    request: Http, dag: FromPath[str], job: FromPath[str], data: JSONBody[BackfillRequest]
) -> BackfillAnswer:
    caller = principal_of(request)
    return await kernel_of(request).backfills.start(dag, job, data, caller.org_id, caller.user)


@get("/v1/backfills", guards=[user_guard], opt={"scope": "jobs:read"}, summary="Backfills, newest first")
async def list_backfills(request: Http, cursor: Cursor = None, limit: Limit = 100) -> BackfillPage:
    return await kernel_of(request).backfills.page(principal_of(request).org_id, cursor, limit)


@get("/v1/backfills/{run_id:str}", guards=[user_guard], opt={"scope": "jobs:read"}, summary="A backfill")
async def get_backfill(request: Http, run_id: FromPath[UUID]) -> BackfillView:
    return await kernel_of(request).backfills.one(run_id, principal_of(request).org_id)


@post(
    "/v1/backfills/{run_id:str}/pause",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Hand out no more of its tasks for now",
)
async def pause_backfill(request: Http, run_id: FromPath[UUID]) -> BackfillView:
    return await kernel_of(request).backfills.pause(run_id, principal_of(request).org_id)


@post(
    "/v1/backfills/{run_id:str}/resume",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Go on handing out its tasks",
)
async def resume_backfill(request: Http, run_id: FromPath[UUID]) -> BackfillView:
    return await kernel_of(request).backfills.resume(run_id, principal_of(request).org_id)


@post(
    "/v1/backfills/{run_id:str}/cancel",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Hand out no more of its tasks, and cancel those that have not ended",
)
async def cancel_backfill(request: Http, run_id: FromPath[UUID]) -> BackfillView:
    return await kernel_of(request).backfills.cancel(run_id, principal_of(request).org_id)


HANDLERS = [
    list_pauses,
    start_backfill,
    list_backfills,
    get_backfill,
    pause_backfill,
    resume_backfill,
    cancel_backfill,
]
