"""Alerts of the command bus: a tenant's feed, where each kind is told, and what operations has to see to."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from litestar import Request, get, post, put
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody, QueryParameter

from interlock.access.principals import PLATFORM
from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.kernel.reads import MAX_PAGE
from interlock.wire.bus_alerts import AlertPage, AlertSettings, AlertSettingsList, AlertSettingsView, AlertView

Http = Request[Any, Any, State]
Cursor = Annotated[
    str | None, QueryParameter(name="cursor", required=False, description="next_cursor of the last page")
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]


@get("/v1/alerts", guards=[user_guard], opt={"scope": "registry:read"}, summary="Alerts of the org, newest first")
async def list_alerts(request: Http, cursor: Cursor = None, limit: Limit = 100) -> AlertPage:
    return await kernel_of(request).alerts.feed(principal_of(request), cursor, limit)


@get(
    "/v1/alert-channels",
    guards=[user_guard],
    opt={"scope": "registry:read"},
    summary="Events that alert, and where each is told",
)
async def list_alert_channels(request: Http) -> AlertSettingsList:
    return await kernel_of(request).alerts.channels(principal_of(request))


@put(
    "/v1/alert-channels/{event:str}",
    guards=[user_guard],
    opt={"scope": "registry:write"},
    summary="Say where an event is told",
)
async def set_alert_channels(request: Http, event: FromPath[str], data: JSONBody[AlertSettings]) -> AlertSettingsView:
    return await kernel_of(request).alerts.set_channels(event, data, principal_of(request))


@get(
    "/v1/operations/alerts",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    summary="Critical alerts of all orgs that no address and no webhook was told of, oldest first",
)
async def list_unrouted_alerts(request: Http, cursor: Cursor = None, limit: Limit = 100) -> AlertPage:
    return await kernel_of(request).alerts.operations(cursor, limit)


@post(
    "/v1/operations/alerts/{alert_id:str}/resolve",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    status_code=200,
    summary="Somebody has seen to it",
)
async def resolve_alert(request: Http, alert_id: FromPath[UUID]) -> AlertView:
    return await kernel_of(request).alerts.resolve(alert_id, principal_of(request))


HANDLERS = [list_alerts, list_alert_channels, set_alert_channels, list_unrouted_alerts, resolve_alert]
