"""Replays: commands that are sent again, by whom and why."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from litestar import Request, get, post
from litestar.datastructures import State
from litestar.params import FromPath, JSONBody, QueryParameter

from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.kernel.reads import MAX_PAGE
from interlock.wire.bus_replays import ReplayPage, ReplayRequest, ReplayView

Http = Request[Any, Any, State]
Cursor = Annotated[
    str | None, QueryParameter(name="cursor", required=False, description="next_cursor of the last page")
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]


@post("/v1/replays", guards=[user_guard], opt={"scope": "admin"}, summary="Have commands sent again")
async def create_replay(request: Http, data: JSONBody[ReplayRequest]) -> ReplayView:
    return await kernel_of(request).replays.ask(data, principal_of(request))


@get("/v1/replays", guards=[user_guard], opt={"scope": "admin"}, summary="Replays of the org, newest first")
async def list_replays(request: Http, cursor: Cursor = None, limit: Limit = 100) -> ReplayPage:
    return await kernel_of(request).replays.page(principal_of(request), cursor, limit)


@get("/v1/replays/{replay_id:str}", guards=[user_guard], opt={"scope": "admin"}, summary="A replay, and how far it is")
async def get_replay(request: Http, replay_id: FromPath[UUID]) -> ReplayView:
    return await kernel_of(request).replays.replay(replay_id, principal_of(request))


@post(
    "/v1/replays/{replay_id:str}/cancel",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Send no more of it",
)
async def cancel_replay(request: Http, replay_id: FromPath[UUID]) -> ReplayView:
    return await kernel_of(request).replays.cancel(replay_id, principal_of(request))


HANDLERS = [create_replay, list_replays, get_replay, cancel_replay]
