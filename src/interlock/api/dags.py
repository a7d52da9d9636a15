"""DAGs over HTTP: deploy, plan, roll back, cut over, purge, and see what is deployed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

from litestar import Request, get, post
from litestar.datastructures import State
from litestar.openapi.spec import OpenAPIMediaType, Operation, Reference, RequestBody, Schema
from litestar.params import FromPath, JSONBody, QueryParameter, RawBody

from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.api.decoding import decode
from interlock.api.problems import WITH_A_BODY
from interlock.errors import UnsupportedMediaType
from interlock.kernel.reads import MAX_PAGE
from interlock.wire import (
    DagDeployed,
    DagDocument,
    DagPage,
    DagRequest,
    DagVersionPage,
    DagVersionView,
    DagView,
    PurgeRequest,
    RollbackRequest,
)

Http = Request[Any, Any, State]
Cursor = Annotated[
    str | None,
    QueryParameter(name="cursor", required=False, max_length=200, description="next_cursor of the last page"),
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]

_YAML: Final = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml", "text/plain")
_JSON: Final = "application/json"


@dataclass
class _TakesAFile(Operation):
    """The body as it is read here: Litestar has no words for a file in either of two forms."""

    def __post_init__(self) -> None:
        text = OpenAPIMediaType(schema=Schema(type="string"))  # type: ignore[arg-type]  # its own enum, by value
        form = OpenAPIMediaType(schema=Reference(ref="#/components/schemas/DagRequest"))
        self.request_body = RequestBody(
            required=True, content={_JSON: form, "application/yaml": text, "text/plain": text}
        )


def _file(request: Http, body: bytes) -> bytes:
    """YAML, unless it says that it is JSON around YAML."""
    types = request.headers.getall("content-type", [])
    essences = {value.partition(";")[0].strip().lower() for value in types}
    if essences == {_JSON}:
        form: DagRequest = decode(body, DagRequest)
        return form.yaml.encode("utf-8", "surrogatepass")
    if not essences <= set(_YAML):
        raise UnsupportedMediaType("A DAG is sent as `application/yaml`, or as `application/json` with a field `yaml`.")
    return body


@post(
    "/v1/dags",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Deploy a DAG, or with dry_run tell what that would do",
    description="The same content again changes nothing. What changes is built beside what is current, and takes its "
    "place when it is complete.",
    operation_class=_TakesAFile,
    responses=WITH_A_BODY,
)
async def deploy_dag(
    request: Http,
    body: RawBody,
    dry_run: Annotated[bool, QueryParameter(name="dry_run", description="change nothing, tell the plan")] = False,
    operator: Annotated[
        list[str] | None,
        QueryParameter(name="operator", required=False, description="a name that your workers register an operator by"),
    ] = None,
) -> DagDeployed:
    principal, deployments = principal_of(request), kernel_of(request).deployments
    dag = await deployments.read(_file(request, body), principal.org_id, operator or [])
    return await deployments.deploy(dag, principal.org_id, principal.user, dry_run=dry_run)


@get("/v1/dags", guards=[user_guard], opt={"scope": "jobs:read"}, summary="DAGs, by name")
async def list_dags(request: Http, cursor: Cursor = None, limit: Limit = 100) -> DagPage:
    return await kernel_of(request).dags.dags(principal_of(request).org_id, cursor, limit)


@get(
    "/v1/dags/{dag:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="A DAG: its jobs, and how far a version is that is being built",
)
async def get_dag(request: Http, dag: FromPath[str]) -> DagView:
    return await kernel_of(request).dags.dag(dag, principal_of(request).org_id)


@get(
    "/v1/dags/{dag:str}/versions",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Versions of a DAG, newest first",
)
async def list_dag_versions(
    request: Http, dag: FromPath[str], cursor: Cursor = None, limit: Limit = 100
) -> DagVersionPage:
    return await kernel_of(request).dags.versions(dag, principal_of(request).org_id, cursor, limit)


@get(
    "/v1/dags/{dag:str}/document",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="The current version of a DAG in canonical form",
)
async def get_dag_document(request: Http, dag: FromPath[str]) -> DagDocument:
    return await kernel_of(request).dags.document(dag, principal_of(request).org_id)


@post(
    "/v1/dags/{dag:str}/rollback",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Go back to a version that was current before",
)
async def rollback_dag(request: Http, dag: FromPath[str], data: JSONBody[RollbackRequest]) -> DagVersionView:
    return await kernel_of(request).deployments.rollback(dag, principal_of(request).org_id, data.to)


@post(
    "/v1/dags/{dag:str}/cutover",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Make the version that is being built the current one now, complete or not",
)
async def cut_over_dag(request: Http, dag: FromPath[str]) -> DagVersionView:
    return await kernel_of(request).deployments.cut_over(dag, principal_of(request).org_id)


@post(
    "/v1/dags/{dag:str}/purge",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Drop what only this retired version has",
)
async def purge_dag(request: Http, dag: FromPath[str], data: JSONBody[PurgeRequest]) -> DagVersionView:
    return await kernel_of(request).deployments.purge(dag, principal_of(request).org_id, data.version)


HANDLERS = [
    deploy_dag,
    list_dags,
    get_dag,
    list_dag_versions,
    get_dag_document,
    rollback_dag,
    cut_over_dag,
    purge_dag,
]
