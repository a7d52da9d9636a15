"""Lists that are too long for a request, and runs that stay open for more."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request, Response, post
from litestar.datastructures import State
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, HeaderParameter, JSONBody, RawBody

from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.kernel.idempotency import Repeat
from interlock.wire import JobAccepted, JobRequest, ListUpload, RunView, TasksAdded, TasksRequest, UploadRequest

Http = Request[Any, Any, State]
IdempotencyKey = Annotated[
    str | None, HeaderParameter(name="Idempotency-Key", required=False, min_length=1, max_length=255)
]


@post(
    "/v1/jobs",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    summary="Submit a list of tasks",
    description="A small closed list is written and enqueued in one transaction: 201. A long one, one in an upload, an "
    "open one, or any with `async`, is accepted and made in the background: 202. The same Idempotency-Key and body "
    "give the same answer.",
    responses={
        202: ResponseSpec(JobAccepted, description="Accepted; `status_url` tells the rest", generate_examples=False)
    },
)
async def submit_job(
    request: Http, data: JSONBody[JobRequest], body: RawBody, idempotency_key: IdempotencyKey = None
) -> Response[JobAccepted]:
    accepted = await kernel_of(request).bulk.submit(data, principal_of(request).org_id, Repeat(idempotency_key, body))
    return Response(accepted, status_code=202 if accepted.total is None else 201)


@post(
    "/v1/uploads",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    summary="Where to put a long list of tasks",
    description="PUT the list, JSONL, CSV or one text per line, as it is or packed with gzip or zstd, and name the "
    "upload as the `source` of a job. Parts may be put at once; a line lies within one of them.",
)
async def create_upload(
    request: Http, data: JSONBody[UploadRequest], body: RawBody, idempotency_key: IdempotencyKey = None
) -> ListUpload:
    return await kernel_of(request).uploads.create(data, principal_of(request).org_id, Repeat(idempotency_key, body))


@post(
    "/v1/jobs/{job:str}/tasks",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    summary="Add tasks to a job's open run",
    description="All of them or none; they may be claimed at once. Their indexes follow those that are there.",
)
async def add_tasks(
    request: Http,
    job: FromPath[str],
    data: JSONBody[TasksRequest],
    body: RawBody,
    idempotency_key: IdempotencyKey = None,
) -> TasksAdded:
    org_id = principal_of(request).org_id
    return await kernel_of(request).bulk.add(job, data, org_id, Repeat(idempotency_key, body))


@post(
    "/v1/jobs/{job:str}/close",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Say that a job's open run gets no more tasks",
    description="It ends with its last task. One that is closed already is answered with the run as it is.",
)
async def close_job(request: Http, job: FromPath[str], idempotency_key: IdempotencyKey = None) -> RunView:
    return await kernel_of(request).bulk.close(job, principal_of(request).org_id, Repeat(idempotency_key))


HANDLERS = [submit_job, create_upload, add_tasks, close_job]
