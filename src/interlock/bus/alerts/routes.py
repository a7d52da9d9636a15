"""Alerts of the command bus: the feed of a tenant, the channels of each event, and unrouted alerts for operations."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from litestar import get, post, put
from litestar.params import FromPath, JSONBody, QueryParameter

from interlock.access.guards import principal_of, user_guard
from interlock.access.principals import PLATFORM
from interlock.bus.build import bus_of
from interlock.http.parameters import Cursor, Http, Limit
from interlock.wire.bus_alerts import (
    AlertPage,
    AlertSettings,
    AlertSettingsList,
    AlertSettingsView,
    AlertView,
    RouteHealthPage,
)


@get("/v1/alerts", guards=[user_guard], opt={"scope": "registry:read"}, summary="Alerts of the org, newest first")
async def list_alerts(request: Http, cursor: Cursor = None, limit: Limit = 100) -> AlertPage:
    return await bus_of(request).alerts.feed(principal_of(request), cursor, limit)


@get(
    "/v1/alert-channels",
    guards=[user_guard],
    opt={"scope": "registry:read"},
    summary="Events that open alerts, with the channels of each",
)
async def list_alert_channels(request: Http) -> AlertSettingsList:
    return await bus_of(request).alerts.channels(principal_of(request))


@put(
    "/v1/alert-channels/{event:str}",
    guards=[user_guard],
    opt={"scope": "registry:write"},
    summary="Set the channels of an event",
)
async def set_alert_channels(request: Http, event: FromPath[str], data: JSONBody[AlertSettings]) -> AlertSettingsView:
    return await bus_of(request).alerts.set_channels(event, data, principal_of(request))


@get(
    "/v1/operations/alerts",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    summary="Critical alerts of all orgs without an e-mail address or a webhook, oldest first",
)
async def list_unrouted_alerts(request: Http, cursor: Cursor = None, limit: Limit = 100) -> AlertPage:
    return await bus_of(request).alerts.operations(cursor, limit)


@post(
    "/v1/operations/alerts/{alert_id:str}/resolve",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    status_code=200,
    summary="Mark an alert as resolved",
)
async def resolve_alert(request: Http, alert_id: FromPath[UUID]) -> AlertView:
    return await bus_of(request).alerts.resolve(alert_id, principal_of(request))


OnlyBad = Annotated[bool, QueryParameter(name="bad", required=False, description="only routes that are not healthy")]


@get(
    "/v1/route-health",
    guards=[user_guard],
    opt={"scope": "registry:read"},
    summary="Health of routes, by target and name",
)
async def list_route_health(
    request: Http, bad: OnlyBad = False, cursor: Cursor = None, limit: Limit = 100
) -> RouteHealthPage:
    return await bus_of(request).route_health.page(principal_of(request), cursor, limit, only_bad=bad)


HANDLERS = [
    list_alerts,
    list_alert_channels,
    set_alert_channels,
    list_unrouted_alerts,
    resolve_alert,
    list_route_health,
]
