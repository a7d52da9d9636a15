"""Replays: commands that an operator sends again."""

from __future__ import annotations

from uuid import UUID

from litestar import get, post
from litestar.params import FromPath, JSONBody

from interlock.access.guards import principal_of, user_guard
from interlock.bus.build import bus_of
from interlock.http.parameters import Cursor, Http, Limit
from interlock.wire.bus_replays import ReplayPage, ReplayRequest, ReplayView


@post("/v1/replays", guards=[user_guard], opt={"scope": "admin"}, summary="Replay commands")
async def create_replay(request: Http, data: JSONBody[ReplayRequest]) -> ReplayView:
    return await bus_of(request).replays.ask(data, principal_of(request))


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


HANDLERS = [create_replay, list_replays, get_replay, cancel_replay]
