"""What comes out of runs: single results and receipts; a part of the public listener."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from litestar import Request, Response, get, post
from litestar.datastructures import State
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, HeaderParameter, JSONBody, QueryParameter, RawBody

from interlock.api.auth import kernel_of, org_of_result, principal_of, result_guard, user_guard
from interlock.errors import BadRequest
from interlock.kernel.idempotency import Repeat
from interlock.kernel.reads import MAX_PAGE
from interlock.wire import (
    ExportRequest,
    ExportView,
    JobAccepted,
    ReceiptKeys,
    ReceiptReply,
    RerunRequest,
    TaskView,
)

Http = Request[Any, Any, State]
Run = Annotated[
    UUID | None, QueryParameter(name="run", required=False, description="a run of the job; without it, its newest one")
]
Cursor = Annotated[
    str | None, QueryParameter(name="cursor", required=False, description="next_cursor of the last page")
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]
_MOST_INDEX = 2**62
_SAFE = {
    # Whoever wrote the result chose its bytes: no browser shall take them for a page of the gateway's.
    "X-Content-Type-Options": "nosniff",
    "Content-Disposition": "attachment",
    "Cache-Control": "private, no-store",
}


@get(
    "/v1/jobs/{job:str}/tasks/{index:str}",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="A task of a run by its index, with its result",
    description="result_url gives the result alone to whoever has it, for a day.",
)
async def get_task_by_index(request: Http, job: FromPath[str], index: FromPath[int], run: Run = None) -> TaskView:
    return await kernel_of(request).results.task(job, _checked(index), run, principal_of(request).org_id)


@get(
    "/v1/results/{run_id:str}/{index:str}",
    guards=[result_guard],
    opt={"scope": "tasks:read"},
    media_type="application/json",
    responses={200: ResponseSpec(Any, description="The result itself", generate_examples=False)},
    summary="The result of one task, byte for byte",
    description="With a signed URL as result_url has it, or an API key.",
)
async def get_result(request: Http, run_id: FromPath[UUID], index: FromPath[int]) -> Response[bytes]:
    body = await kernel_of(request).results.body(run_id, _checked(index), org_of_result(request))
    return Response(body, headers=_SAFE, media_type="application/json")


@get(
    "/v1/jobs/{job:str}/receipt",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="The signed receipt of a run that has ended: what became of every task",
    description="That of a large run is made in several calls; each tells how far it has come.",
)
async def get_receipt(request: Http, job: FromPath[str], run: Run = None) -> ReceiptReply:
    return await kernel_of(request).receipts.receipt(job, run, principal_of(request).org_id)


@post(
    "/v1/jobs/{job:str}/exports",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=202,
    summary="Export a run that has ended: Parquet, JSON lines or zip, in parts",
    description="Made by a Spark worker. The same Idempotency-Key and body give the same answer.",
)
async def start_export(
    request: Http,
    job: FromPath[str],
    data: JSONBody[ExportRequest],
    body: RawBody,
    idempotency_key: Annotated[
        str | None, HeaderParameter(name="Idempotency-Key", required=False, min_length=1, max_length=255)
    ] = None,
) -> ExportView:
    return await kernel_of(request).exports.start(
        job, data, principal_of(request).org_id, idempotency_key=idempotency_key, body=body
    )


@get(
    "/v1/jobs/{job:str}/exports/{export_id:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="An export, and once it is complete a page of its files with signed URLs",
)
async def get_export(
    request: Http, job: FromPath[str], export_id: FromPath[UUID], cursor: Cursor = None, limit: Limit = 100
) -> ExportView:
    return await kernel_of(request).exports.export(job, export_id, principal_of(request).org_id, cursor, limit)


@post(
    "/v1/jobs/{job:str}/rerun",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    summary="Run tasks of a run once more, as a new run: all, or those behind a filter",
    description="A few are written and enqueued at once: 201. Many are copied in the background: 202. The same "
    "Idempotency-Key and body give the same answer.",
    responses={
        202: ResponseSpec(JobAccepted, description="Accepted; `status_url` tells the rest", generate_examples=False)
    },
)
async def rerun_job(
    request: Http,
    job: FromPath[str],
    data: JSONBody[RerunRequest],
    body: RawBody,
    idempotency_key: Annotated[
        str | None, HeaderParameter(name="Idempotency-Key", required=False, min_length=1, max_length=255)
    ] = None,
) -> Response[JobAccepted]:
    repeat = Repeat(idempotency_key, body)
    accepted = await kernel_of(request).reruns.rerun(job, data, principal_of(request).org_id, repeat)
    return Response(accepted, status_code=202 if accepted.total is None else 201)


@get(
    "/v1/receipt-keys",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Public keys that sign receipts now",
)
async def list_receipt_keys(request: Http) -> ReceiptKeys:
    return await kernel_of(request).receipts.keys()


def _checked(index: int) -> int:
    if not 0 <= index <= _MOST_INDEX:
        raise BadRequest("The index of a task is a number from 0 on.", code="bad_index")
    return index


HANDLERS = [get_task_by_index, get_result, get_receipt, start_export, get_export, rerun_job, list_receipt_keys]
