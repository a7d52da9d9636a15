"""Calls for the output of runs: tasks by index, results, receipts and exports; one method per endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final
from uuid import UUID, uuid4

from msgspec import Raw

from interlock.client._caller import Caller, path, query
from interlock.client._http import refuse_line_breaks
from interlock.wire.jobs import (
    ExportPart,
    ExportRequest,
    ExportState,
    ExportView,
    JobAccepted,
    ReceiptKeys,
    ReceiptReply,
    RerunRequest,
)
from interlock.wire.tasks import TaskView

PAGE: Final = 100


class ResultCalls:
    """`client.results`. A job is identified by its name or its id. `run` defaults to the newest run."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def task(self, job: str | UUID, index: int, *, run: UUID | str | None = None) -> TaskView:
        """Returns a task with its result and a URL for the result. Anyone can read that URL for one day."""
        return await self._caller.call("GET", query(path("v1", "jobs", job, "tasks", index), run=run), TaskView)

    async def result(self, run_id: UUID, index: int) -> Raw:
        """Returns the result of one task, byte for byte."""
        return await self._caller.call("GET", path("v1", "results", run_id, index), Raw)

    async def receipt(
        self,
        job: str | UUID,
        *,
        run: UUID | str | None = None,
        on_progress: Callable[[ReceiptReply], None] | None = None,
    ) -> ReceiptReply:
        """Returns the signed receipt. A large run takes several calls; each continues where the previous one ended."""
        target = query(path("v1", "jobs", job, "receipt"), run=run)
        while True:
            reply = await self._caller.call("GET", target, ReceiptReply)
            if reply.signed is not None:
                return reply
            if on_progress is not None:
                on_progress(reply)

    async def rerun(self, job: str | UUID, request: RerunRequest, *, idempotency_key: str | None = None) -> JobAccepted:
        """Runs tasks of a run again, as a new run. The default key is random: a retry runs nothing twice."""
        key = idempotency_key or str(uuid4())
        refuse_line_breaks("Idempotency-Key", key)
        target, extra = path("v1", "jobs", job, "rerun"), f"Idempotency-Key: {key}\r\n"
        return await self._caller.call("POST", target, JobAccepted, request, extra=extra)

    async def start_export(
        self, job: str | UUID, request: ExportRequest, *, idempotency_key: str | None = None
    ) -> ExportView:
        """Exports all tasks of a run that has ended. The default key is random: a retry exports nothing twice."""
        key = idempotency_key or str(uuid4())
        refuse_line_breaks("Idempotency-Key", key)
        target, extra = path("v1", "jobs", job, "exports"), f"Idempotency-Key: {key}\r\n"
        return await self._caller.call("POST", target, ExportView, request, extra=extra)

    async def export(
        self, job: str | UUID, export_id: UUID, cursor: str | None = None, limit: int = PAGE
    ) -> ExportView:
        """Returns the state of an export and, once it is complete, a page of its files."""
        target = query(path("v1", "jobs", job, "exports", export_id), cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, ExportView)

    async def wait_export(
        self,
        job: str | UUID,
        export_id: UUID,
        on_progress: Callable[[ExportView], None] | None = None,
        poll_seconds: float = 0.5,
    ) -> ExportView:
        """Polls until the export has completed or failed. Returns it with the first page of its files."""
        while True:
            view = await self.export(job, export_id)
            if on_progress is not None:
                on_progress(view)
            if view.state in (ExportState.COMPLETED, ExportState.FAILED):
                return view
            await asyncio.sleep(poll_seconds)

    async def export_parts(self, job: str | UUID, export_id: UUID) -> AsyncIterator[ExportPart]:
        """Yields all files of a complete export, with their URLs."""
        cursor: str | None = None
        while True:
            page = await self.export(job, export_id, cursor, 1000)
            for part in page.parts:
                yield part
            cursor = page.next_cursor
            if cursor is None:
                return

    async def receipt_keys(self) -> ReceiptKeys:
        return await self._caller.call("GET", path("v1", "receipt-keys"), ReceiptKeys)
