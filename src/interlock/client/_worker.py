"""Calls of a trusted worker to the dispatcher: queue, claim, and batched reports for its attempts."""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from interlock.client._caller import TIMEOUT_SECONDS, Caller, query
from interlock.errors import InterlockError
from interlock.wire.access import Health
from interlock.wire.attempts import (
    ClaimBatchReply,
    ClaimRequest,
    CompletionBatch,
    CompletionBatchReply,
    DataReply,
    DataRequest,
    FetchReply,
    HeartbeatBatch,
    HeartbeatBatchReply,
    ReleaseBatch,
    ReleaseReply,
)
from interlock.wire.logs import LogBatch, LogsKept
from interlock.wire.tasks import (
    OperatorsReport,
    OperatorsReported,
    ReceiveReply,
    ReceiveRequest,
    Settled,
    SettleRequest,
)

T = TypeVar("T")

_received = msgspec.json.Decoder(ReceiveReply)
_reported = msgspec.json.Decoder(OperatorsReported)
_settled = msgspec.json.Decoder(Settled)
_claims = msgspec.json.Decoder(ClaimBatchReply)
_fetched = msgspec.json.Decoder(FetchReply)
_beats = msgspec.json.Decoder(HeartbeatBatchReply)
_completed = msgspec.json.Decoder(CompletionBatchReply)
_data = msgspec.json.Decoder(DataReply)
_logs_kept = msgspec.json.Decoder(LogsKept)
_released = msgspec.json.Decoder(ReleaseReply)


class WorkerClient:
    """Calls of a worker, authenticated by its worker token.

    All of them are idempotent: a second claim of a leased task is refused with a reason, and a second completion with
    the same fence is a duplicate. So by default a call is retried until the dispatcher answers. `patience` limits that,
    and `on_retry` is called with each failure before a retry.
    """

    def __init__(
        self,
        url: str,
        worker_token: str,
        *,
        verify: ssl.SSLContext | bool = True,
        patience: float = math.inf,
        on_retry: Callable[[InterlockError], None] | None = None,
    ) -> None:
        self.url = url
        self.verify = verify
        headers = {"X-Trace-Worker-Token": worker_token}
        self._caller = Caller(url, headers, verify=verify, patience=patience, on_retry=on_retry)

    async def __aenter__(self) -> WorkerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._caller.close()

    async def _post(
        self, target: str, decoder: msgspec.json.Decoder[T], body: Any, timeout: float = TIMEOUT_SECONDS
    ) -> T:
        return await self._caller.call("POST", target, decoder, body, timeout=timeout)

    async def health(self) -> Health:
        return await self._caller.call("GET", "/healthz", msgspec.json.Decoder(Health))

    async def receive(self, request: ReceiveRequest) -> ReceiveReply:
        """Long-polls for up to `request.wait_seconds`. An empty reply is not an error."""
        timeout = request.wait_seconds + TIMEOUT_SECONDS
        return await self._post("/internal/queue/receive", _received, request, timeout)

    async def report_operators(self, report: OperatorsReport) -> OperatorsReported:
        return await self._post("/internal/operators", _reported, report)

    async def extend(self, request: SettleRequest) -> Settled:
        return await self._post("/internal/queue/extend", _settled, request)

    async def ack(self, request: SettleRequest) -> Settled:
        return await self._post("/internal/queue/ack", _settled, request)

    async def nack(self, request: SettleRequest) -> Settled:
        return await self._post("/internal/queue/nack", _settled, request)

    async def claim(self, request: ClaimRequest) -> ClaimBatchReply:
        """Claims tasks out of `request.task_ids` or of ranges of runs.

        Without tokens, tasks come in groups: the fields that they share occur once per group.
        """
        grouped = msgspec.structs.replace(request, grouped=not request.tokens)
        return await self._post("/internal/task-claim", _claims, grouped)

    async def fetch(self, task_id: UUID) -> FetchReply:
        return await self._caller.call("GET", query("/internal/task-fetch", task_id=task_id), _fetched)

    async def heartbeat(self, batch: HeartbeatBatch) -> HeartbeatBatchReply:
        return await self._post("/internal/task-heartbeat", _beats, batch)

    async def complete(self, batch: CompletionBatch) -> CompletionBatchReply:
        return await self._post("/internal/task-complete", _completed, batch)

    async def task_data(self, request: DataRequest) -> DataReply:
        """Returns the committed inputs of attempts that hold their lease, and the prefixes they write to."""
        return await self._post("/internal/task-data", _data, request)

    async def release(self, batch: ReleaseBatch) -> ReleaseReply:
        return await self._post("/internal/task-release", _released, batch)

    async def keep_logs(self, batch: LogBatch) -> LogsKept:
        return await self._post("/internal/task-logs", _logs_kept, batch)
