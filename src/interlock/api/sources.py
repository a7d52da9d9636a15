"""Sources of DAGs: how they stand, events by hand, and the calls of webhooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from litestar import Request, get, post
from litestar.datastructures import State
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema
from litestar.params import FromPath, HeaderParameter, JSONBody, RawBody

from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.dags.hooks import Call
from interlock.errors import Unauthenticated
from interlock.wire import (
    HookAccepted,
    HookSecret,
    SecretRequest,
    SourceEvents,
    SourceEventsAccepted,
    SourceList,
)

Http = Request[Any, Any, State]
IdempotencyKey = Annotated[
    str | None, HeaderParameter(name="Idempotency-Key", required=False, min_length=1, max_length=255)
]


@get(
    "/v1/dags/{dag:str}/sources",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Sources of a DAG: what they do, and how far they have come",
)
async def list_sources(request: Http, dag: FromPath[str]) -> SourceList:
    return await kernel_of(request).sources.of_dag(dag, principal_of(request).org_id)


@post(
    "/v1/dags/{dag:str}/jobs/{job:str}/events",
    guards=[user_guard],
    opt={"scope": "jobs:write"},
    status_code=200,
    summary="Send events to a manual source: scopes that have changed, or payloads for tasks",
    description="All are taken or none. The same Idempotency-Key and body give the same answer.",
)
async def send_events(
    request: Http,
    dag: FromPath[str],
    job: FromPath[str],
    data: JSONBody[SourceEvents],
    body: RawBody,
    idempotency_key: IdempotencyKey = None,
) -> SourceEventsAccepted:
    return await kernel_of(request).manual_events.take(
        dag, job, principal_of(request).org_id, data, idempotency_key=idempotency_key, body=body
    )


@post(
    "/v1/dags/{dag:str}/jobs/{job:str}/secret",
    guards=[user_guard],
    opt={"scope": "admin"},
    summary="Make the secret of a webhook; it is shown once",
)
async def make_secret(
    request: Http, dag: FromPath[str], job: FromPath[str], data: JSONBody[SecretRequest]
) -> HookSecret:
    hooks = kernel_of(request).hooks
    return await hooks.make_secret(dag, job, principal_of(request).org_id, rotate=data.rotate)


@dataclass
class _Called(Operation):
    """A body that is believed before it is read: so it is no parameter, and described here."""

    def __post_init__(self) -> None:
        anything = OpenAPIMediaType(schema=Schema(description="The payload of the task: any JSON."))
        self.request_body = RequestBody(content={"application/json": anything}, required=True)


@post(
    "/v1/hooks/{hook_id:str}",
    status_code=200,
    operation_class=_Called,
    summary="Call a webhook: its body becomes the payload of a task",
    description="No API key: the call proves itself by X-Interlock-Signature or X-Interlock-Token, as the source says. "
    "The same Idempotency-Key, or else X-Request-Id, is the same call.",
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
            raise Unauthenticated(f"The request has several {header} headers; send one.")
    key = idempotency_key or request.headers.get("x-request-id")
    return await kernel_of(request).hooks.receive(Call(hook_id, body, signature, token, key))


HANDLERS = [list_sources, send_events, make_secret, call_hook]
