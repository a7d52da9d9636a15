"""Calls of a trusted worker to the dispatcher: queue, claim, and batched reports for its attempts."""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from interlock.client._caller import TIMEOUT_SECONDS, Caller, query
from interlock.errors import InterlockError
from interlock.wire.access import Health
from interlock.wire.attempts import (
    ClaimBatchReply,
    ClaimGroup,
    ClaimReply,
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
    TaskPayload,
)
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
_claim = msgspec.json.Decoder(ClaimReply)
_claims = msgspec.json.Decoder(ClaimBatchReply)
_fetched = msgspec.json.Decoder(FetchReply)
_beats = msgspec.json.Decoder(HeartbeatBatchReply)
_completed = msgspec.json.Decoder(CompletionBatchReply)
_data = msgspec.json.Decoder(DataReply)
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

    async def claim(self, request: ClaimRequest) -> ClaimReply:
        """Claims the single task `request.task_id`."""
        return await self._post("/internal/task-claim", _claim, request)

    async def claim_batch(self, request: ClaimRequest) -> ClaimBatchReply:
        """Claims tasks out of `request.task_ids` or of ranges of runs. Returns groups as single claims."""
        reply = await self.claim_groups(request)
        apart = [claim for group in reply.groups for claim in _apart(group)]
        return ClaimBatchReply(claims=reply.claims + apart, remaining=reply.remaining)

    async def claim_groups(self, request: ClaimRequest) -> ClaimBatchReply:
        """Like `claim_batch`, but keeps groups: fields that tasks share occur once per group."""
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


def _apart(group: ClaimGroup) -> Iterator[ClaimReply]:
    for one in group.tasks:
        task = TaskPayload(
            task_id=one.task_id,
            attempt=group.attempt,
            job_id=group.job_id,
            job=group.job,
            operator=group.operator,
            config=group.config,
            inputs=[],
            payload=one.payload,
            org_id=group.org_id,
            run_id=group.run_id,
            index=one.index,
            outputs=[],
            timeout_at=group.timeout_at,
        )
        yield ClaimReply(
            status="Claimed",
            task_id=one.task_id,
            attempt=group.attempt,
            lease_token=group.lease_token,
            lease_expires_at=group.lease_expires_at,
            task=task,
        )
