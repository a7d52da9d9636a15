"""The public listener: jobs, runs, tasks, queues and principals, for users with API keys."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

import msgspec
from litestar import Litestar, MediaType, Request, Response, delete, get, post
from litestar.datastructures import State
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import Components, SecurityScheme
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from interlock.access.principals import PLATFORM
from interlock.api import (
    backfills,
    buffers,
    bulk,
    bundles,
    bus_alerts,
    bus_health,
    bus_inbox,
    bus_registry,
    bus_replays,
    commands,
    dags,
    datasets,
    members,
    objects,
    queries,
    results,
    run_control,
    secrets,
    sources,
    webhooks,
)
from interlock.api.application import application
from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.errors import BadRequest, ConfigurationError, Conflict, NotFound
from interlock.kernel.reads import MAX_PAGE
from interlock.telemetry import metrics_text
from interlock.wire import (
    AttemptPage,
    CancelRequest,
    Changed,
    DeadMessage,
    DeadMessagePage,
    Explanation,
    Health,
    JobPage,
    JobView,
    KeyCreated,
    KeyList,
    KeyRequest,
    KeyView,
    OrgOperators,
    OrgOperatorsRequest,
    OrgRequest,
    OrgView,
    QueueList,
    QueueView,
    RedriveRequest,
    RunPage,
    RunView,
    SigningKeyView,
    TaskPage,
    TaskStatus,
    TaskView,
    WorkerList,
    WorkerTokenCreated,
    WorkerTokenList,
    WorkerTokenRequest,
    WorkerTokenView,
    WorkerView,
)
from interlock.wiring import Kernel

Http = Request[Any, Any, State]
Cursor = Annotated[
    str | None, QueryParameter(name="cursor", required=False, description="next_cursor of the last page")
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]


@get("/v1/jobs", guards=[user_guard], opt={"scope": "jobs:read"}, summary="Jobs, newest first")
async def list_jobs(request: Http, cursor: Cursor = None, limit: Limit = 100) -> JobPage:
    return await kernel_of(request).reads.jobs(principal_of(request).org_id, cursor, limit)


@get(
    "/v1/jobs/{job:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read", "warm": True},
    summary="A job and its newest run",
)
async def get_job(request: Http, job: FromPath[str]) -> JobView:
    return await kernel_of(request).status.job(job, principal_of(request).org_id)


@get(
    "/v1/jobs/{job:str}/runs",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Runs of a job, newest first",
)
async def list_runs(request: Http, job: FromPath[str], cursor: Cursor = None, limit: Limit = 100) -> RunPage:
    return await kernel_of(request).reads.runs(job, principal_of(request).org_id, cursor, limit)


@get("/v1/jobs/{job:str}/tasks", guards=[user_guard], opt={"scope": "tasks:read"}, summary="Tasks of a job")
async def list_job_tasks(
    request: Http,
    job: FromPath[str],
    status: FromQuery[TaskStatus | None] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> TaskPage:
    return await kernel_of(request).reads.tasks(
        principal_of(request).org_id, job=job, run=None, status=status, cursor=cursor, limit=limit
    )


@get(
    "/v1/runs/{run_id:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read", "warm": True},
    summary="A run and its counts",
)
async def get_run(request: Http, run_id: FromPath[UUID]) -> RunView:
    return await kernel_of(request).status.run(run_id, principal_of(request).org_id)


@post(
    "/v1/runs/{run_id:str}/cancel",
    guards=[user_guard],
    opt={"scope": "tasks:write"},
    status_code=200,
    summary="Cancel every task of a run that has not ended",
)
async def cancel_run(request: Http, run_id: FromPath[UUID]) -> Changed:
    return await kernel_of(request).actions.cancel_run(run_id, principal_of(request).org_id)


@get("/v1/tasks", guards=[user_guard], opt={"scope": "tasks:read"}, summary="Tasks by job, run and status")
async def list_tasks(
    request: Http,
    job: FromQuery[str | None] = None,
    run: FromQuery[UUID | None] = None,
    status: FromQuery[TaskStatus | None] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> TaskPage:
    return await kernel_of(request).reads.tasks(
        principal_of(request).org_id, job=job, run=run, status=status, cursor=cursor, limit=limit
    )


@get("/v1/tasks/{task_id:str}", guards=[user_guard], opt={"scope": "tasks:read"}, summary="A task")
async def get_task(request: Http, task_id: FromPath[UUID]) -> TaskView:
    return await kernel_of(request).reads.task(task_id, principal_of(request).org_id)


@get(
    "/v1/tasks/{task_id:str}/attempts",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="Its attempts",
)
async def get_attempts(request: Http, task_id: FromPath[UUID]) -> AttemptPage:
    return await kernel_of(request).reads.attempts(task_id, principal_of(request).org_id)


@get(
    "/v1/tasks/{task_id:str}/explain",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="Why it is not running, or why it ended as it did",
)
async def explain_task(request: Http, task_id: FromPath[UUID]) -> Explanation:
    return await kernel_of(request).explanations.explain(task_id, principal_of(request).org_id)


@post(
    "/v1/tasks/{task_id:str}/cancel",
    guards=[user_guard],
    opt={"scope": "tasks:write"},
    status_code=200,
    summary="Cancel a task, whatever its state",
)
async def cancel_task(request: Http, task_id: FromPath[UUID]) -> TaskView:
    return await kernel_of(request).actions.cancel(task_id, principal_of(request).org_id)


@post(
    "/v1/tasks/{task_id:str}/retry",
    guards=[user_guard],
    opt={"scope": "tasks:write"},
    status_code=200,
    summary="Run a failed task again now; a dead letter gets fresh attempts",
)
async def retry_task(request: Http, task_id: FromPath[UUID]) -> TaskView:
    return await kernel_of(request).actions.retry(task_id, principal_of(request).org_id)


@post(
    "/v1/tasks/cancel",
    guards=[user_guard],
    opt={"scope": "tasks:write"},
    status_code=200,
    summary="Cancel by filter; dry_run counts",
)
async def cancel_tasks(request: Http, data: JSONBody[CancelRequest]) -> Changed:
    return await kernel_of(request).actions.cancel_matching(data, principal_of(request).org_id)


@post(
    "/v1/tasks/redrive",
    guards=[user_guard],
    opt={"scope": "tasks:write"},
    status_code=200,
    summary="Give dead letters fresh attempts, by filter; dry_run counts",
)
async def redrive_tasks(request: Http, data: JSONBody[RedriveRequest]) -> Changed:
    return await kernel_of(request).actions.redrive(data, principal_of(request).org_id)


@get("/v1/queues", guards=[user_guard], opt={"scope": "queues:read"}, summary="Depth and age of every queue")
async def list_queues(request: Http) -> QueueList:
    kernel = kernel_of(request)
    return QueueList(queues=[await queue_view(kernel, name) for name in kernel.settings.queues])


async def queue_view(kernel: Kernel, name: str) -> QueueView:
    queue = kernel.queue
    return QueueView(
        queue=name,
        depth=await queue.depth(name),
        in_flight=await queue.in_flight(name),
        oldest_age_seconds=await queue.oldest_age(name),
        dead_letters=await queue.dead_letter_count(name),
    )


@get(
    "/v1/queues/{queue:str}/dead-letters",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    summary="Messages received too often without being settled",
)
async def list_dead_letters(request: Http, queue: FromPath[str], limit: Limit = 100) -> DeadMessagePage:
    found = await kernel_of(request).queue.dead_letters(_known(request, queue), limit)
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
    summary="Deliver dead messages again",
)
async def redrive_queue(request: Http, queue: FromPath[str], limit: Limit = MAX_PAGE) -> Changed:
    return Changed(matched=await kernel_of(request).queue.redrive(_known(request, queue), limit))


def _known(request: Http, queue: str) -> str:
    names = kernel_of(request).settings.queues
    if queue not in names:
        raise NotFound(f"There is no queue {queue!r}; there are: {', '.join(names)}.")
    return queue


@get(
    "/v1/workers",
    guards=[user_guard],
    opt={"scope": "queues:read"},
    summary="Workers seen in the last minute",
)
async def list_workers(request: Http) -> WorkerList:
    rows = await kernel_of(request).presence.workers()
    return WorkerList(
        workers=[WorkerView(worker_id=r["worker_id"], queue=r["queue"], last_seen_at=r["last_seen_at"]) for r in rows]
    )


@get("/v1/keys", guards=[user_guard], opt={"scope": "admin"}, summary="API keys of the org")
async def list_keys(request: Http) -> KeyList:
    return KeyList(keys=await kernel_of(request).principals.keys(principal_of(request).org_id))


@post("/v1/keys", guards=[user_guard], opt={"scope": "admin"}, summary="Make an API key; it is shown once")
async def create_key(request: Http, data: JSONBody[KeyRequest]) -> KeyCreated:
    caller, principals = principal_of(request), kernel_of(request).principals
    org_id = caller.org_id
    if data.org is not None and data.org != caller.org:
        caller.require(PLATFORM)
        org_id = (await principals.org(data.org)).org_id
    return await principals.create_key(data, org_id, granted_by=caller)


@delete(
    "/v1/keys/{key_id:str}",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Revoke a key",
)
async def revoke_key(request: Http, key_id: FromPath[str]) -> KeyView:
    return await kernel_of(request).principals.revoke_key(key_id, principal_of(request).org_id)


@get("/v1/worker-tokens", guards=[user_guard], opt={"scope": PLATFORM}, summary="Worker tokens")
async def list_worker_tokens(request: Http) -> WorkerTokenList:
    return WorkerTokenList(tokens=await kernel_of(request).principals.worker_tokens())


@post(
    "/v1/worker-tokens",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    summary="Make a worker token; shown once",
)
async def create_worker_token(request: Http, data: JSONBody[WorkerTokenRequest]) -> WorkerTokenCreated:
    known = kernel_of(request).settings.runtime_names
    for runtime in data.runtimes or []:
        if runtime not in known:
            raise BadRequest(
                f"There is no runtime {runtime!r}; choose from: {', '.join(known)}.", code="unknown_runtime"
            )
    return await kernel_of(request).principals.create_worker_token(data)


@delete(
    "/v1/worker-tokens/{token_id:str}",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    status_code=200,
    summary="Revoke a worker token; workers notice within seconds",
)
async def revoke_worker_token(request: Http, token_id: FromPath[str]) -> WorkerTokenView:
    return await kernel_of(request).principals.revoke_worker_token(token_id)


@post("/v1/orgs", guards=[user_guard], opt={"scope": PLATFORM}, summary="Make an org")
async def create_org(request: Http, data: JSONBody[OrgRequest]) -> OrgView:
    return await kernel_of(request).principals.create_org(data.name)


@get(
    "/v1/orgs/{org:str}/operators",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    summary="Operators that an org may use; null for any",
)
async def get_org_operators(request: Http, org: FromPath[str]) -> OrgOperators:
    return await kernel_of(request).operators.limit_of(org)


@post(
    "/v1/orgs/{org:str}/operators",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    status_code=200,
    summary="Limit an org to some operators, or with null to none",
    description="What is beyond the limit is refused when a job is submitted or deployed, and fails at its next claim.",
)
async def limit_org_operators(request: Http, org: FromPath[str], data: JSONBody[OrgOperatorsRequest]) -> OrgOperators:
    return await kernel_of(request).operators.limit(org, data.operators)


@get("/v1/signing-keys", guards=[user_guard], opt={"scope": PLATFORM}, summary="Keys behind capability tokens")
async def list_signing_keys(request: Http) -> list[SigningKeyView]:
    return await kernel_of(request).keyring.keys()


@post(
    "/v1/signing-keys/rotate",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    summary="Sign with a new key from now on",
)
async def rotate_signing_key(request: Http) -> SigningKeyView:
    try:
        return await kernel_of(request).keyring.rotate()
    except ConfigurationError as error:
        raise Conflict(error.detail, code="unfit_signing_key") from error


DEGRADED = {503: ResponseSpec(Health, description="The database is away", generate_examples=False)}


@get("/healthz", summary="Whether this process can work", responses=DEGRADED)
async def health(request: Http) -> Response[Health]:
    return await health_response(kernel_of(request))


async def health_response(kernel: Kernel) -> Response[Health]:
    checks = {"database": "ok", "valkey": "ok"}
    try:
        async with kernel.database.connection() as connection:
            await connection.fetchval("select 1", timeout=2)
    except Exception as error:
        checks["database"] = type(error).__name__
    if kernel.coordination is None:
        checks["valkey"] = "not configured"
    elif not await kernel.coordination.answers():
        checks["valkey"] = "away"
    good = checks["database"] == "ok"
    whole = good and checks["valkey"] != "away"
    return Response(Health(status="ok" if whole else "degraded", checks=checks), status_code=200 if good else 503)


@get(
    "/metrics",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    media_type=MediaType.TEXT,
    summary="Prometheus metrics of this process",
)
async def metrics() -> bytes:
    return metrics_text()


HANDLERS = [
    *bulk.HANDLERS,
    list_jobs,
    get_job,
    list_runs,
    list_job_tasks,
    get_run,
    cancel_run,
    list_tasks,
    get_task,
    get_attempts,
    explain_task,
    cancel_task,
    retry_task,
    cancel_tasks,
    redrive_tasks,
    list_queues,
    list_dead_letters,
    redrive_queue,
    list_workers,
    list_keys,
    create_key,
    revoke_key,
    list_worker_tokens,
    create_worker_token,
    revoke_worker_token,
    create_org,
    get_org_operators,
    limit_org_operators,
    list_signing_keys,
    rotate_signing_key,
    *members.HANDLERS,
    *dags.HANDLERS,
    *backfills.HANDLERS,
    *bundles.HANDLERS,
    health,
    metrics,
    *datasets.HANDLERS,
    *sources.HANDLERS,
    *buffers.HANDLERS,
    *queries.HANDLERS,
    *objects.HANDLERS,
    *webhooks.HANDLERS,
    *secrets.HANDLERS,
    *commands.HANDLERS,
    *results.HANDLERS,
    *bus_inbox.HANDLERS,
    *bus_alerts.HANDLERS,
    *bus_health.HANDLERS,
    *bus_registry.HANDLERS,
    *run_control.HANDLERS,
    *bus_replays.HANDLERS,
]


def gateway(kernel: Kernel) -> Litestar:
    key = SecurityScheme(
        type="http", scheme="bearer", description="An API key, `ilk_…`, or a token of the identity provider."
    )
    token = SecurityScheme(
        type="http", scheme="bearer", description="An object token; a signed URL needs none: it has its proof in it."
    )
    return application(
        kernel,
        "gateway",
        HANDLERS,
        title="Interlock gateway",
        components=Components(security_schemes={"apiKey": key, "objectToken": token}),
        express=commands.EXPRESS,
    )
