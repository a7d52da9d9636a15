"""Calls to the dispatcher: of a trusted worker, and of one attempt with its fence and its capability token."""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack
from uuid import UUID

import msgspec
from msgspec import UNSET, Raw

from interlock.client._caller import TIMEOUT_SECONDS, Caller, query
from interlock.client._http import refuse_line_breaks
from interlock.errors import ConfigurationError, InterlockError
from interlock.wire.access import CredentialsRequest, Health, TaskCredentials
from interlock.wire.attempts import (
    BufferPublish,
    BufferPublished,
    ClaimBatchReply,
    ClaimRequest,
    Completion,
    CompletionBatch,
    CompletionBatchReply,
    CompletionReply,
    DataReply,
    DataRequest,
    Event,
    EventBatch,
    EventsAccepted,
    FetchReply,
    Heartbeat,
    HeartbeatBatch,
    HeartbeatBatchReply,
    HeartbeatReply,
    Output,
    ReleaseBatch,
    ReleaseReply,
)
from interlock.wire.logs import LogBatch, LogsKept
from interlock.wire.queries import QueryReply, TaskQuery
from interlock.wire.tasks import (
    Crash,
    OperatorsReport,
    OperatorsReported,
    ReceiveReply,
    ReceiveRequest,
    Settled,
    SettleRequest,
)

T = TypeVar("T")


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

    async def _post(self, target: str, kind: type[T], body: Any, timeout: float = TIMEOUT_SECONDS) -> T:
        return await self._caller.call("POST", target, kind, body, timeout=timeout)

    async def health(self) -> Health:
        return await self._caller.call("GET", "/healthz", Health)

    async def receive(self, request: ReceiveRequest) -> ReceiveReply:
        """Long-polls for up to `request.wait_seconds`. An empty reply is not an error."""
        timeout = request.wait_seconds + TIMEOUT_SECONDS
        return await self._post("/internal/queue/receive", ReceiveReply, request, timeout)

    async def report_operators(self, report: OperatorsReport) -> OperatorsReported:
        return await self._post("/internal/operators", OperatorsReported, report)

    async def extend(self, request: SettleRequest) -> Settled:
        return await self._post("/internal/queue/extend", Settled, request)

    async def ack(self, request: SettleRequest) -> Settled:
        return await self._post("/internal/queue/ack", Settled, request)

    async def nack(self, request: SettleRequest) -> Settled:
        return await self._post("/internal/queue/nack", Settled, request)

    async def claim(self, request: ClaimRequest) -> ClaimBatchReply:
        """Claims tasks out of `request.task_ids` or of ranges of runs.

        Without tokens, tasks come in groups: the fields that they share occur once per group.
        """
        grouped = msgspec.structs.replace(request, grouped=not request.tokens)
        return await self._post("/internal/task-claim", ClaimBatchReply, grouped)

    async def fetch(self, task_id: UUID) -> FetchReply:
        return await self._caller.call("GET", query("/internal/task-fetch", task_id=task_id), FetchReply)

    async def heartbeat(self, batch: HeartbeatBatch) -> HeartbeatBatchReply:
        return await self._post("/internal/task-heartbeat", HeartbeatBatchReply, batch)

    async def complete(self, batch: CompletionBatch) -> CompletionBatchReply:
        return await self._post("/internal/task-complete", CompletionBatchReply, batch)

    async def task_data(self, request: DataRequest) -> DataReply:
        """Returns the committed inputs of attempts that hold their lease, and the prefixes they write to."""
        return await self._post("/internal/task-data", DataReply, request)

    async def release(self, batch: ReleaseBatch) -> ReleaseReply:
        return await self._post("/internal/task-release", ReleaseReply, batch)

    async def keep_logs(self, batch: LogBatch) -> LogsKept:
        return await self._post("/internal/task-logs", LogsKept, batch)


PATIENCE_SECONDS = 60.0
QUERY_SECONDS = 3_700.0
"""The query service itself cancels a query that takes too long."""

_json = msgspec.json.Encoder()


