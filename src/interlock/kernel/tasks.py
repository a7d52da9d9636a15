"""What workers do to tasks: claim, heartbeat, complete, give back. All of it fenced, all of it in batches."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
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
from interlock.failpoints import armed, failpoint
from interlock.kernel.effects import check_effects, write_effects
from interlock.settings import Settings
from interlock.telemetry import ATTEMPTS_ENDED, TASKS_CLAIMED
from interlock.wire import (
    ClaimBatchReply,
    ClaimGroup,
    ClaimRange,
    ClaimReply,
    ClaimRequest,
    Completion,
    CompletionBatchReply,
    CompletionReply,
    DatasetRef,
    FetchReply,
    GroupedTask,
    Heartbeat,
    HeartbeatBatchReply,
    HeartbeatReply,
    JobRef,
    Receipt,
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
_CACHED_JOBS = 10_000

Reason = Literal["AlreadyRunning", "Completed", "Failed", "Canceled", "NotFound", "LimitReached", "NotDue"]


def run_task_id(run_id: UUID, index: int) -> UUID:
    """The same function as interlock.run_task_id in SQL."""
    return UUID(bytes=hashlib.sha256(f"{run_id}:{index}".encode()).digest()[:16])


@dataclass(frozen=True)
class _Wanted:
    """A claim request: ids, ranges of runs, or the first `most` tasks of one range."""

    ids: list[UUID] = field(default_factory=list)
    ranges: list[ClaimRange] = field(default_factory=list)
    most: int | None = None
    messages: list[Receipt] = field(default_factory=list)


@dataclass(frozen=True)
class _Job:
    """What a claim needs of a job's definition."""

    ref: JobRef
    operator: str
    config: Raw
    outputs: list[DatasetRef]


@dataclass
class _Outcome:
    """The fate of a batch of completions."""

    rows: list[Row] = field(default_factory=list)
    """Tasks that this batch ended."""
    repeated: list[Row] = field(default_factory=list)
    """Tasks that had ended in just this way before."""
    refused: dict[UUID, InterlockError] = field(default_factory=dict)


