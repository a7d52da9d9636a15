"""Endpoints of the gateway for DAGs: deployment, sources, backfills, backpressure, invalidation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from litestar import delete, get, post
from litestar.openapi.spec import (
    OpenAPIMediaType,
    Operation,
    Reference,
    RequestBody,
    Schema,
)
from litestar.params import FromPath, HeaderParameter, JSONBody, QueryParameter, RawBody

from interlock.access.guards import principal_of, user_guard
from interlock.dags.build import dags_of
from interlock.dags.deployment import FILE
from interlock.dags.webhook_sources import Call
from interlock.errors import Unauthenticated, UnsupportedMediaType
from interlock.http.middleware import peer_of_scope
from interlock.http.problems import WITH_A_BODY
from interlock.http.ranges import bound_of, check_form
from interlock.http.requests import Cursor, Http, Limit, decode
from interlock.tasks.build import tasks_of
from interlock.tasks.idempotency import Repeat
from interlock.wire.dags import (
    BackfillAnswer,
    BackfillPage,
    BackfillRequest,
    BackfillView,
    DagDeleted,
    DagDeployed,
    DagDocument,
    DagPage,
    DagPauseRequest,
    DagRequest,
    DagVersionPage,
    DagVersionView,
    DagView,
    FailingJobs,
    HookAccepted,
    HookSecret,
    PausePage,
    PurgeRequest,
    RollbackRequest,
    SecretRequest,
    SourceEvents,
    SourceEventsAccepted,
    SourceList,
)
from interlock.wire.datasets import Invalidated, InvalidateRequest, ScopeExplanation

_YAML: Final = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml", "text/plain")
_JSON: Final = "application/json"


@dataclass
class _TakesAFile(Operation):
    """Documents the request body: a file in one of two media types, which Litestar cannot describe."""

    def __post_init__(self) -> None:
        text = OpenAPIMediaType(schema=Schema(type="string"))  # type: ignore[arg-type]  # its own enum, by value
        form = OpenAPIMediaType(schema=Reference(ref="#/components/schemas/DagRequest"))
        self.request_body = RequestBody(
            required=True, content={_JSON: form, "application/yaml": text, "text/plain": text}
        )


def _file(request: Http, body: bytes) -> bytes:
    """Returns the YAML text: the body itself, or the field `yaml` of a JSON body."""
    types = request.headers.getall("content-type", [])
    essences = {value.partition(";")[0].strip().lower() for value in types}
    if essences == {_JSON}:
        form: DagRequest = decode(body, DagRequest)
        return form.yaml.encode("utf-8", "surrogatepass")
    if not essences <= set(_YAML):
        raise UnsupportedMediaType("Send a DAG as `application/yaml`, or as `application/json` with a field `yaml`.")
    return body


@post(
    "/v1/dags",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Deploy a DAG, or return the plan with dry_run",
    description="Deploying the same content again changes nothing. Changed parts are built next to the current "
    "version, which they replace once they are complete.",
    operation_class=_TakesAFile,
    responses=WITH_A_BODY,
)
async def deploy_dag(
    request: Http,
    body: RawBody,
    dry_run: Annotated[bool, QueryParameter(name="dry_run", description="change nothing, return the plan")] = False,
    operator: Annotated[
        list[str] | None,
        QueryParameter(name="operator", required=False, description="name of an operator that your workers register"),
    ] = None,
    force: Annotated[
        bool, QueryParameter(name="force", description="deploy although no live worker has one of the operators")
    ] = False,
    file: Annotated[
        str | None,
        QueryParameter(name="file", required=False, max_length=1_000, description="name of the file in its problems"),
    ] = None,
) -> DagDeployed:
    principal, deployments = principal_of(request), dags_of(request).deployments
    dag = await deployments.read(_file(request, body), principal.org_id, operator or [], file or FILE)
    return await deployments.deploy(dag, principal.org_id, principal.user, dry_run=dry_run, force=force)


@get("/v1/dags", guards=[user_guard], opt={"scope": "jobs:read"}, summary="DAGs, by name")
async def list_dags(request: Http, cursor: Cursor = None, limit: Limit = 100) -> DagPage:
    return await dags_of(request).reads.dags(principal_of(request).org_id, cursor, limit)


@get(
    "/v1/failing-jobs",
    guards=[user_guard],
    opt={"scope": "tasks:read"},
    summary="Jobs of DAGs with tasks that are failed now",
    description="An error is over, and not listed, once its task is queued again, or its scope has another task.",
)
async def list_failing_jobs(
    request: Http,
    dag: Annotated[str | None, QueryParameter(name="dag", required=False, description="only this DAG")] = None,
    limit: Limit = 100,
) -> FailingJobs:
    return await dags_of(request).reads.failures(principal_of(request).org_id, dag, limit)


@get(
    "/v1/dags/{dag:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="A DAG: its jobs, and the progress of a version that is being built",
)
async def get_dag(request: Http, dag: FromPath[str]) -> DagView:
    return await dags_of(request).reads.dag(dag, principal_of(request).org_id)


@get(
    "/v1/dags/{dag:str}/versions",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Versions of a DAG, newest first",
)
async def list_dag_versions(
    request: Http, dag: FromPath[str], cursor: Cursor = None, limit: Limit = 100
) -> DagVersionPage:
    return await dags_of(request).reads.versions(dag, principal_of(request).org_id, cursor, limit)


@get(
    "/v1/dags/{dag:str}/document",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="The current version of a DAG in canonical form",
)
async def get_dag_document(request: Http, dag: FromPath[str]) -> DagDocument:
    return await dags_of(request).reads.document(dag, principal_of(request).org_id)


@post(
    "/v1/dags/{dag:str}/rollback",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Roll back to a version that was current before",
)
async def rollback_dag(request: Http, dag: FromPath[str], data: JSONBody[RollbackRequest]) -> DagVersionView:
    return await dags_of(request).deployments.rollback(dag, principal_of(request).org_id, data.to)


@post(
    "/v1/dags/{dag:str}/cutover",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Make the version that is being built the current one immediately, complete or not",
)
async def cut_over_dag(request: Http, dag: FromPath[str]) -> DagVersionView:
    return await dags_of(request).deployments.cut_over(dag, principal_of(request).org_id)


@post(
    "/v1/dags/{dag:str}/purge",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Delete the data that only this retired version uses",
)
async def purge_dag(request: Http, dag: FromPath[str], data: JSONBody[PurgeRequest]) -> DagVersionView:
    return await dags_of(request).deployments.purge(dag, principal_of(request).org_id, data.version)


@post(
    "/v1/dags/{dag:str}/pause",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Pause a DAG with its sources: it gets no more tasks",
    description="Running tasks end as usual. Events and dataset changes are recorded, and are processed after the "
    "resume. A version that is being built is paused as well.",
)
async def pause_dag(request: Http, dag: FromPath[str], data: JSONBody[DagPauseRequest]) -> DagView:
    caller = principal_of(request)
    return await dags_of(request).control.pause(dag, caller.org_id, caller.user, data.reason)


@post(
    "/v1/dags/{dag:str}/resume",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Resume a paused DAG",
)
async def resume_dag(request: Http, dag: FromPath[str]) -> DagView:
    caller = principal_of(request)
    return await dags_of(request).control.resume(dag, caller.org_id, caller.user)


@delete(
    "/v1/dags/{dag:str}",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Delete a DAG; purge also deletes its data, and dry_run only shows the effect",
    description="Its tasks are canceled in the background. Without `purge`, its data and its published names stay "
    "readable, and a deploy under the same name restores it.",
)
async def delete_dag(
    request: Http,
    dag: FromPath[str],
    purge: Annotated[bool, QueryParameter(name="purge", description="also delete the data of all versions")] = False,
    dry_run: Annotated[bool, QueryParameter(name="dry_run", description="change nothing, return the effect")] = False,
) -> DagDeleted:
    caller = principal_of(request)
    return await dags_of(request).control.delete(dag, caller.org_id, caller.user, purge=purge, dry_run=dry_run)


IdempotencyKey = Annotated[
    str | None, HeaderParameter(name="Idempotency-Key", required=False, min_length=1, max_length=255)
]


@get(
    "/v1/dags/{dag:str}/sources",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Sources of a DAG: type, status and progress",
)
async def list_sources(request: Http, dag: FromPath[str]) -> SourceList:
    return await dags_of(request).sources.of_dag(dag, principal_of(request).org_id)


@post(
    "/v1/dags/{dag:str}/jobs/{job:str}/events",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Send events to a manual source: changed scopes, or payloads for tasks",
    description="Accepts all events or none. A repeated Idempotency-Key with the same body returns the same response.",
)
async def send_events(
    request: Http,
    dag: FromPath[str],
    job: FromPath[str],
    data: JSONBody[SourceEvents],
    body: RawBody,
    idempotency_key: IdempotencyKey = None,
) -> SourceEventsAccepted:
    org_id = principal_of(request).org_id
    return await dags_of(request).manual_events.take(dag, job, org_id, data, Repeat(idempotency_key, body))


@post(
    "/v1/dags/{dag:str}/jobs/{job:str}/secret",
    guards=[user_guard],
    opt={"scope": "admin"},
    summary="Create the secret of a webhook source; it is shown once",
)
async def make_secret(
    request: Http, dag: FromPath[str], job: FromPath[str], data: JSONBody[SecretRequest]
) -> HookSecret:
    hooks = dags_of(request).hooks
    return await hooks.make_secret(dag, job, principal_of(request).org_id, rotate=data.rotate)


@dataclass
class _Called(Operation):
    """Documents the request body.

    Its signature is verified on the raw bytes, so it is not a parameter of the handler.
    """

    def __post_init__(self) -> None:
        anything = OpenAPIMediaType(schema=Schema(description="The payload of the task: any JSON."))
        self.request_body = RequestBody(content={"application/json": anything}, required=True)


@post(
    "/v1/hooks/{hook_id:str}",
    status_code=200,
    operation_class=_Called,
    summary="Call a webhook source: the body becomes the payload of a task",
    description="Needs no API key: the call is authenticated by X-Interlock-Signature or X-Interlock-Token, as the "
    "source configures. Calls with the same Idempotency-Key, or otherwise X-Request-Id, are deduplicated.",
)
async def call_hook(
    request: Http,
    hook_id: FromPath[str],
    body: RawBody,
    signature: Annotated[str | None, HeaderParameter(name="X-Interlock-Signature", required=False)] = None,
    token: Annotated[str | None, HeaderParameter(name="X-Interlock-Token", required=False)] = None,
    idempotency_key: IdempotencyKey = None,
) -> HookAccepted:
    for header in ("x-interlock-signature", "x-interlock-token"):
        if len(request.headers.getall(header, [])) > 1:
            raise Unauthenticated(f"The request has several {header} headers; send only one.")
    key = idempotency_key or request.headers.get("x-request-id")
    call = Call(hook_id, body, signature, token, key, peer_of_scope(request.scope))
    return await dags_of(request).hooks.receive(call)


@get(
    "/v1/pauses",
    guards=[user_guard],
    opt={"scope": "queues:read"},
    summary="Jobs paused by backpressure: reason, start time and path",
)
async def list_pauses(request: Http, cursor: Cursor = None, limit: Limit = 100) -> PausePage:
    return await dags_of(request).pauses.page(principal_of(request).org_id, cursor, limit)


@post(
    "/v1/dags/{dag:str}/jobs/{job:str}/backfills",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Recompute the scopes of a job in a range; dry_run counts them",
)
async def start_backfill(
    request: Http, dag: FromPath[str], job: FromPath[str], data: JSONBody[BackfillRequest]
) -> BackfillAnswer:
    caller = principal_of(request)
    return await dags_of(request).backfills.start(dag, job, data, caller.org_id, caller.user)


@get("/v1/backfills", guards=[user_guard], opt={"scope": "jobs:read"}, summary="Backfills, newest first")
async def list_backfills(request: Http, cursor: Cursor = None, limit: Limit = 100) -> BackfillPage:
    return await dags_of(request).backfills.page(principal_of(request).org_id, cursor, limit)


@get("/v1/backfills/{run_id:str}", guards=[user_guard], opt={"scope": "jobs:read"}, summary="A backfill")
async def get_backfill(request: Http, run_id: FromPath[str]) -> BackfillView:
    org_id = principal_of(request).org_id
    return await dags_of(request).backfills.one(await tasks_of(request).reads.run_id(run_id, org_id), org_id)


@post(
    "/v1/backfills/{run_id:str}/pause",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Pause a backfill: release no more of its tasks",
)
async def pause_backfill(request: Http, run_id: FromPath[str]) -> BackfillView:
    org_id = principal_of(request).org_id
    return await dags_of(request).backfills.pause(await tasks_of(request).reads.run_id(run_id, org_id), org_id)


@post(
    "/v1/backfills/{run_id:str}/resume",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Resume a backfill",
)
async def resume_backfill(request: Http, run_id: FromPath[str]) -> BackfillView:
    org_id = principal_of(request).org_id
    return await dags_of(request).backfills.resume(await tasks_of(request).reads.run_id(run_id, org_id), org_id)


@post(
    "/v1/backfills/{run_id:str}/cancel",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Cancel a backfill and its tasks that have not ended",
)
async def cancel_backfill(request: Http, run_id: FromPath[str]) -> BackfillView:
    org_id = principal_of(request).org_id
    return await dags_of(request).backfills.cancel(await tasks_of(request).reads.run_id(run_id, org_id), org_id)


Start = Annotated[
    str, QueryParameter(name="start", min_length=1, max_length=60, description="first position or date, inclusive")
]
End = Annotated[
    str | None,
    QueryParameter(
        name="end", required=False, min_length=1, max_length=60, description="last position or date, inclusive"
    ),
]


@post(
    "/v1/datasets/{dataset:str}/invalidate",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Recompute a range and everything derived from it; dry_run counts",
)
async def invalidate(request: Http, dataset: FromPath[str], data: JSONBody[InvalidateRequest]) -> Invalidated:
    return await dags_of(request).invalidations.invalidate(dataset, data, principal_of(request))


@get(
    "/v1/dags/{dag:str}/jobs/{job:str}/explain",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Explain why a job has processed a scope, or has not",
)
async def explain_scope(
    request: Http, dag: FromPath[str], job: FromPath[str], start: Start, end: End = None
) -> ScopeExplanation:
    first, last = bound_of(start), None if end is None else bound_of(end)
    check_form(first, last)
    org_id = principal_of(request).org_id
    return await dags_of(request).scope_explanations.explain(dag, job, org_id, first, last)


HANDLERS = [
    deploy_dag,
    list_dags,
    list_failing_jobs,
    get_dag,
    list_dag_versions,
    get_dag_document,
    rollback_dag,
    cut_over_dag,
    purge_dag,
    pause_dag,
    resume_dag,
    delete_dag,
    list_sources,
    send_events,
    make_secret,
    call_hook,
    list_pauses,
    start_backfill,
    list_backfills,
    get_backfill,
    pause_backfill,
    resume_backfill,
    cancel_backfill,
    invalidate,
    explain_scope,
]
