"""The SDK for sources, as `Client.sources`: one method per endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import uuid4

import msgspec

from interlock.client._caller import Caller, path
from interlock.client._http import refuse_line_breaks
from interlock.wire import HookSecret, SecretRequest, SourceEvent, SourceEvents, SourceEventsAccepted, SourceList


class SourceCalls:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def of_dag(self, dag: str) -> SourceList:
        return await self._caller.call("GET", path("v1", "dags", dag, "sources"), msgspec.json.Decoder(SourceList))

    async def send(
        self, dag: str, job: str, events: Sequence[SourceEvent], *, idempotency_key: str | None = None
    ) -> SourceEventsAccepted:
        """Without an `idempotency_key` the call makes one up: a retry after a lost reply sends nothing twice."""
        key = idempotency_key or str(uuid4())
        refuse_line_breaks("Idempotency-Key", key)
        return await self._caller.call(
            "POST",
            path("v1", "dags", dag, "jobs", job, "events"),
            msgspec.json.Decoder(SourceEventsAccepted),
            SourceEvents(events=list(events)),
            extra=f"Idempotency-Key: {key}\r\n",
        )

    async def make_secret(self, dag: str, job: str, *, rotate: bool = False) -> HookSecret:
        """Never repeated: the secret of a lost reply would be lost with it."""
        target = path("v1", "dags", dag, "jobs", job, "secret")
        decoder = msgspec.json.Decoder(HookSecret)
        return await self._caller.call("POST", target, decoder, SecretRequest(rotate=rotate), repeatable=False)