class Fence(NamedTuple):
    """Identifies one attempt in every write it makes. A newer attempt makes the fence stale."""

    task_id: UUID
    attempt: int
    lease_token: UUID


class Ending(TypedDict, total=False):
    """Optional fields of a completion."""

    result: Any
    events: Sequence[Event]
    outputs: Sequence[Output]
    error_class: str | None
    error_message: str | None
    crash: Crash | None


class TaskClient:
    """The calls of one attempt. A renewed token in a heartbeat reply replaces the current one."""

    def __init__(
        self,
        url: str,
        capability_token: str,
        fence: Fence,
        *,
        verify: ssl.SSLContext | bool = True,
        patience: float = PATIENCE_SECONDS,
        query_url: str | None = None,
    ) -> None:
        self.fence = fence
        self._caller = Caller(url, {}, verify=verify, patience=patience)
        self._queries = None if query_url is None else Caller(query_url, {}, verify=verify, patience=patience)
        self.use_token(capability_token)

    async def __aenter__(self) -> TaskClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._caller.close()
        if self._queries is not None:
            self._queries.close()

    def use_token(self, capability_token: str) -> None:
        refuse_line_breaks("capability token", capability_token)
        self._extra = f"X-Trace-Task-Capability: {capability_token}\r\n"

    async def _post(self, target: str, kind: type[T], body: Any) -> T:
        return await self._caller.call("POST", target, kind, body, extra=self._extra)

    async def heartbeat(
        self, progress: float | None = None, progress_text: str | None = None, *, renew: bool = False
    ) -> HeartbeatReply:
        """Extends the lease. The reply says whether to stop; `renew` requests a token with a later expiry."""
        beat = Heartbeat(**self.fence._asdict(), progress=progress, progress_text=progress_text, token=renew)
        reply = await self._post("/v1/task/heartbeat", HeartbeatReply, beat)
        if reply.capability_token is not None:
            self.use_token(reply.capability_token)
        return reply

    async def complete(
        self, status: Literal["Completed", "Failed", "Canceled"], **ending: Unpack[Ending]
    ) -> CompletionReply:
        result = ending.get("result", UNSET)
        completion = Completion(
            **self.fence._asdict(),
            status=status,
            result=result if result is UNSET or isinstance(result, Raw) else Raw(_json.encode(result)),
            events=list(ending.get("events", ())),
            outputs=list(ending.get("outputs", ())),
            error_class=ending.get("error_class"),
            error_message=ending.get("error_message"),
            crash=ending.get("crash"),
        )
        return await self._post("/v1/task/complete", CompletionReply, completion)

    async def events(self, events: Sequence[Event]) -> EventsAccepted:
        batch = EventBatch(**self.fence._asdict(), events=list(events))
        return await self._post("/v1/task/events", EventsAccepted, batch)

    async def publish(
        self, dataset_uuid: UUID, dataset_version: UUID, batch_uri: str, record_count: int
    ) -> BufferPublished:
        """Publishes a batch that is stored at `batch_uri` to a buffered dataset."""
        body = BufferPublish(
            **self.fence._asdict(),
            dataset_uuid=dataset_uuid,
            dataset_version=dataset_version,
            batch_uri=batch_uri,
            record_count=record_count,
        )
        return await self._post("/v1/task/buffer-publish", BufferPublished, body)

    async def credentials(self) -> TaskCredentials:
        """Returns credentials for the attempt's own object prefixes, valid until the current lease expires."""
        return await self._post("/v1/task/credentials", TaskCredentials, CredentialsRequest(**self.fence._asdict()))

    async def query(self, sql: str, *, limit: int | None = None, export: bool = False) -> QueryReply:
        """Runs one SELECT over the task's inputs, by their names.

        `export` writes the result under the attempt's prefix.
        """
        if self._queries is None:
            raise ConfigurationError("This client has no address of the query service: pass query_url.")
        body = TaskQuery(**self.fence._asdict(), sql=sql, limit=limit, export=export)
        return await self._queries.call(
            "POST", "/v1/task/query", QueryReply, body, extra=self._extra, timeout=QUERY_SECONDS, repeatable=not export
        )
