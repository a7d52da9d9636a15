"""Tasks, queues and workers, for users with API keys."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID

import msgspec
from litestar import get, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from interlock.access.guards import principal_of, user_guard
from interlock.access.principals import PLATFORM
from interlock.errors import BadRequest, NotFound
from interlock.http.requests import Cursor, Http, Limit, settings_of
from interlock.tasks.build import tasks_of
from interlock.tasks.overview import queue_view
from interlock.tasks.reads import Narrow
from interlock.wire.access import OrgOperators, OrgOperatorsRequest, WorkerList, WorkerView
from interlock.wire.base import MAX_PAGE, TaskStatus
from interlock.wire.logs import JobLog, TaskLog
from interlock.wire.tasks import (
    AttemptPage,
    CancelRequest,
    Changed,
    DeadMessage,
    DeadMessagePage,
    Explanation,
    QueueList,
    RedriveRequest,
    TaskPage,
    TaskView,
)

After = Annotated[int, QueryParameter(name="after", ge=0, le=2**53 - 1, description="`next` of the previous reply")]
Chunks = Annotated[int, QueryParameter(name="limit", ge=1, le=100, description="maximum number of chunks of lines")]
AttemptNumber = Annotated[int | None, QueryParameter(name="attempt", ge=1, lt=2**31, required=False)]

_Name = Annotated[str | None, QueryParameter(required=False, min_length=1, max_length=200, pattern="^[^\\x00]*$")]

_Moment = Annotated[str | None, QueryParameter(required=False, max_length=60, schema_extra={"format": "date-time"})]


async def narrowed(
    dag: _Name = None,
    operator: _Name = None,
    error_class: _Name = None,
    worker: _Name = None,
    created_after: _Moment = None,
    created_before: _Moment = None,
) -> Narrow:
    return Narrow(
        dag=dag,
        operator=operator,
        error_class=error_class,
        worker=worker,
        created_after=_moment(created_after),
        created_before=_moment(created_before),
    )


async def _task_id(request: Http, text: str) -> UUID:
    """Returns the id of a task that is given by a unique prefix."""
    return await tasks_of(request).reads.task_id(text, principal_of(request).org_id)


@get(
    "/v1/tasks",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    dependencies={"narrow": Provide(narrowed)},
    summary="Tasks by job, run, status and other filters",
    description="`error_class` is that of the last attempt. A page with filters may be short or empty while "
    "`next_cursor` is set.",
)
async def list_tasks(
    request: Http,
    narrow: NamedDependency[Narrow],
    job: FromQuery[str | None] = None,
    run: FromQuery[str | None] = None,
    status: FromQuery[TaskStatus | None] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> TaskPage:
    if (narrow.dag is not None or narrow.operator is not None) and (job is not None or run is not None):
        raise BadRequest("Give `dag` and `operator` without `job` and `run`.", code="bad_filter")
    return await tasks_of(request).reads.tasks(
        principal_of(request).org_id, job=job, run=run, status=status, cursor=cursor, limit=limit, narrow=narrow
    )


def _moment(text: str | None) -> datetime | None:
    """Parses a time; one without a zone is in UTC. The framework would also take a bare number."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(
            f"{text[:60]!r} is not a time; write one such as 2026-11-18T12:00:00Z.", code="invalid_request"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


@get("/v1/tasks/{task_id:str}", guards=[user_guard], opt={"scope": "tasks:read"}, summary="A task")
async def get_task(request: Http, task_id: FromPath[str]) -> TaskView:
    org_id = principal_of(request).org_id
    return await tasks_of(request).reads.task(await _task_id(request, task_id), org_id)


@get(
    "/v1/tasks/{task_id:str}/attempts",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="Attempts of a task",
)
async def get_attempts(request: Http, task_id: FromPath[str]) -> AttemptPage:
    org_id = principal_of(request).org_id
    return await tasks_of(request).reads.attempts(await _task_id(request, task_id), org_id)


@get(
    "/v1/tasks/{task_id:str}/explain",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="Explain why a task is not running, or why it ended as it did",
)
async def explain_task(request: Http, task_id: FromPath[str]) -> Explanation:
    org_id = principal_of(request).org_id
    return await tasks_of(request).explanations.explain(await _task_id(request, task_id), org_id)


@post(
    "/v1/tasks/{task_id:str}/cancel",
    guards=[user_guard],
    opt={"scope": "tasks:write"},
    status_code=200,
    summary="Cancel a task in any state",
)
async def cancel_task(request: Http, task_id: FromPath[str]) -> TaskView:
    org_id = principal_of(request).org_id
    return await tasks_of(request).actions.cancel(await _task_id(request, task_id), org_id)


@post(
    "/v1/tasks/{task_id:str}/retry",
    guards=[user_guard],
    opt={"scope": "tasks:write"},
    status_code=200,
    summary="Retry a failed task immediately; a dead letter gets new attempts",
)
async def retry_task(request: Http, task_id: FromPath[str]) -> TaskView:
    org_id = principal_of(request).org_id
    return await tasks_of(request).actions.retry(await _task_id(request, task_id), org_id)


