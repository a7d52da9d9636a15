"""Webhooks over HTTP: who is told of runs, and what became of each call."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from litestar import Request, delete, get, post
from litestar.datastructures import State
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter, RawBody

from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.kernel.idempotency import Repeat
from interlock.kernel.reads import MAX_PAGE
from interlock.kernel.webhooks import Caller
from interlock.wire import (
    Changed,
    DeliveryPage,
    DeliveryRedrive,
    DeliveryStatus,
    DeliveryView,
    RotateRequest,
    WebhookPage,
    WebhookRequest,
    WebhookSecret,
    WebhookView,
)

Http = Request[Any, Any, State]
Cursor = Annotated[
    str | None,
    QueryParameter(name="cursor", required=False, max_length=200, description="next_cursor of the last page"),
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]
IdempotencyKey = Annotated[
    str | None, HeaderParameter(name="Idempotency-Key", required=False, min_length=1, max_length=255)
]


def _caller(request: Http) -> Caller:
    principal = principal_of(request)
    return Caller(principal.org_id, principal.org, principal.user, sees_urls="admin" in principal.scopes)


@post(
    "/v1/webhooks",
    guards=[user_guard],
    opt={"scope": "admin"},
    summary="Make a webhook; its secret is shown once",
    description="It is called when a run ends, and when a run passes a share of failed or of ended tasks. The same "
    "Idempotency-Key and body give the same answer.",
)
async def create_webhook(
    request: Http, data: JSONBody[WebhookRequest], body: RawBody, idempotency_key: IdempotencyKey = None
) -> WebhookSecret:
    return await kernel_of(request).webhooks.create(data, _caller(request), Repeat(idempotency_key, body))


@get("/v1/webhooks", guards=[user_guard], opt={"scope": "jobs:read"}, summary="Webhooks, by name")
async def list_webhooks(request: Http, cursor: Cursor = None, limit: Limit = 100) -> WebhookPage:
    return await kernel_of(request).webhooks.page(_caller(request), cursor, limit)


@get("/v1/webhooks/{webhook:str}", guards=[user_guard], opt={"scope": "jobs:read"}, summary="A webhook")
async def get_webhook(request: Http, webhook: FromPath[str]) -> WebhookView:
    return await kernel_of(request).webhooks.webhook(webhook, _caller(request))


@delete(
    "/v1/webhooks/{webhook:str}",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Remove a webhook, with what it was still to be told",
)
async def delete_webhook(request: Http, webhook: FromPath[str]) -> WebhookView:
    return await kernel_of(request).webhooks.delete(webhook, _caller(request))


@post(
    "/v1/webhooks/{webhook:str}/pause",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Call it no more; what it is to be told waits",
)
async def pause_webhook(request: Http, webhook: FromPath[str]) -> WebhookView:
    return await kernel_of(request).webhooks.set_paused(webhook, _caller(request), paused=True)


@post(
    "/v1/webhooks/{webhook:str}/resume",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Call it again, at once",
)
async def resume_webhook(request: Http, webhook: FromPath[str]) -> WebhookView:
    return await kernel_of(request).webhooks.set_paused(webhook, _caller(request), paused=False)


@post(
    "/v1/webhooks/{webhook:str}/rotate",
    guards=[user_guard],
    opt={"scope": "admin"},
    summary="Make a new secret, shown once; calls are signed with both for a while",
)
async def rotate_webhook(
    request: Http,
    webhook: FromPath[str],
    data: JSONBody[RotateRequest],
    body: RawBody,
    idempotency_key: IdempotencyKey = None,
) -> WebhookSecret:
    return await kernel_of(request).webhooks.rotate(webhook, data, _caller(request), Repeat(idempotency_key, body))


@post(
    "/v1/webhooks/{webhook:str}/test",
    guards=[user_guard],
    opt={"scope": "admin"},
    summary="Have `webhook.test` sent to it",
)
async def try_webhook(request: Http, webhook: FromPath[str], idempotency_key: IdempotencyKey = None) -> DeliveryView:
    return await kernel_of(request).webhooks.test(webhook, _caller(request), Repeat(idempotency_key))


@get(
    "/v1/webhooks/{webhook:str}/deliveries",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="What it was told, and is still to be told, newest first",
)
async def list_deliveries(
    request: Http,
    webhook: FromPath[str],
    status: FromQuery[DeliveryStatus | None] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> DeliveryPage:
    return await kernel_of(request).webhooks.deliveries(webhook, _caller(request), status, cursor, limit)


@get(
    "/v1/webhooks/{webhook:str}/deliveries/{delivery_id:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="A delivery, and what became of it",
)
async def get_delivery(request: Http, webhook: FromPath[str], delivery_id: FromPath[UUID]) -> DeliveryView:
    return await kernel_of(request).webhooks.delivery(webhook, delivery_id, _caller(request))


@post(
    "/v1/webhooks/{webhook:str}/redrive",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Try dead deliveries again: those named, or the oldest",
)
async def redrive_deliveries(request: Http, webhook: FromPath[str], data: JSONBody[DeliveryRedrive]) -> Changed:
    return await kernel_of(request).webhooks.redrive(webhook, data, _caller(request))


HANDLERS = [
    create_webhook,
    list_webhooks,
    get_webhook,
    delete_webhook,
    pause_webhook,
    resume_webhook,
    rotate_webhook,
    try_webhook,
    list_deliveries,
    get_delivery,
    redrive_deliveries,
]
