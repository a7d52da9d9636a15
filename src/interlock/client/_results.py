"""What comes out of runs: single tasks by index, results, receipts; one method per endpoint."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.client._caller import Caller, path, query
from interlock.wire import ReceiptKeys, ReceiptReply, TaskView

_task = msgspec.json.Decoder(TaskView)
_raw = msgspec.json.Decoder(Raw)
_receipt = msgspec.json.Decoder(ReceiptReply)
_keys = msgspec.json.Decoder(ReceiptKeys)


class ResultCalls:
    """`client.results`. A job is named by its name or its id; without a `run` its newest one is meant."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def task(self, job: str | UUID, index: int, *, run: UUID | None = None) -> TaskView:
        """With its result, and a URL that gives that to whoever has it, for a day."""
        return await self._caller.call("GET", query(path("v1", "jobs", job, "tasks", index), run=run), _task)

    async def result(self, run_id: UUID, index: int) -> Raw:
        """Of one task, byte for byte."""
        return await self._caller.call("GET", path("v1", "results", run_id, index), _raw)

    async def receipt(
        self, job: str | UUID, *, run: UUID | None = None, on_progress: Callable[[ReceiptReply], None] | None = None
    ) -> ReceiptReply:
        """The signed one. That of a large run takes several calls, each of which goes on where the last one ended."""
        target = query(path("v1", "jobs", job, "receipt"), run=run)
        while True:
            reply = await self._caller.call("GET", target, _receipt)
            if reply.signed is not None:
                return reply
            if on_progress is not None:
                on_progress(reply)

    async def receipt_keys(self) -> ReceiptKeys:
        return await self._caller.call("GET", path("v1", "receipt-keys"), _keys)
