"""HTTP routes of inboxes, alerts and replays. Commands and the registry have their own, next to their logic."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from litestar import get, post, put
from litestar.params import FromPath, JSONBody, QueryParameter

from interlock.access.guards import principal_of, user_guard
from interlock.access.principals import PLATFORM, RECEIVE
from interlock.bus.build import bus_of
from interlock.http.requests import Cursor, Http, Limit
from interlock.wire.bus_events import (
    AlertPage,
    AlertSettings,
    AlertSettingsList,
    AlertSettingsView,
    AlertView,
    RouteHealthPage,
)
from interlock.wire.bus_messages import (
    DeadSelection,
    InboxAck,
    InboxDead,
    InboxExtend,
    InboxMessages,
    InboxNack,
    InboxReceive,
    InboxSettled,
    ReplayPage,
    ReplayRequest,
    ReplayView,
)

# The inbox of a service, for its own API key

_OPT = {"scope": RECEIVE}


@post(
    "/v1/inbox/{queue:str}/receive",
    guards=[user_guard],
    opt=_OPT,
    status_code=200,
    summary="Wait for commands, or for telemetry",
)
async def receive(request: Http, queue: FromPath[str], data: JSONBody[InboxReceive]) -> InboxMessages:
    return await bus_of(request).inbox.receive(queue, data, principal_of(request))


@post(
    "/v1/inbox/{queue:str}/extend",
    guards=[user_guard],
    opt=_OPT,
    status_code=200,
    summary="Extend the visibility timeout of messages",
)
async def extend(request: Http, queue: FromPath[str], data: JSONBody[InboxExtend]) -> InboxSettled:
    return await bus_of(request).inbox.extend(queue, data, principal_of(request))


@post("/v1/inbox/{queue:str}/ack", guards=[user_guard], opt=_OPT, status_code=200, summary="Delete processed messages")
async def ack(request: Http, queue: FromPath[str], data: JSONBody[InboxAck]) -> InboxSettled:
    return await bus_of(request).inbox.ack(queue, data, principal_of(request))


@post(
    "/v1/inbox/{queue:str}/nack", guards=[user_guard], opt=_OPT, status_code=200, summary="Return messages to the queue"
)
async def nack(request: Http, queue: FromPath[str], data: JSONBody[InboxNack]) -> InboxSettled:
    return await bus_of(request).inbox.nack(queue, data, principal_of(request))


@get(
    "/v1/inbox/{queue:str}/dead-letters",
    guards=[user_guard],
    opt=_OPT,
    summary="Messages received too often without being settled, oldest first",
)
async def list_dead(request: Http, queue: FromPath[str], cursor: Cursor = None, limit: Limit = 100) -> InboxDead:
    return await bus_of(request).inbox.dead(queue, principal_of(request), cursor, limit)


@post(
    "/v1/inbox/{queue:str}/redrive",
    guards=[user_guard],
    opt=_OPT,
    status_code=200,
    summary="Deliver dead messages again: those named, or the oldest",
)
async def redrive_dead(request: Http, queue: FromPath[str], data: JSONBody[DeadSelection]) -> InboxSettled:
    return await bus_of(request).inbox.redrive(queue, data, principal_of(request))


@post(
    "/v1/inbox/{queue:str}/discard",
    guards=[user_guard],
    opt=_OPT,
    status_code=200,
    summary="Delete dead messages: those named, or the oldest",
)
async def discard_dead(request: Http, queue: FromPath[str], data: JSONBody[DeadSelection]) -> InboxSettled:
    return await bus_of(request).inbox.discard(queue, data, principal_of(request))


# Alerts: the feed of a tenant, the channels of each event, and unrouted alerts for operations


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


# Replays: commands that an operator sends again


@post("/v1/replays", guards=[user_guard], opt={"scope": "admin"}, summary="Replay commands")
async def create_replay(request: Http, data: JSONBody[ReplayRequest]) -> ReplayView:
    return await bus_of(request).replays.create(data, principal_of(request))


@get("/v1/replays", guards=[user_guard], opt={"scope": "admin"}, summary="Replays of the org, newest first")
async def list_replays(request: Http, cursor: Cursor = None, limit: Limit = 100) -> ReplayPage:
    return await bus_of(request).replays.page(principal_of(request), cursor, limit)


@get("/v1/replays/{replay_id:str}", guards=[user_guard], opt={"scope": "admin"}, summary="A replay and its progress")
async def get_replay(request: Http, replay_id: FromPath[UUID]) -> ReplayView:
    return await bus_of(request).replays.replay(replay_id, principal_of(request))


@post(
    "/v1/replays/{replay_id:str}/cancel",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Cancel a replay",
)
async def cancel_replay(request: Http, replay_id: FromPath[UUID]) -> ReplayView:
    return await bus_of(request).replays.cancel(replay_id, principal_of(request))


HANDLERS = [
    receive,
    extend,
    ack,
    nack,
    list_dead,
    redrive_dead,
    discard_dead,
    list_alerts,
    list_alert_channels,
    set_alert_channels,
    list_unrouted_alerts,
    resolve_alert,
    list_route_health,
    create_replay,
    list_replays,
    get_replay,
    cancel_replay,
]
