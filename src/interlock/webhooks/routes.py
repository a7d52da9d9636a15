"""Endpoints of the gateway for webhooks: registration and delivery history."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from litestar import delete, get, post
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, RawBody

from interlock.access.guards import principal_of, user_guard
from interlock.http.requests import Cursor, Http, Limit
from interlock.tasks.idempotency import Repeat
from interlock.webhooks.build import webhooks_of
from interlock.webhooks.registry import Caller
from interlock.wire.tasks import Changed
from interlock.wire.webhooks import (
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
    summary="Create a webhook; its secret is shown once",
    description="It is called when a run ends, and when the share of failed or ended tasks of a run passes a "
    "threshold. A repeated Idempotency-Key with the same body returns the same response.",
)
async def create_webhook(
    request: Http, data: JSONBody[WebhookRequest], body: RawBody, idempotency_key: IdempotencyKey = None
) -> WebhookSecret:
    return await webhooks_of(request).registry.create(data, _caller(request), Repeat(idempotency_key, body))


@get("/v1/webhooks", guards=[user_guard], opt={"scope": "jobs:read"}, summary="Webhooks, by name")
async def list_webhooks(request: Http, cursor: Cursor = None, limit: Limit = 100) -> WebhookPage:
    return await webhooks_of(request).registry.page(_caller(request), cursor, limit)


@get("/v1/webhooks/{webhook:str}", guards=[user_guard], opt={"scope": "jobs:read"}, summary="A webhook")
async def get_webhook(request: Http, webhook: FromPath[str]) -> WebhookView:
    return await webhooks_of(request).registry.webhook(webhook, _caller(request))


@delete(
    "/v1/webhooks/{webhook:str}",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Remove a webhook and its pending deliveries",
)
async def delete_webhook(request: Http, webhook: FromPath[str]) -> WebhookView:
    return await webhooks_of(request).registry.delete(webhook, _caller(request))


@post(
    "/v1/webhooks/{webhook:str}/pause",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Pause a webhook; its deliveries wait",
)
async def pause_webhook(request: Http, webhook: FromPath[str]) -> WebhookView:
    return await webhooks_of(request).registry.set_paused(webhook, _caller(request), paused=True)


@post(
    "/v1/webhooks/{webhook:str}/resume",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Resume a webhook immediately",
)
async def resume_webhook(request: Http, webhook: FromPath[str]) -> WebhookView:
    return await webhooks_of(request).registry.set_paused(webhook, _caller(request), paused=False)


@post(
    "/v1/webhooks/{webhook:str}/rotate",
    guards=[user_guard],
    opt={"scope": "admin"},
    summary="Rotate the secret, shown once; for a while, calls are signed with both",
)
async def rotate_webhook(
    request: Http,
    webhook: FromPath[str],
    data: JSONBody[RotateRequest],
    body: RawBody,
    idempotency_key: IdempotencyKey = None,
) -> WebhookSecret:
    return await webhooks_of(request).registry.rotate(webhook, data, _caller(request), Repeat(idempotency_key, body))


@post(
    "/v1/webhooks/{webhook:str}/test",
    guards=[user_guard],
    opt={"scope": "admin"},
    summary="Send `webhook.test` to it",
)
async def try_webhook(request: Http, webhook: FromPath[str], idempotency_key: IdempotencyKey = None) -> DeliveryView:
    return await webhooks_of(request).registry.test(webhook, _caller(request), Repeat(idempotency_key))


@get(
    "/v1/webhooks/{webhook:str}/deliveries",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="Deliveries of a webhook, sent and pending, newest first",
)
async def list_deliveries(
    request: Http,
    webhook: FromPath[str],
    status: FromQuery[DeliveryStatus | None] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> DeliveryPage:
    return await webhooks_of(request).registry.deliveries(webhook, _caller(request), status, cursor, limit)


@get(
    "/v1/webhooks/{webhook:str}/deliveries/{delivery_id:str}",
    guards=[user_guard],
    opt={"scope": "jobs:read"},
    summary="A delivery and its outcome",
)
async def get_delivery(request: Http, webhook: FromPath[str], delivery_id: FromPath[UUID]) -> DeliveryView:
    return await webhooks_of(request).registry.delivery(webhook, delivery_id, _caller(request))


@post(
    "/v1/webhooks/{webhook:str}/redrive",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Retry dead deliveries: the listed ones, or the oldest",
)
async def redrive_deliveries(request: Http, webhook: FromPath[str], data: JSONBody[DeliveryRedrive]) -> Changed:
    return await webhooks_of(request).registry.redrive(webhook, data, _caller(request))


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
