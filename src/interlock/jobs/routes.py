"""Endpoints of the gateway for jobs and runs: submission, status, control, results, exports, reruns."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from litestar import Response, delete, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter, RawBody

from interlock.access.guards import org_of_result, principal_of, result_guard, user_guard
from interlock.errors import BadRequest
from interlock.http.requests import Cursor, Http, Limit
from interlock.jobs.build import jobs_of
from interlock.tasks.build import tasks_of
from interlock.tasks.idempotency import Repeat
from interlock.wire.base import RunState, TaskStatus
from interlock.wire.jobs import (
    ExportRequest,
    ExportView,
    JobAccepted,
    JobPage,
    JobRequest,
    JobView,
    ListUpload,
    ReceiptKeys,
    ReceiptReply,
    RerunRequest,
    RunPage,
    RunView,
    TasksAdded,
    TasksRequest,
    UploadRequest,
)
from interlock.wire.tasks import Changed, TaskPage, TaskView

IdempotencyKey = Annotated[
    str | None, HeaderParameter(name="Idempotency-Key", required=False, min_length=1, max_length=255)
]


@post(
    "/v1/jobs",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    summary="Submit a list of tasks",
    description="A small closed list is inserted and enqueued in one transaction: 201. A long list, a list in an "
    "upload, an open run, or any request with `async` is accepted, and its tasks are created in the background: 202. A "
    "repeated Idempotency-Key with the same body returns the same response.",
    responses={
        202: ResponseSpec(JobAccepted, description="Accepted; poll `status_url` for progress", generate_examples=False)
    },
)
async def submit_job(
    request: Http, data: JSONBody[JobRequest], body: RawBody, idempotency_key: IdempotencyKey = None
) -> Response[JobAccepted]:
    org_id = principal_of(request).org_id
    accepted = await jobs_of(request).submissions.submit(data, org_id, Repeat(idempotency_key, body))
    return Response(accepted, status_code=202 if accepted.total is None else 201)


@post(
    "/v1/uploads",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    summary="Create an upload for a long list of tasks",
    description="PUT the list as JSONL, CSV or one text per line, uncompressed or compressed with gzip or zstd, and "
    "use the upload as the `source` of a job. Parts may be uploaded concurrently; no line may span two parts.",
)
async def create_upload(
    request: Http, data: JSONBody[UploadRequest], body: RawBody, idempotency_key: IdempotencyKey = None
) -> ListUpload:
    return await jobs_of(request).uploads.create(data, principal_of(request).org_id, Repeat(idempotency_key, body))


@post(
    "/v1/jobs/{job:str}/tasks",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    summary="Add tasks to the open run of a job",
    description="Adds all tasks or none. They can be claimed immediately. Their indexes follow the existing ones.",
)
async def add_tasks(
    request: Http,
    job: FromPath[str],
    data: JSONBody[TasksRequest],
    body: RawBody,
    idempotency_key: IdempotencyKey = None,
) -> TasksAdded:
    org_id = principal_of(request).org_id
    return await jobs_of(request).submissions.add(job, data, org_id, Repeat(idempotency_key, body))


@post(
    "/v1/jobs/{job:str}/close",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Close the open run of a job: it gets no more tasks",
    description="The run ends with its last task. If it is already closed, the response is the run as it is.",
)
async def close_job(request: Http, job: FromPath[str], idempotency_key: IdempotencyKey = None) -> RunView:
    return await jobs_of(request).submissions.close(job, principal_of(request).org_id, Repeat(idempotency_key))


Run = Annotated[
    str | None,
    QueryParameter(
        name="run", required=False, description="a run of the job, by id or a unique prefix; default: the newest"
    ),
]
_MAX_INDEX = 2**62
_SAFE = {
    # The writer of a result controls its bytes: no browser may render them as a page of the gateway.
    "X-Content-Type-Options": "nosniff",
    "Content-Disposition": "attachment",
    "Cache-Control": "private, no-store",
}


@get(
    "/v1/jobs/{job:str}/tasks/{index:str}",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="A task of a run by its index, with its result",
    description="result_url returns only the result, without further credentials, for one day.",
)
async def get_task_by_index(request: Http, job: FromPath[str], index: FromPath[int], run: Run = None) -> TaskView:
    return await jobs_of(request).results.task(job, _checked(index), run, principal_of(request).org_id)


@get(
    "/v1/results/{run_id:str}/{index:str}",
    guards=[result_guard],
    opt={"scope": "tasks:read"},
    media_type="application/json",
    responses={200: ResponseSpec(Any, description="The result itself", generate_examples=False)},
    summary="The result of one task, byte for byte",
    description="Use the signed URL in result_url, or an API key.",
)
async def get_result(request: Http, run_id: FromPath[UUID], index: FromPath[int]) -> Response[bytes]:
    body = await jobs_of(request).results.body(run_id, _checked(index), org_of_result(request))
    return Response(body, headers=_SAFE, media_type="application/json")


@get(
    "/v1/jobs/{job:str}/receipt",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="The signed receipt of an ended run, with the outcome of each task",
    description="The receipt of a large run is computed over several calls; each returns the progress.",
)
async def get_receipt(request: Http, job: FromPath[str], run: Run = None) -> ReceiptReply:
    return await jobs_of(request).receipts.receipt(job, run, principal_of(request).org_id)


@post(
    "/v1/jobs/{job:str}/exports",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=202,
    summary="Export an ended run as Parquet, JSON lines or zip, in parts",
    description="A Spark worker creates the files. A repeated Idempotency-Key with the same body returns the same "
    "response.",
)
async def start_export(
    request: Http,
    job: FromPath[str],
    data: JSONBody[ExportRequest],
    body: RawBody,
    idempotency_key: IdempotencyKey = None,
) -> ExportView:
    org_id = principal_of(request).org_id
    return await jobs_of(request).exports.start(job, data, org_id, Repeat(idempotency_key, body))


@get(
    "/v1/jobs/{job:str}/exports/{export_id:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="An export and, once it is complete, a page of its files with signed URLs",
)
async def get_export(
    request: Http, job: FromPath[str], export_id: FromPath[UUID], cursor: Cursor = None, limit: Limit = 100
) -> ExportView:
    return await jobs_of(request).exports.export(job, export_id, principal_of(request).org_id, cursor, limit)


@post(
    "/v1/jobs/{job:str}/rerun",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    summary="Rerun tasks of a run as a new run: all of them, or a filtered subset",
    description="A few tasks are inserted and enqueued immediately: 201. Many are copied in the background: 202. A "
    "repeated Idempotency-Key with the same body returns the same response.",
    responses={
        202: ResponseSpec(JobAccepted, description="Accepted; poll `status_url` for progress", generate_examples=False)
    },
)
async def rerun_job(
    request: Http,
    job: FromPath[str],
    data: JSONBody[RerunRequest],
    body: RawBody,
    idempotency_key: IdempotencyKey = None,
) -> Response[JobAccepted]:
    repeat = Repeat(idempotency_key, body)
    accepted = await jobs_of(request).reruns.rerun(job, data, principal_of(request).org_id, repeat)
    return Response(accepted, status_code=202 if accepted.total is None else 201)


@get(
    "/v1/receipt-keys",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Public keys that currently sign receipts",
)
async def list_receipt_keys(request: Http) -> ReceiptKeys:
    return await jobs_of(request).receipts.keys()


def _checked(index: int) -> int:
    if not 0 <= index <= _MAX_INDEX:
        raise BadRequest(f"The index of a task must be from 0 to {_MAX_INDEX}.", code="bad_index")
    return index


@post(
    "/v1/jobs/{job:str}/pause",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Pause the runs of a job: running tasks continue, no others start",
)
async def pause_job(request: Http, job: FromPath[str]) -> JobView:
    return await jobs_of(request).run_control.pause(job, principal_of(request).org_id)


@post(
    "/v1/jobs/{job:str}/resume",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Resume the paused runs of a job",
)
async def resume_job(request: Http, job: FromPath[str]) -> JobView:
    return await jobs_of(request).run_control.resume(job, principal_of(request).org_id)


@post(
    "/v1/jobs/{job:str}/cancel",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Cancel the runs of a job that have not ended",
)
async def cancel_job(request: Http, job: FromPath[str]) -> JobView:
    return await jobs_of(request).run_control.cancel(job, principal_of(request).org_id)


@delete(
    "/v1/jobs/{job:str}",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Delete a job in any state, with its runs, tasks and results",
)
async def delete_job(request: Http, job: FromPath[str]) -> JobView:
    return await jobs_of(request).run_control.delete(job, principal_of(request).org_id)


@get("/v1/jobs", guards=[user_guard], opt={"scope": "jobs:read"}, summary="Jobs, newest first")
async def list_jobs(request: Http, cursor: Cursor = None, limit: Limit = 100) -> JobPage:
    return await tasks_of(request).reads.jobs(principal_of(request).org_id, cursor, limit)


@get(
    "/v1/jobs/{job:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read", "warm": True},
    summary="A job and its newest run",
)
async def get_job(request: Http, job: FromPath[str]) -> JobView:
    return await tasks_of(request).status.job(job, principal_of(request).org_id)


RunsIn = Annotated[RunState | None, QueryParameter(name="state", required=False, description="runs in this state")]


@get(
    "/v1/jobs/{job:str}/runs",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Runs of a job, newest first",
)
async def list_job_runs(
    request: Http, job: FromPath[str], run_state: RunsIn = None, cursor: Cursor = None, limit: Limit = 100
) -> RunPage:
    org_id = principal_of(request).org_id
    return await tasks_of(request).reads.runs(job, org_id, state=run_state, cursor=cursor, limit=limit)


@get("/v1/jobs/{job:str}/tasks", guards=[user_guard], opt={"scope": "tasks:read"}, summary="Tasks of a job")
async def list_job_tasks(
    request: Http,
    job: FromPath[str],
    status: FromQuery[TaskStatus | None] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> TaskPage:
    return await tasks_of(request).reads.tasks(
        principal_of(request).org_id, job=job, run=None, status=status, cursor=cursor, limit=limit
    )


@get(
    "/v1/runs",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Runs of all jobs, newest first",
    description="With `state`, a page may be short or even empty while `next_cursor` is set.",
)
async def list_runs(
    request: Http,
    job: FromQuery[str | None] = None,
    run_state: RunsIn = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> RunPage:
    org_id = principal_of(request).org_id
    return await tasks_of(request).reads.runs(job, org_id, state=run_state, cursor=cursor, limit=limit)


@get(
    "/v1/runs/{run_id:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read", "warm": True},
    summary="A run and its counts",
)
async def get_run(request: Http, run_id: FromPath[str]) -> RunView:
    tasks, org_id = tasks_of(request), principal_of(request).org_id
    return await tasks.status.run(await tasks.reads.run_id(run_id, org_id), org_id)


@post(
    "/v1/runs/{run_id:str}/cancel",
    guards=[user_guard],
    opt={"scope": "tasks:write"},
    status_code=200,
    summary="Cancel all tasks of a run that have not ended",
)
async def cancel_run(request: Http, run_id: FromPath[str]) -> Changed:
    tasks, org_id = tasks_of(request), principal_of(request).org_id
    return await tasks.actions.cancel_run(await tasks.reads.run_id(run_id, org_id), org_id)


HANDLERS = [
    submit_job,
    create_upload,
    add_tasks,
    close_job,
    get_task_by_index,
    get_result,
    get_receipt,
    start_export,
    get_export,
    rerun_job,
    list_receipt_keys,
    pause_job,
    resume_job,
    cancel_job,
    delete_job,
    list_jobs,
    get_job,
    list_runs,
    list_job_runs,
    list_job_tasks,
    get_run,
    cancel_run,
]
