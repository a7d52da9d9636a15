"""Pause, resume, cancel and delete jobs; a part of the public listener."""

from __future__ import annotations

from typing import Any

from litestar import Request, delete, post
from litestar.datastructures import State
from litestar.params import FromPath

from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.wire import JobView

Http = Request[Any, Any, State]


@post(
    "/v1/jobs/{job:str}/pause",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Pause the runs of a job: what runs goes on, nothing else begins",
)
async def pause_job(request: Http, job: FromPath[str]) -> JobView:
    return await kernel_of(request).run_control.pause(job, principal_of(request).org_id)


@post(
    "/v1/jobs/{job:str}/resume",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Resume the paused runs of a job",
)
async def resume_job(request: Http, job: FromPath[str]) -> JobView:
    return await kernel_of(request).run_control.resume(job, principal_of(request).org_id)


@post(
    "/v1/jobs/{job:str}/cancel",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Cancel the runs of a job that have not ended",
)
async def cancel_job(request: Http, job: FromPath[str]) -> JobView:
    return await kernel_of(request).run_control.cancel(job, principal_of(request).org_id)


@delete(
    "/v1/jobs/{job:str}",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Delete a job with its runs, tasks and results, whatever state they are in",
)
async def delete_job(request: Http, job: FromPath[str]) -> JobView:
    return await kernel_of(request).run_control.delete(job, principal_of(request).org_id)


HANDLERS = [pause_job, resume_job, cancel_job, delete_job]
