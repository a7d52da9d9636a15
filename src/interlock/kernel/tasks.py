"""What workers do to tasks: claim, heartbeat, complete, give back. All of it fenced, all of it in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.access.principals import WorkerIdentity
from interlock.access.tokens import CapabilityTokens, Grant, write_grants
from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.adapters.queue import Handle, Queue
from interlock.errors import BadRequest, Fenced, Forbidden, InterlockError, NotFound, TooLarge
from interlock.failpoints import failpoint
from interlock.kernel.effects import check_effects, write_effects
from interlock.settings import Settings
from interlock.telemetry import ATTEMPTS_ENDED, TASKS_CLAIMED
from interlock.wire import (
    ClaimBatchReply,
    ClaimReply,
    ClaimRequest,
    Completion,
    CompletionBatchReply,
    CompletionReply,
    DatasetRef,
    FetchReply,
    Heartbeat,
    HeartbeatBatchReply,
    HeartbeatReply,
    JobRef,
    Refusal,
    Release,
    TaskPayload,
    TaskStatus,
)

_sql = queries("tasks")
_jobs_sql = queries("jobs")
_effects_sql = queries("effects")

SMALL_SHARD = 0
"""Tasks of DAGs and of small runs; a large run gets a shard of its own."""
MAX_RANGE = 10_000

Reason = Literal["AlreadyRunning", "Completed", "Failed", "Canceled", "NotFound", "LimitReached", "NotDue"]


def run_task_id(run_id: UUID, index: int) -> UUID:
    """The same function as interlock.run_task_id in SQL."""
    return UUID(bytes=hashlib.sha256(f"{run_id}:{index}".encode()).digest()[:16])


@dataclass(frozen=True)
class _Wanted:
    """A claim request, resolved to ids."""

    ids: list[UUID]
    most: int
    run_id: UUID | None = None
    last: int | None = None
    handle: Handle | None = None
    queue: str | None = None


@dataclass
class _Outcome:
    """The fate of a batch of completions."""

    ended: dict[UUID, CompletionReply] = field(default_factory=dict)
    refused: dict[UUID, InterlockError] = field(default_factory=dict)


class Tasks:
    def __init__(self, database: Database, settings: Settings, queue: Queue, tokens: CapabilityTokens) -> None:
        self._database = database
        self._settings = settings
        self._queue = queue
        self._tokens = tokens

    # Claim

    async def claim(self, request: ClaimRequest, worker: WorkerIdentity) -> ClaimBatchReply:
        wanted = _wanted(request)
        runtimes = None if worker.runtimes is None else list(worker.runtimes)
        direct = self._settings.queue_direct
        async with self._database.connection() as connection:
            rows: list[Row] = await self._claim_free(connection, wanted, request.worker_id, runtimes, direct)
            left = _not_in(wanted.ids, rows) if len(rows) < wanted.most else []
            states = (
                await _sql.claim_states(connection, shard=SMALL_SHARD, task_ids=left, runtimes=runtimes) if left else []
            )
        capped = sorted({s["job_id"] for s in states if s["capped"] and s["status"] == "Queued" and s["allowed"]})
        if capped:
            rows += await self._claim_capped(wanted, left, capped, request.worker_id, runtimes)
        if not direct:
            await self._settle_remotely(wanted, rows)
        await failpoint("claim.committed")
        TASKS_CLAIMED.inc(len(rows))
        return await self._reply(request, rows, states)

    async def _claim_free(
        self,
        connection: Connection,
        wanted: _Wanted,
        worker_id: str,
        runtimes: list[str] | None,
        direct: bool,
    ) -> list[Row]:
        handle = wanted.handle if direct else None
        rows: list[Row] = await _sql.claim(
            connection,
            shard=SMALL_SHARD,
            task_ids=wanted.ids,
            runtimes=runtimes,
            most=wanted.most,
            worker_id=_clean(worker_id),
            run_id=wanted.run_id,
            last=wanted.last,
            message_id=int(handle.message_id) if handle else None,
            receipt=UUID(handle.receipt) if handle else None,
        )
        return rows

    async def _claim_capped(
        self, wanted: _Wanted, ids: list[UUID], jobs: list[UUID], worker_id: str, runtimes: list[str] | None
    ) -> list[Row]:
        async def work(connection: Connection) -> list[Row]:
            await _sql.lock_capped_jobs(connection, job_ids=jobs)
            rows: list[Row] = await _sql.claim_capped(
                connection,
                shard=SMALL_SHARD,
                task_ids=ids,
                job_ids=jobs,
                runtimes=runtimes,
                worker_id=_clean(worker_id),
            )
            if wanted.handle and wanted.queue and self._settings.queue_direct:
                await queries("queue").ack(
                    connection,
                    queue=wanted.queue,
                    ids=[int(wanted.handle.message_id)],
                    receipts=[UUID(wanted.handle.receipt)],
                )
            await failpoint("claim.before_commit")
            return rows

        return await self._database.run(work)

    async def _settle_remotely(self, wanted: _Wanted, rows: list[Row]) -> None:
        """With a queue outside Postgres: the rest of a range is owed by the outbox, then the message is acked."""
        if wanted.handle is None or wanted.queue is None:
            return
        last = max((row["task_index"] for row in rows if row["task_index"] is not None), default=None)
        if last is not None and wanted.last is not None and len(rows) >= wanted.most and last < wanted.last:
            body = msgspec.json.encode({"run_id": wanted.run_id, "start": last + 1, "end": wanted.last}).decode()
            async with self._database.transaction() as connection:
                await _effects_sql.send_message(
                    connection, queue=wanted.queue, body=body, dedupe_key=None, direct=False
                )
        await self._queue.ack(wanted.queue, [wanted.handle])

    async def _reply(self, request: ClaimRequest, rows: list[Row], states: list[Row]) -> ClaimBatchReply:
        jobs = await self._jobs({row["job_id"] for row in rows})
        claims = [await self._claimed(row, jobs[row["job_id"]], request.tokens) for row in rows]
        taken = {row["task_id"] for row in rows}
        asked = request.task_ids or ([request.task_id] if request.task_id else [])
        found = {state["task_id"]: state for state in states}
        for task_id in asked:
            if task_id not in taken:
                claims.append(ClaimReply(status="NotClaimed", task_id=task_id, reason=_reason(found.get(task_id))))
        return ClaimBatchReply(claims=claims, remaining=int(rows[0].get("rearmed") or 0) if rows else 0)

    async def _jobs(self, job_ids: set[UUID]) -> dict[UUID, Row]:
        if not job_ids:
            return {}
        async with self._database.connection() as connection:
            return {row["job_id"]: row for row in await _sql.claimed_jobs(connection, job_ids=list(job_ids))}

    async def _claimed(self, row: Row, job: Row, tokens: bool) -> ClaimReply:
        task = self._payload(row, job)
        token = None
        if tokens:
            grant = Grant(task.org_id, task.task_id, task.attempt, task.outputs)
            token = await self._tokens.issue(grant, row["kid"])
        return ClaimReply(
            status="Claimed",
            task_id=task.task_id,
            attempt=task.attempt,
            lease_token=row["lease_token"],
            lease_expires_at=row["lease_expires_at"],
            capability_token=token,
            task=task,
        )

    def _payload(self, row: Row, job: Row) -> TaskPayload:
        task_id, attempt = row["task_id"], row["attempt"]
        return TaskPayload(
            task_id=task_id,
            attempt=attempt,
            job=JobRef(dag_name=job["dag_name"], name=job["name"]),
            operator=job["operator"],
            config=Raw(job["config"]),
            inputs=[],
            payload=Raw(row["payload"]),
            org_id=row["org_id"],
            run_id=row["run_id"],
            index=row["task_index"],
            outputs=write_grants(self._settings.objects_root, task_id, attempt, outputs_of(job)),
            timeout_at=row["timeout_at"],
        )

    async def fetch(self, task_id: UUID, worker: WorkerIdentity) -> FetchReply:
        runtimes = None if worker.runtimes is None else list(worker.runtimes)
        async with self._database.connection() as connection:
            row = await _sql.fetch_task(connection, shard=SMALL_SHARD, task_id=task_id, runtimes=runtimes)
        if row is None:
            raise NotFound(f"There is no task {task_id}.")
        status = TaskStatus.CANCELED if row["cancel_requested"] else TaskStatus(row["status"])
        return FetchReply(status=status, task=self._payload(row, row))

    # Heartbeat

    async def heartbeat(self, items: Sequence[Heartbeat]) -> HeartbeatBatchReply:
        items = _first_of_each(items)

        async def work(connection: Connection) -> list[Row]:
            rows: list[Row] = await _sql.heartbeat(
                connection,
                shard=SMALL_SHARD,
                task_ids=[i.task_id for i in items],
                attempts=[i.attempt for i in items],
                leases=[i.lease_token for i in items],
                progresses=[i.progress for i in items],
                texts=[_clean(i.progress_text) for i in items],
            )
            return rows

        rows = {row["task_id"]: row for row in await self._database.run(work, transaction=False)}
        kid = await self.active_kid() if any(i.token for i in items) else ""
        replies = [await self._beat(rows[i.task_id], i, kid) for i in items if i.task_id in rows]
        missing = [i for i in items if i.task_id not in rows]
        states = await self._fence_states([i.task_id for i in missing])
        refused = [_refusal(i.task_id, _fenced(states.get(i.task_id), i)) for i in missing]
        return HeartbeatBatchReply(items=replies, refused=refused)

    async def heartbeat_one(self, item: Heartbeat) -> HeartbeatReply:
        reply = await self.heartbeat([item])
        if reply.refused:
            raise _raised(reply.refused[0])
        return reply.items[0]

    async def _beat(self, row: Row, item: Heartbeat, kid: str) -> HeartbeatReply:
        token = None
        if item.token:
            outputs = write_grants(self._settings.objects_root, item.task_id, item.attempt, outputs_of(row))
            token = await self._tokens.issue(Grant(row["org_id"], item.task_id, item.attempt, outputs), kid)
        return HeartbeatReply(
            task_id=item.task_id,
            lease_expires_at=row["lease_expires_at"],
            cancel_requested=row["cancel_requested"],
            capability_token=token,
        )

    async def active_kid(self) -> str:
        async with self._database.connection() as connection:
            kid: str = await connection.fetchval("select kid from interlock.signing_keys where retired_at is null")
        return kid

    # Complete

    async def complete(self, items: Sequence[Completion]) -> CompletionBatchReply:
        outcome = await self._complete(items)
        refused = [_refusal(task_id, error) for task_id, error in outcome.refused.items()]
        return CompletionBatchReply(accepted=len(outcome.ended), refused=refused)

    async def complete_one(self, item: Completion) -> CompletionReply:
        outcome = await self._complete([item])
        if outcome.refused:
            raise outcome.refused[item.task_id]
        return outcome.ended[item.task_id]

    async def _complete(self, items: Sequence[Completion]) -> _Outcome:
        outcome = _Outcome()
        unique = _first_of_each(items)
        sane = [item for item in unique if self._acceptable(item, outcome)]
        with_effects = [item for item in sane if item.events or item.outputs]

        async def work(connection: Connection) -> list[Row]:
            allowed = await self._with_allowed_effects(connection, with_effects, sane, outcome)
            rows: list[Row] = await _sql.complete(connection, **_completion_arrays(allowed)) if allowed else []
            ended = {row["task_id"]: row for row in rows}
            for item in with_effects:
                if item.task_id in ended and item.status == "Completed":
                    await write_effects(connection, item, ended[item.task_id]["org_id"])
            await failpoint("complete.before_commit")
            return rows

        # One statement is a transaction of its own; only effects need an explicit one.
        rows = await self._database.run(work, transaction=bool(with_effects))
        await failpoint("complete.committed")
        await self._wake_parked(rows)
        for row in rows:
            outcome.ended[row["task_id"]] = _completion_reply(row)
            ATTEMPTS_ENDED.labels(outcome=row["status"]).inc()
        await self._explain_refusals([i for i in sane if i.task_id not in outcome.ended], outcome)
        return outcome

    def _acceptable(self, item: Completion, outcome: _Outcome) -> bool:
        limit = self._settings.result_limit_bytes
        if isinstance(item.result, Raw) and len(item.result) > limit:
            outcome.refused[item.task_id] = TooLarge(
                f"The result has {len(item.result)} bytes; the limit is {limit}. Write it to an output instead.",
                code="result_too_large",
            )
        return item.task_id not in outcome.refused

    async def _with_allowed_effects(
        self,
        connection: Connection,
        with_effects: list[Completion],
        items: list[Completion],
        outcome: _Outcome,
    ) -> list[Completion]:
        if not with_effects:
            return items
        ids = [item.task_id for item in with_effects]
        rows = await _sql.outputs_of(connection, shard=SMALL_SHARD, task_ids=ids)
        granted = {row["task_id"]: outputs_of(row) for row in rows}
        for item in with_effects:
            if item.task_id in granted:
                try:
                    check_effects(item.events, item.outputs, granted[item.task_id])
                except (BadRequest, Forbidden) as error:
                    outcome.refused[item.task_id] = error
        return [item for item in items if item.task_id not in outcome.refused]

    async def _wake_parked(self, rows: list[Row]) -> None:
        """After the commit: a wake-up that a crash loses here is found again by the reconciler."""
        jobs = sorted(rows[0]["freed_jobs"] or []) if rows else []
        if jobs:
            await self._database.run(lambda c: wake_parked(c, jobs, direct=self._settings.queue_direct))

    async def _explain_refusals(self, items: list[Completion], outcome: _Outcome) -> None:
        pending = [item for item in items if item.task_id not in outcome.refused]
        states = await self._fence_states([item.task_id for item in pending])
        for item in pending:
            state = states.get(item.task_id)
            if _already_said(state, item):
                status = TaskStatus(state["status"])  # type: ignore[index]  # _already_said is false for None
                outcome.ended[item.task_id] = CompletionReply(task_id=item.task_id, status=status, duplicate=True)
            else:
                outcome.refused[item.task_id] = _fenced(state, item)

    # Give back

    async def release(self, items: Sequence[Release]) -> int:
        items = _first_of_each(items)

        async def work(connection: Connection) -> list[Row]:
            rows: list[Row] = await _sql.release(
                connection,
                shard=SMALL_SHARD,
                task_ids=[i.task_id for i in items],
                attempts=[i.attempt for i in items],
                leases=[i.lease_token for i in items],
            )
            queued = [row["task_id"] for row in rows if row["status"] == "Queued"]
            if queued:
                await enqueue(connection, queued, direct=self._settings.queue_direct)
            await failpoint("release.before_commit")
            return rows

        rows = await self._database.run(work)
        await self._wake_parked(rows)
        return len(rows)

    async def _fence_states(self, ids: Sequence[UUID]) -> dict[UUID, Row]:
        if not ids:
            return {}
        async with self._database.connection() as connection:
            rows = await _sql.fence_states(connection, shard=SMALL_SHARD, task_ids=list(ids))
        return {row["task_id"]: row for row in rows}

    async def fenced(self, item: Release | Heartbeat) -> Fenced:
        """The error for an attempt that no longer holds its task."""
        return _fenced((await self._fence_states([item.task_id])).get(item.task_id), item)


async def enqueue(connection: Connection, task_ids: Sequence[UUID], *, direct: bool) -> None:
    """Wakes workers for tasks that were just queued, in the transaction that queued them."""
    await _jobs_sql.enqueue_tasks(connection, shard=SMALL_SHARD, task_ids=list(task_ids), direct=direct)


async def wake_parked(connection: Connection, jobs: Sequence[UUID], *, direct: bool) -> int:
    """Slots of these jobs were freed in this transaction: give them to tasks that waited."""
    await _sql.lock_capped_jobs(connection, job_ids=list(jobs))
    rows = await _sql.unpark(connection, job_ids=list(jobs))
    if rows:
        await enqueue(connection, [row["task_id"] for row in rows], direct=direct)
    return len(rows)


def outputs_of(job: Row) -> list[DatasetRef]:
    outputs: list[DatasetRef] = msgspec.json.decode(job["outputs"], type=list[DatasetRef])
    return outputs


def _wanted(request: ClaimRequest) -> _Wanted:
    message = request.message
    handle = Handle(message.message_id, message.receipt) if message else None
    queue = message.queue if message else None
    _check_handle(handle)
    if request.task_id is not None:
        return _Wanted([request.task_id], 1, handle=handle, queue=queue)
    if request.task_ids is not None:
        most = request.limit or max(1, len(request.task_ids))
        return _Wanted(list(dict.fromkeys(request.task_ids)), most, handle=handle, queue=queue)
    if request.run_id is None or request.start is None or request.end is None:
        raise BadRequest("Say what to claim: task_id, task_ids, or run_id with start and end.")
    size = request.end - request.start + 1
    if not 0 < size <= MAX_RANGE:
        raise BadRequest(f"A range holds 1 to {MAX_RANGE} tasks; {request.start}-{request.end} does not.")
    ids = [run_task_id(request.run_id, index) for index in range(request.start, request.end + 1)]
    return _Wanted(ids, request.limit or size, request.run_id, request.end, handle, queue)


def _check_handle(handle: Handle | None) -> None:
    if handle is not None:
        try:
            int(handle.message_id), UUID(handle.receipt)
        except ValueError:
            raise BadRequest("`message` is not a receipt of /internal/queue/receive.") from None


def _not_in(ids: list[UUID], rows: list[Row]) -> list[UUID]:
    taken = {row["task_id"] for row in rows}
    return [task_id for task_id in ids if task_id not in taken]


def _reason(state: Row | None) -> Reason:
    if state is None or not state["allowed"]:
        return "NotFound"
    if state["status"] == "Queued":
        # Capped and without a slot, or locked by a claim that is just winning it.
        return "LimitReached" if state["capped"] else "AlreadyRunning"
    if state["status"] == "Failed":
        return "Failed" if state["dead"] else "NotDue"
    reasons: dict[str, Reason] = {
        "Running": "AlreadyRunning",
        "Completed": "Completed",
        "Canceled": "Canceled",
    }
    return reasons[state["status"]]


Fence = Heartbeat | Completion | Release
F = Any


def _first_of_each(items: Sequence[F]) -> list[F]:
    """One item per task, in id order: two batches that overlap lock rows in the same order."""
    unique: dict[UUID, F] = {}
    for item in items:
        unique.setdefault(item.task_id, item)
    return [unique[task_id] for task_id in sorted(unique, key=lambda u: u.int)]


def _completion_arrays(items: list[Completion]) -> dict[str, Any]:
    return {
        "shard": SMALL_SHARD,
        "task_ids": [i.task_id for i in items],
        "attempts": [i.attempt for i in items],
        "leases": [i.lease_token for i in items],
        "statuses": [i.status for i in items],
        "error_classes": [_clean(i.error_class) for i in items],
        "error_messages": [_clean(i.error_message) for i in items],
        "results": [bytes(i.result).decode() if isinstance(i.result, Raw) else None for i in items],
        "crashes": [msgspec.json.encode(i.crash).decode() if i.crash else None for i in items],
    }


def _completion_reply(row: Row) -> CompletionReply:
    return CompletionReply(task_id=row["task_id"], status=TaskStatus(row["status"]), retry_at=row["retry_at"])


def _already_said(state: Row | None, item: Completion) -> bool:
    """The same report of the same attempt, again: a reply was lost, or a message was delivered twice."""
    return (
        state is not None
        and state["lease_token"] == item.lease_token
        and state["attempt"] == item.attempt
        and not state["late_reply"]
        and state["status"] == item.status
    )


def _fenced(state: Row | None, item: Fence) -> Fenced:
    if state is None:
        return Fenced("The attempt no longer holds this task.", stale="task")
    if state["attempt"] > item.attempt:
        return Fenced(f"Attempt {item.attempt} is over; the task is at attempt {state['attempt']}.", stale="attempt")
    if state["attempt"] < item.attempt:
        return Fenced(f"Attempt {item.attempt} has not started.", stale="attempt")
    if state["lease_token"] != item.lease_token:
        return Fenced("The lease belongs to another worker.", stale="lease_token")
    if state["status"] == "Running":
        return Fenced("The attempt has reached its hard timeout.", stale="timeout")
    return Fenced(f"The task is {state['status']} already.", stale="status")


def _refusal(task_id: UUID, error: InterlockError) -> Refusal:
    return Refusal(task_id=task_id, code=error.code, detail=error.detail, stale=error.extra.get("stale"))


def _raised(refusal: Refusal) -> Fenced:
    return Fenced(refusal.detail, stale=refusal.stale or "task")


def _clean(text: str | None) -> str | None:
    # Postgres text has no NUL.
    return text.replace("\x00", "\ufffd") if text else text
