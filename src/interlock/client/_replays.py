"""Replays of commands, one method per endpoint."""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from interlock.client._caller import Caller, path, query
from interlock.wire.bus_replays import ReplayPage, ReplayRequest, ReplayView

PAGE: Final = 100

_view = msgspec.json.Decoder(ReplayView)
_page = msgspec.json.Decoder(ReplayPage)


class ReplayCalls:
    """`client.replays`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def start(self, request: ReplayRequest) -> ReplayView:
        return await self._caller.call("POST", "/v1/replays", _view, request, repeatable=False)

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> ReplayPage:
        return await self._caller.call("GET", query("/v1/replays", cursor=cursor, limit=limit), _page)

    async def replay(self, replay_id: UUID) -> ReplayView:
        return await self._caller.call("GET", path("v1", "replays", replay_id), _view)

    async def cancel(self, replay_id: UUID) -> ReplayView:
        return await self._caller.call("POST", path("v1", "replays", replay_id, "cancel"), _view)