@get(
    "/v1/tasks/{task_id:str}/logs",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="What an attempt printed, by default the latest",
)
async def task_logs(
    request: Http,
    task_id: FromPath[str],
    attempt: AttemptNumber = None,
    after: After = 0,
    limit: Chunks = 16,
) -> TaskLog:
    logs = tasks_of(request).reads.logs
    found, org_id = await _task_id(request, task_id), principal_of(request).org_id
    return await logs.of_task(found, org_id, attempt=attempt, after=after, limit=limit)


@get(
    "/v1/jobs/{job:str}/logs",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="What the tasks of a run, or of a job of a DAG, printed; without `after` the newest lines",
)
async def job_logs(
    request: Http,
    job: FromPath[str],
    run: FromQuery[str | None] = None,
    after: After = 0,
    limit: Chunks = 16,
) -> JobLog:
    return await tasks_of(request).reads.logs.of_job(job, run, principal_of(request).org_id, after=after, limit=limit)


@post(
    "/v1/tasks/cancel",
    guards=[user_guard],
    opt={"scope": "tasks:write"},
    status_code=200,
    summary="Cancel tasks by filter; dry_run counts",
)
async def cancel_tasks(request: Http, data: JSONBody[CancelRequest]) -> Changed:
    return await tasks_of(request).actions.cancel_matching(data, principal_of(request).org_id)


@post(
    "/v1/tasks/redrive",
    guards=[user_guard],
    opt={"scope": "tasks:write"},
    status_code=200,
    summary="Give dead letters new attempts, by filter; dry_run counts",
)
async def redrive_tasks(request: Http, data: JSONBody[RedriveRequest]) -> Changed:
    return await tasks_of(request).actions.redrive(data, principal_of(request).org_id)


@get("/v1/queues", guards=[user_guard], opt={"scope": "queues:read"}, summary="Depth and age of all queues")
async def list_queues(request: Http) -> QueueList:
    queue = tasks_of(request).queue
    return QueueList(queues=[await queue_view(queue, name) for name in settings_of(request).queues])


@get(
    "/v1/queues/{queue:str}/dead-letters",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    summary="Dead letters: messages received too often without being settled",
)
async def list_dead_letters(request: Http, queue: FromPath[str], limit: Limit = 100) -> DeadMessagePage:
    found = await tasks_of(request).queue.dead_letters(_known(request, queue), limit)
    return DeadMessagePage(
        messages=[
            DeadMessage(
                message_id=m.message_id,
                body=msgspec.Raw(m.body),
                receives=m.receives,
                enqueued_at=m.enqueued_at,
                dead_at=m.dead_at,
            )
            for m in found
        ]
    )


@post(
    "/v1/queues/{queue:str}/redrive",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    status_code=200,
    summary="Redeliver dead letters",
)
async def redrive_queue(request: Http, queue: FromPath[str], limit: Limit = MAX_PAGE) -> Changed:
    return Changed(matched=await tasks_of(request).queue.redrive(_known(request, queue), limit))


@get(
    "/v1/workers",
    guards=[user_guard],
    opt={"scope": "queues:read"},
    summary="Workers seen in the last minute",
)
async def list_workers(request: Http) -> WorkerList:
    rows = await tasks_of(request).dashboard.presence.workers()
    return WorkerList(
        workers=[WorkerView(worker_id=r["worker_id"], queue=r["queue"], last_seen_at=r["last_seen_at"]) for r in rows]
    )


@get(
    "/v1/orgs/{org:str}/operators",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    summary="Operators that an org may use; null: all",
)
async def get_org_operators(request: Http, org: FromPath[str]) -> OrgOperators:
    return await tasks_of(request).operators.limit_of(org)


@post(
    "/v1/orgs/{org:str}/operators",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    status_code=200,
    summary="Restrict an org to a list of operators; null removes the restriction",
    description="Other operators are rejected when a job is submitted or deployed, and fail at their next claim.",
)
async def limit_org_operators(request: Http, org: FromPath[str], data: JSONBody[OrgOperatorsRequest]) -> OrgOperators:
    return await tasks_of(request).operators.limit(org, data.operators)


def _known(request: Http, queue: str) -> str:
    names = settings_of(request).queues
    if queue not in names:
        raise NotFound(f"Unknown queue {queue!r}; known: {', '.join(names)}.")
    return queue


HANDLERS = [
    list_tasks,
    get_task,
    get_attempts,
    explain_task,
    cancel_task,
    retry_task,
    task_logs,
    job_logs,
    cancel_tasks,
    redrive_tasks,
    list_queues,
    list_dead_letters,
    redrive_queue,
    list_workers,
    get_org_operators,
    limit_org_operators,
]
