"""The SDK for backfills, as `Client.backfills`: one method per endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import UUID

import msgspec

from interlock.client._caller import Caller, path, query
from interlock.wire import BackfillAnswer, BackfillPage, BackfillRequest, BackfillView

PAGE = 100

_one = msgspec.json.Decoder(BackfillView)


class BackfillCalls:
    """A backfill is named by its run."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def start(self, dag: str, job: str, request: BackfillRequest) -> BackfillAnswer:
        target = path("v1", "dags", dag, "jobs", job, "backfills")
        decoder = msgspec.json.Decoder(BackfillAnswer)
        return await self._caller.call("POST", target, decoder, request, repeatable=request.dry_run)

    async def page(self, cursor: str | None = None, limit: int = PAGE) -> BackfillPage:
        target = query("/v1/backfills", cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, msgspec.json.Decoder(BackfillPage))

    async def show(self, run_id: UUID | str) -> BackfillView:
        return await self._caller.call("GET", path("v1", "backfills", run_id), _one)

    async def wait(
        self,
        run_id: UUID | str,
        on_progress: Callable[[BackfillView], None] | None = None,
        poll_seconds: float = 0.5,
    ) -> BackfillView:
        """The backfill when its last task has ended; `on_progress` sees every look at it, the last one included."""
        while True:
            found = await self.show(run_id)
            if on_progress is not None:
                on_progress(found)
            if found.ended_at is not None:
                return found
            await asyncio.sleep(poll_seconds)

    async def pause(self, run_id: UUID | str) -> BackfillView:
        return await self._caller.call("POST", path("v1", "backfills", run_id, "pause"), _one)

    async def resume(self, run_id: UUID | str) -> BackfillView:
        return await self._caller.call("POST", path("v1", "backfills", run_id, "resume"), _one)

    async def cancel(self, run_id: UUID | str) -> BackfillView:
        return await self._caller.call("POST", path("v1", "backfills", run_id, "cancel"), _one)