class Tasks:
    def __init__(self, database: Database, settings: Settings, queue: Queue, tokens: CapabilityTokens) -> None:
        self._database = database
        self._settings = settings
        self._queue = queue
        self._tokens = tokens
        self._objects_root = settings.objects_root
        self._known_jobs: dict[tuple[UUID, str], _Job] = {}

    # Claim

    async def claim(self, request: ClaimRequest, worker: WorkerIdentity) -> ClaimBatchReply:
        wanted = _wanted(request)
        who = {"worker_id": _clean(request.worker_id), "runtimes": self._reach(worker)}
        rows, states = await self._database.run(lambda c: self._claim_free(c, wanted, who), transaction=False)
        capped = sorted({s["job_id"] for s in states if s["capped"] and s["status"] == "Queued" and s["allowed"]})
        if capped:
            rows += await self._claim_capped([s["task_id"] for s in states], capped, who | {"most": wanted.most})
        await failpoint("claim.committed")
        TASKS_CLAIMED.inc(len(rows))
        left = await self._settle(wanted, rows)
        jobs = await self._jobs({(row["job_id"], row["job_version"]) for row in rows})
        together = [row for row in rows if request.grouped and not request.tokens and not jobs[row["job_id"]].outputs]
        apart = rows if not together else [row for row in rows if jobs[row["job_id"]].outputs]
        claims = await self._claims(apart, jobs, tokens=request.tokens)
        claims += _not_claimed(wanted, rows, states)
        return ClaimBatchReply(claims=claims, groups=_groups(together, jobs), remaining=left)

    def _reach(self, worker: WorkerIdentity) -> list[str] | None:
        """The worker's runtimes by every name that leads to the same queue: a job keeps the alias it was given."""
        if worker.runtimes is None:
            return None
        names = self._settings.runtime_names
        mine = {self._settings.runtime(name).queue for name in worker.runtimes if name in names}
        return [name for name in names if self._settings.runtime(name).queue in mine]

    async def _claim_free(
        self, connection: Connection, wanted: _Wanted, who: dict[str, Any]
    ) -> tuple[list[Row], list[Row]]:
        """What was claimed, and the state of what was not but may be said more about."""
        if wanted.ids:
            rows = await _sql.claim(connection, shard=SMALL_SHARD, task_ids=wanted.ids, **who)
        elif wanted.most is not None:
            only = wanted.ranges[0]
            span = {"run_id": only.run_id, "first": only.start, "last": only.end}
            rows = await _sql.claim_range_start(connection, shard=SMALL_SHARD, most=wanted.most, **span, **who)
        else:
            rows = await _sql.claim_ranges(connection, shard=SMALL_SHARD, **_spans(wanted.ranges), **who)
        left = _not_in(wanted.ids, rows) or _ids_of_empty(wanted.ranges, rows)
        if not left:
            return rows, []
        states = await _sql.claim_states(connection, shard=SMALL_SHARD, task_ids=left, runtimes=who["runtimes"])
        return rows, states

    async def _claim_capped(self, ids: list[UUID], jobs: list[UUID], how: dict[str, Any]) -> list[Row]:
        async def work(connection: Connection) -> list[Row]:
            await _sql.lock_capped_jobs(connection, job_ids=jobs)
            rows: list[Row] = await _sql.claim_capped(connection, shard=SMALL_SHARD, task_ids=ids, job_ids=jobs, **how)
            await failpoint("claim.before_commit")
            return rows

        return await self._database.run(work)

    async def _settle(self, wanted: _Wanted, rows: list[Row]) -> int:
        """After the claim has committed: a message that a crash leaves behind finds nothing to claim next time."""
        by_queue: defaultdict[str, list[Handle]] = defaultdict(list)
        for message in wanted.messages:
            by_queue[message.queue].append(Handle(message.message_id, message.receipt))
        left = 0
        for queue, handles in by_queue.items():
            left = await self._give_back_rest(wanted, rows, queue, handles[0])
            if not left:
                await self._queue.ack(queue, handles)
        return left

    async def _give_back_rest(self, wanted: _Wanted, rows: list[Row], queue: str, handle: Handle) -> int:
        """How many tasks of a range are left for others, when the worker had room for its start only."""
        if wanted.most is None or len(rows) < wanted.most:
            return 0
        only = wanted.ranges[0]
        last = max(row["task_index"] for row in rows)
        if last < only.end:
            rest = {"job_id": rows[0]["job_id"], "run_id": only.run_id, "start": last + 1, "end": only.end}
            await self._queue.replace(queue, handle, msgspec.json.encode(rest).decode())
        return only.end - int(last)

    async def _claims(self, rows: list[Row], jobs: dict[UUID, _Job], *, tokens: bool) -> list[ClaimReply]:
        replies = []
        for row in rows:
            task = self._payload(row, jobs[row["job_id"]])
            token = None
            if tokens:
                token = await self._tokens.issue(
                    Grant(task.org_id, task.task_id, task.attempt, task.outputs), row["kid"]
                )
            replies.append(
                ClaimReply(
                    status="Claimed",
                    task_id=task.task_id,
                    attempt=task.attempt,
                    lease_token=row["lease_token"],
                    lease_expires_at=row["lease_expires_at"],
                    capability_token=token,
                    task=task,
                )
            )
        return replies

    async def _jobs(self, wanted: set[tuple[UUID, str]]) -> dict[UUID, _Job]:
        """Definitions by id and row version: a cached one is never out of date."""
        missing = [key for key in wanted if key not in self._known_jobs]
        if missing:
            if len(self._known_jobs) > _CACHED_JOBS:
                self._known_jobs.clear()
            async with self._database.connection() as connection:
                found = await _sql.claimed_jobs(connection, job_ids=[job_id for job_id, _ in missing])
            self._known_jobs |= {(row["job_id"], row["version"]): _job(row) for row in found}
            # A definition replaced since the claim: the newer one is as good.
            newest = {row["job_id"]: _job(row) for row in found}
            return {job_id: self._known_jobs.get((job_id, version)) or newest[job_id] for job_id, version in wanted}
        return {key[0]: self._known_jobs[key] for key in wanted}

    def _payload(self, row: Row, job: _Job) -> TaskPayload:
        task_id, attempt = row["task_id"], row["attempt"]
        outputs = write_grants(self._objects_root, task_id, attempt, job.outputs) if job.outputs else []
        return TaskPayload(
            task_id=task_id,
            attempt=attempt,
            job_id=row["job_id"],
            job=job.ref,
            operator=job.operator,
            config=job.config,
            inputs=[],
            payload=Raw(row["payload"]),
            org_id=row["org_id"],
            run_id=row["run_id"],
            index=row["task_index"],
            outputs=outputs,
            timeout_at=row["timeout_at"],
        )

    async def fetch(self, task_id: UUID, worker: WorkerIdentity) -> FetchReply:
        async with self._database.connection() as connection:
            row = await _sql.fetch_task(connection, shard=SMALL_SHARD, task_id=task_id, runtimes=self._reach(worker))
        if row is None:
            raise NotFound(f"There is no task {task_id}.")
        status = TaskStatus.CANCELED if row["cancel_requested"] else TaskStatus(row["status"])
        return FetchReply(status=status, task=self._payload(row, _job(row)))

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
            await failpoint("heartbeat.before_commit")
            return rows

        rows = {
            row["task_id"]: row for row in await self._database.run(work, transaction=armed("heartbeat.before_commit"))
        }
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
            outputs = write_grants(self._objects_root, item.task_id, item.attempt, outputs_of(row))
            token = await self._tokens.issue(Grant(row["org_id"], item.task_id, item.attempt, outputs), kid)
        return HeartbeatReply(
            status="Running",
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
        return CompletionBatchReply(accepted=len(outcome.rows) + len(outcome.repeated), refused=refused)

    async def complete_one(self, item: Completion) -> CompletionReply:
        outcome = await self._complete([item])
        if outcome.refused:
            raise outcome.refused[item.task_id]
        if outcome.repeated:
            status = TaskStatus(outcome.repeated[0]["status"])
            return CompletionReply(task_id=item.task_id, status=status, duplicate=True)
        row = outcome.rows[0]
        return CompletionReply(task_id=item.task_id, status=TaskStatus(row["status"]), retry_at=row["retry_at"])

    async def _complete(self, items: Sequence[Completion]) -> _Outcome:
        outcome = _Outcome()
        unique = _first_of_each(items)
        sane = [item for item in unique if self._acceptable(item, outcome)]
        with_effects = [item for item in sane if item.events or item.outputs]

        async def work(connection: Connection) -> list[Row]:
            allowed = await self._with_allowed_effects(connection, with_effects, sane, outcome)
            rows: list[Row] = await _sql.complete(connection, **_completion_arrays(allowed)) if allowed else []
            orgs = {row["task_id"]: row["org_id"] for row in rows} if with_effects else {}
            for item in with_effects:
                if item.task_id in orgs and item.status == "Completed":
                    await write_effects(connection, item, orgs[item.task_id])
            await failpoint("complete.before_commit")
            return rows

        # One statement is a transaction of its own; only effects need an explicit one.
        explicit = bool(with_effects) or armed("complete.before_commit")
        rows = await self._database.run(work, transaction=explicit)
        await failpoint("complete.committed")
        await self._wake_parked(rows)
        outcome.rows = rows
        for status, count in Counter([row["status"] for row in rows]).items():
            ATTEMPTS_ENDED.labels(outcome=status).inc(count)
        if len(rows) < len(sane):
            taken = {row["task_id"] for row in rows}
            await self._explain_refusals([item for item in sane if item.task_id not in taken], outcome)
        return outcome

    def _acceptable(self, item: Completion, outcome: _Outcome) -> bool:
        limit = self._settings.result_limit_bytes
        if isinstance(item.result, Raw) and len(item.result) > limit:
            outcome.refused[item.task_id] = TooLarge(
                f"The result has {len(item.result)} bytes; the limit is {limit}. Write it to an output instead.",
                code="result_too_large",
            )
        elif isinstance(item.result, Raw) and not _is_utf8(item.result):
            outcome.refused[item.task_id] = BadRequest("The result is not JSON in UTF-8.", code="bad_result")
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
            keys = rows[0]["freed_keys"]
            await self._database.run(lambda c: wake_parked(c, jobs, keys, direct=self._settings.queue_direct))

    async def _explain_refusals(self, items: list[Completion], outcome: _Outcome) -> None:
        pending = [item for item in items if item.task_id not in outcome.refused]
        states = await self._fence_states([item.task_id for item in pending])
        for item in pending:
            state = states.get(item.task_id)
            if state is not None and _already_said(state, item):
                outcome.repeated.append(state)
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


async def wake_parked(connection: Connection, jobs: Sequence[UUID], keys: Sequence[str], *, direct: bool) -> int:
    """Slots of these jobs and concurrency keys were freed: give them to tasks that waited."""
    await _sql.lock_capped_jobs(connection, job_ids=list(jobs))
    rows = await _sql.unpark(connection, job_ids=list(jobs), keys=list(keys))
    if rows:
        await enqueue(connection, [row["task_id"] for row in rows], direct=direct)
    return len(rows)


def outputs_of(job: Row) -> list[DatasetRef]:
    outputs: list[DatasetRef] = msgspec.json.decode(job["outputs"], type=list[DatasetRef])
    return outputs


def _wanted(request: ClaimRequest) -> _Wanted:
    messages = [request.message] if request.message else []
    if request.task_id is not None:
        return _Wanted(ids=[request.task_id], messages=messages)
    if request.task_ids:
        return _Wanted(ids=list(dict.fromkeys(request.task_ids))[: request.limit], messages=messages)
    if request.ranges:
        _check_sizes(request.ranges)
        messages += [span.message for span in request.ranges if span.message]
        return _Wanted(ranges=request.ranges, messages=messages)
    if request.run_id is None or request.start is None or request.end is None:
        raise BadRequest("Say what to claim: task_id, task_ids, ranges, or run_id with start and end.")
    only = ClaimRange(request.run_id, request.start, request.end)
    size = _check_sizes([only])
    most = request.limit if request.limit is not None and request.limit < size else None
    return _Wanted(ranges=[only], most=most, messages=messages)


def _check_sizes(ranges: Sequence[ClaimRange]) -> int:
    for span in ranges:
        if span.end < span.start:
            raise BadRequest(f"A range ends where it starts or later; {span.start}-{span.end} does not.")
    size = sum(span.end - span.start + 1 for span in ranges)
    if size > MAX_RANGE:
        raise BadRequest(f"A claim takes at most {MAX_RANGE} tasks; these ranges hold {size}.")
    return size


def _spans(ranges: Sequence[ClaimRange]) -> dict[str, Any]:
    return {
        "run_ids": [span.run_id for span in ranges],
        "firsts": [span.start for span in ranges],
        "lasts": [span.end for span in ranges],
    }


def _ids_of_empty(ranges: Sequence[ClaimRange], rows: list[Row]) -> list[UUID]:
    """Ids of ranges that gave nothing: their job may be capped."""
    fruitful = {row["run_id"] for row in rows}
    return [
        run_task_id(span.run_id, index)
        for span in ranges
        if span.run_id not in fruitful
        for index in range(span.start, span.end + 1)
    ]


def _job(row: Row) -> _Job:
    ref = JobRef(dag_name=row["dag_name"], name=row["name"])
    return _Job(ref, row["operator"], Raw(row["config"]), outputs_of(row))


def _groups(rows: list[Row], jobs: dict[UUID, _Job]) -> list[ClaimGroup]:
    """One statement claimed them, so tasks of a job share its lease and its timeout."""
    by_run: defaultdict[tuple[UUID, UUID | None], list[Row]] = defaultdict(list)
    for row in rows:
        by_run[row["job_id"], row["run_id"]].append(row)
    return [_group(members, jobs[job_id]) for (job_id, _), members in by_run.items()]


def _group(rows: list[Row], job: _Job) -> ClaimGroup:
    first = rows[0]
    return ClaimGroup(
        job_id=first["job_id"],
        job=job.ref,
        operator=job.operator,
        config=job.config,
        org_id=first["org_id"],
        run_id=first["run_id"],
        lease_expires_at=first["lease_expires_at"],
        timeout_at=first["timeout_at"],
        tasks=[
            GroupedTask(row["task_id"], row["attempt"], row["lease_token"], row["task_index"], Raw(row["payload"]))
            for row in rows
        ],
    )


def _not_claimed(wanted: _Wanted, rows: list[Row], states: list[Row]) -> list[ClaimReply]:
    """A verdict for every id that was asked for by name; a range is only told what it got."""
    taken = {row["task_id"] for row in rows}
    found = {state["task_id"]: state for state in states}
    return [
        ClaimReply(status="NotClaimed", task_id=task_id, reason=_reason(found.get(task_id)))
        for task_id in wanted.ids
        if task_id not in taken
    ]


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
    unique: dict[int, F] = {}
    for item in items:
        # By int: a UUID's own hash is Python code, and this is the hot path.
        unique.setdefault(item.task_id.int, item)
    return [unique[key] for key in sorted(unique)]


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


def _already_said(state: Row | None, item: Completion) -> bool:
    """The same report of the same attempt, again: a reply was lost, or a message was delivered twice."""
    if state is None or state["late_reply"]:
        return False
    # A failure after a cancel became the cancel.
    said = "Canceled" if item.status == "Failed" and state["cancel_requested"] else item.status
    return bool(
        state["lease_token"] == item.lease_token and state["attempt"] == item.attempt and state["status"] == said
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


def _is_utf8(raw: Raw) -> bool:
    try:
        bytes(raw).decode()
    except UnicodeDecodeError:
        return False
    return True


def _clean(text: str | None) -> str | None:
    # Postgres text has no NUL.
    return text.replace("\x00", "\ufffd") if text else text
