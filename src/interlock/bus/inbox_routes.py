"""The inbox of a service, for its own API key: receive and settle messages, and handle dead letters."""

from __future__ import annotations

from litestar import get, post
from litestar.params import FromPath, JSONBody

from interlock.access.guards import principal_of, user_guard
from interlock.access.principals import RECEIVE
from interlock.bus.build import bus_of
from interlock.http.parameters import Cursor, Http, Limit
from interlock.wire.bus_inbox import (
    DeadSelection,
    InboxAck,
    InboxDead,
    InboxExtend,
    InboxMessages,
    InboxNack,
    InboxReceive,
    InboxSettled,
)

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


HANDLERS = [receive, extend, ack, nack, list_dead, redrive_dead, discard_dead]
