"""Bulk operations: actions on all tasks or runs that match a filter."""

from __future__ import annotations

from uuid import UUID, uuid4

import msgspec

from interlock.client._caller import Caller, path, query
from interlock.client._http import refuse_line_breaks
from interlock.wire.bulk_operations import BulkPage, BulkPreview, BulkRequest, BulkView

_TARGET = "/v1/bulk-operations"


class BulkCalls:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def preview(self, request: BulkRequest) -> BulkPreview:
        """Counts what matches, up to 10,000, and returns samples. Changes nothing."""
        dry = msgspec.structs.replace(request, dry_run=True)
        return await self._caller.call("POST", _TARGET, BulkPreview, dry)

    async def start(self, request: BulkRequest, *, idempotency_key: str | None = None) -> BulkView:
        """Starts an operation, which the server carries out. `operation` returns its progress."""
        key = idempotency_key or str(uuid4())
        refuse_line_breaks("Idempotency-Key", key)
        wet = msgspec.structs.replace(request, dry_run=False)
        return await self._caller.call("POST", _TARGET, BulkView, wet, extra=f"Idempotency-Key: {key}\r\n")

    async def operation(self, operation_id: UUID | str) -> BulkView:
        return await self._caller.call("GET", path("v1", "bulk-operations", operation_id), BulkView)

    async def page(self, cursor: str | None = None, limit: int = 100) -> BulkPage:
        target = query(_TARGET, cursor=cursor, limit=limit)
        return await self._caller.call("GET", target, BulkPage)

    async def cancel(self, operation_id: UUID | str) -> BulkView:
        """Stops an operation after its current batch. What it has done stays done."""
        return await self._caller.call(
            "POST", path("v1", "bulk-operations", operation_id, "cancel"), BulkView, repeatable=False
        )
