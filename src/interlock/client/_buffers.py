"""The SDK for published batches, as `Client.buffers`: one method per endpoint."""

from __future__ import annotations

from uuid import UUID

import msgspec

from interlock.client._caller import Caller, path, query
from interlock.wire import BufferPage, BufferView, PublishStatus

PAGE = 100


class BufferCalls:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def page(
        self, status: PublishStatus | None = None, cursor: str | None = None, limit: int = PAGE
    ) -> BufferPage:
        target = query("/v1/buffers", status=status, cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, msgspec.json.Decoder(BufferPage))

    async def show(self, publish_id: UUID) -> BufferView:
        return await self._caller.call("GET", path("v1", "buffers", publish_id), msgspec.json.Decoder(BufferView))

    async def redrive(self, publish_id: UUID) -> BufferView:
        """Not tried again when the reply was lost: the second call would find it Pending, and say so."""
        target = path("v1", "buffers", publish_id, "redrive")
        return await self._caller.call("POST", target, msgspec.json.Decoder(BufferView), repeatable=False)
