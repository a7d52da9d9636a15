"""Claims: takes leases on tasks, by id, by list of ids, or by ranges of runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from typing import Any, Literal
from uuid import UUID

import msgspec
from msgspec import Raw, Struct

from interlock.access.principals import WorkerIdentity
from interlock.access.secrets import Secrets
from interlock.access.tokens import CapabilityTokens, Grant, write_grants
from interlock.errors import BadRequest, NotFound
from interlock.failpoints import armed, failpoint
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, isolated, queries
from interlock.tasks.completion import Attempts, clean, outputs_of
from interlock.tasks.dataset_changes import Inputs
from interlock.tasks.limits import Rates, RunSlots
from interlock.tasks.operators import NOT_ALLOWED, Operators, refusal
from interlock.tasks.queue import Handle, Queue
from interlock.tasks.shards import SMALL_SHARD, Shards, find_task, run_task_id
from interlock.telemetry import TASKS_CLAIMED
from interlock.wire.access import TaskSecret, secret_names
from interlock.wire.attempts import (
    ClaimBatchReply,
    ClaimGroup,
    ClaimRange,
    ClaimReply,
    ClaimRequest,
    Completion,
    FetchReply,
    GroupedTask,
    Receipt,
    TaskInput,
    TaskPayload,
)
from interlock.wire.base import TaskStatus
from interlock.wire.jobs import DatasetRef
from interlock.wire.tasks import JobRef

_sql = queries(__name__, "tasks")
_shards_sql = queries(__name__, "shards")

MAX_RANGE = 10_000
_CACHED_JOBS = 10_000
_LOCKED_SECONDS = 0.2
"""Delay before retrying a range when nothing could be claimed because other transactions had locked its rows."""

Reason = Literal["AlreadyRunning", "Completed", "Failed", "Canceled", "NotFound", "LimitReached", "NotDue"]


@dataclass(frozen=True)
class _Wanted:
    """A claim request: ids, ranges of runs, or the first `limit` tasks of one range."""

    ids: list[UUID] = field(default_factory=list)
    ranges: list[ClaimRange] = field(default_factory=list)
    limit: int | None = None
    messages: list[Receipt] = field(default_factory=list)


@dataclass(frozen=True)
class _Due:
    """Tasks of a range that may start now (None for all), the first index left for later, and the delay until then."""

    ids: list[UUID] | None
    left: int | None
    wait_seconds: float


@dataclass(frozen=True)
class _Job:
    """The parts of a job's definition that a claim needs."""

    ref: JobRef
    operator: str
    config: Raw
    outputs: list[DatasetRef]
    inputs: list[TaskInput]
    together: bool
    """True if a task covers the same scope of every input, not of one input only."""
    partition: str | None
    secrets: tuple[str, ...]
    """Names of the secrets that the config refers to."""

    def inputs_for(self, payload: Raw) -> list[TaskInput]:
        try:
            scope = _scope.decode(payload)
        except (msgspec.MsgspecError, RecursionError):
            return self.inputs
        return [
            msgspec.structs.replace(each, **scope.fields())
            if self.together or each.input_index == scope.input_index
            else each
            for each in self.inputs
        ]


class _Scope(Struct, frozen=True):
    """The part of a task's payload that selects a scope of its inputs."""

    start: int
    end: int
    input_index: int = 0
    partition_key: str | None = None
    cursor: int | None = None
    changed_start: int | None = None
    changed_end: int | None = None

    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__ if name != "input_index"}


_scope = msgspec.json.Decoder(_Scope)


class _Owner(Struct, frozen=True):
    job_id: UUID
    org_id: UUID
    run_id: UUID | None
    timeout_at: datetime


class _Lease(_Owner, frozen=True):
    """Fields shared by tasks of one job that were claimed together."""

    job_version: str
    lease_token: UUID
    lease_expires_at: datetime
    kid: str


@dataclass(frozen=True)
class _Group:
    """Claimed tasks under one lease, at the same attempt."""

    lease: _Lease
    attempt: int
    tasks: list[GroupedTask]


_lease = msgspec.json.Decoder(_Lease)


@dataclass(frozen=True)
class Gates:
    """Services that decide which queued tasks may start, and that fail tasks that never may."""

    turns: RunSlots
    rates: Rates
    operators: Operators
    tasks: Attempts


class Claims:
    def __init__(
        self,
        database: Database,
        settings: Settings,
        queue: Queue,
        tokens: CapabilityTokens,
        inputs: Inputs,
        shards: Shards,
        gates: Gates,
        secrets: Secrets,
    ) -> None:
        self._database = database
        self._settings = settings
        self._queue = queue
        self.shards = shards
        self._turns, self._rates = gates.turns, gates.rates
        self._operators, self._tasks = gates.operators, gates.tasks
        self._secrets = secrets
        self._tokens = tokens
        self._inputs = inputs
        self._objects_root = settings.objects_root
        self._known_jobs: dict[tuple[UUID, str], _Job] = {}

    async def claim(self, request: ClaimRequest, worker: WorkerIdentity) -> ClaimBatchReply:
        wanted = _wanted(request)
        who = {"worker_id": clean(request.worker_id), "runtimes": self._reach(worker)}
        if request.tokens:
            await self._tokens.require_signing()
        groups, states = list[_Group](), list[Row]()
        wanted, limited = await self._with_limits(wanted)
        remaining = 0
        for span in limited:
            done, _ = await isolated("claim", [span], lambda only: self._claim_in_turn(only[0], wanted.limit, who))
            for claimed, left_over in done:
                groups, remaining = groups + claimed, remaining + left_over
        for shard, part in (await self._by_shard(wanted)).items():
            claimed, left = await self._claim_in(shard, part, who)
            groups, states = groups + claimed, states + left
        if unknown := _unknown(wanted.ids, groups, states):
            claimed, left = await self._claim_elsewhere(unknown, who)
            groups, states = groups + claimed, states + left
        await failpoint("claim.committed")
        TASKS_CLAIMED.inc(sum(len(group.tasks) for group in groups))
        remaining += await self._settle(wanted, groups, who)
        jobs = await self._jobs({(group.lease.job_id, group.lease.job_version) for group in groups})
        groups = await self._allowed(groups, jobs)
        together, claims = [], []
        for group in groups:
            job = jobs[group.lease.job_id]
            secrets = await self._secrets.opened(group.lease.org_id, job.secrets) if job.secrets else []
            if request.grouped and not request.tokens and not job.outputs and not job.inputs:
                together.append(_claim_group(group, job, secrets))
            else:
                claims += await self._claims(group, job, secrets, tokens=request.tokens)
        claims += _not_claimed(wanted, groups, states)
        return ClaimBatchReply(claims=claims, groups=together, remaining=remaining)

    async def _allowed(self, groups: list[_Group], jobs: dict[UUID, _Job]) -> list[_Group]:
        """Fails attempts of operators that their org may not use, and returns the other groups.

        A job may be older than its org's limit and reach this point through a schedule, a rerun or an event. No worker
        receives its tasks.
        """
        limits = await self._operators.limits()
        allowed = list[_Group]()
        for group in groups:
            job = jobs[group.lease.job_id]
            reason = refusal(limits, group.lease.org_id, job.operator, job.config) if limits else None
            if reason is None:
                allowed.append(group)
            else:
                await self._tasks.complete([_refused(group, task.task_id, reason) for task in group.tasks])
        return allowed

    async def _by_shard(self, wanted: _Wanted) -> dict[int, _Wanted]:
        """Splits a request by shard. Tasks claimed by id are almost always in shard 0; a range's run has a shard."""
        if wanted.ids:
            return {SMALL_SHARD: wanted}
        shards = await self.shards.of_runs([span.run_id for span in wanted.ranges])
        parts: defaultdict[int, list[ClaimRange]] = defaultdict(list)
        for span in wanted.ranges:
            if span.run_id in shards:
                parts[shards[span.run_id]].append(span)
        return {shard: replace(wanted, ranges=spans) for shard, spans in parts.items()}

    async def _with_limits(self, wanted: _Wanted) -> tuple[_Wanted, list[ClaimRange]]:
        """Separates the ranges of runs that have their own concurrency or rate limits."""
        runs = [span.run_id for span in wanted.ranges]
        limits = (await self.shards.limited(runs)).keys() | (await self.shards.rates(runs)).keys() if runs else set()
        if not limits:
            return wanted, []
        apart = [span for span in wanted.ranges if span.run_id in limits]
        theirs = [span.message for span in apart]
        rest = [span for span in wanted.ranges if span.run_id not in limits]
        messages = [message for message in wanted.messages if message not in theirs]
        return replace(wanted, ranges=rest, messages=messages), apart

    async def _claim_in_turn(self, span: ClaimRange, room: int | None, who: dict[str, Any]) -> tuple[list[_Group], int]:
        """Claims the tasks that the run's limits allow now. The rest of the range waits, or is left to other workers.

        Returns the claimed groups and the number of tasks that the caller must claim again.
        """
        size = span.end - span.start + 1
        asked = min(size, room or size)
        limit = (await self.shards.limited([span.run_id])).get(span.run_id)
        granted = asked if limit is None else await self._turns.take(span.run_id, limit, asked)
        if granted is None:
            return [], await self._settle_rest(span, span.start, None, self._rates.deferrals.next("max_concurrency"))
        shard = (await self.shards.of_runs([span.run_id]))[span.run_id]
        due = await self._due(span, shard, granted) if granted else _Due(None, span.start, 0.0)
        groups = list[_Group]()
        if granted and due.ids != []:
            part = _Wanted(ranges=[span], limit=granted) if due.ids is None else _Wanted(ids=due.ids)
            groups, _ = await self._claim_in(shard, part, who)
        taken = [task.index for group in groups for task in group.tasks if task.index is not None]
        if limit is not None and len(taken) < granted:
            await self._turns.give_back(span.run_id, granted - len(taken))
        left, delay = due.left, due.wait_seconds
        if left is None:
            left, delay = await self._next_queued(span, taken, granted, who), 0.0 if taken else _LOCKED_SECONDS
        return groups, await self._settle_rest(span, left, limit if granted < asked else None, delay)

    async def _due(self, span: ClaimRange, shard: int, limit: int) -> _Due:
        """Selects the tasks that their keys' rate limits allow now; all of them if the run has no rate limit."""
        rate = (await self.shards.rates([span.run_id])).get(span.run_id)
        if rate is None:
            return _Due(None, None, 0.0)
        where = {"shard": shard, "run_id": span.run_id, "first": span.start, "last": span.end}
        async with self._database.connection() as connection:
            rows = await _shards_sql.queued_payloads(connection, limit=limit, **where)
        admitted = await self._rates.admit(span.run_id, rate, [row["payload"] for row in rows])
        places = set(admitted.places)
        later = [row["task_index"] for place, row in enumerate(rows) if place not in places]
        beyond = rows[-1]["task_index"] + 1 if len(rows) == limit else span.end + 1
        ids = [rows[place]["task_id"] for place in admitted.places]
        return _Due(ids, min(later, default=beyond), admitted.wait_seconds)

    async def _settle_rest(self, span: ClaimRange, left: int, limit: int | None, delay: float) -> int:
        """Keeps a message for the rest of a range.

        With a concurrency limit the rest waits for a slot. Otherwise it becomes visible again after `delay`; the delay
        is 0 if the worker had no room. Returns the number of tasks that the caller must claim again because it holds no
        message for them.
        """
        stays = left <= span.end
        if stays and limit is not None:
            again = await self._turns.wait(span.run_id, limit, left, span.end)
            stays, delay = again is not None, again or 0.0
        if span.message is None:
            return span.end + 1 - left if stays else 0
        handle = Handle(span.message.message_id, span.message.receipt)
        if stays:
            await self._keep_rest(span, span.message.queue, handle, left, delay)
        else:
            await self._queue.ack(span.message.queue, [handle])
        return 0

    async def _claim_elsewhere(self, ids: list[UUID], who: dict[str, Any]) -> tuple[list[_Group], list[Row]]:
        """Claims tasks that a caller named by id only and that are not in shard 0."""
        found: defaultdict[int, list[UUID]] = defaultdict(list)
        async with self._database.connection() as connection:
            for task_id in ids:
                if shard := await find_task(connection, task_id):
                    found[shard].append(task_id)
        groups, states = list[_Group](), list[Row]()
        for shard, here in found.items():
            claimed, left = await self._claim_in(shard, _Wanted(ids=here), who)
            groups, states = groups + claimed, states + left
        return groups, states

    async def _claim_in(self, shard: int, wanted: _Wanted, who: dict[str, Any]) -> tuple[list[_Group], list[Row]]:
        held = armed("claim.before_commit")
        groups, states = await self._database.run(lambda c: self._claim_free(c, shard, wanted, who), transaction=held)
        capped = sorted({state["job_id"] for state in states if _may_be_capped(state)})
        if capped:
            how = who | {"shard": shard, "limit": wanted.limit}
            groups += await self._claim_capped([s["task_id"] for s in states], capped, how)
        return groups, states

    def _reach(self, worker: WorkerIdentity) -> list[str] | None:
        """Returns every runtime name that leads to the worker's queues: a job keeps the alias it was declared with."""
        if worker.runtimes is None:
            return None
        names = self._settings.runtime_names
        mine = {self._settings.runtime(name).queue for name in worker.runtimes if name in names}
        return [name for name in names if self._settings.runtime(name).queue in mine]

    async def _claim_free(
        self, connection: Connection, shard: int, wanted: _Wanted, who: dict[str, Any]
    ) -> tuple[list[_Group], list[Row]]:
        """Claims tasks of jobs without a concurrency cap. Returns the groups, and the states of tasks not claimed."""
        if wanted.ids:
            groups = _grouped(await _sql.claim(connection, shard=shard, task_ids=wanted.ids, **who))
        elif wanted.limit is not None:
            only = wanted.ranges[0]
            span = {"run_id": only.run_id, "first": only.start, "last": only.end}
            rows = await _sql.claim_range_start(connection, shard=shard, limit=wanted.limit, **span, **who)
            groups = _grouped(rows)
        else:
            rows = await _sql.claim_ranges(connection, shard=shard, **_spans(wanted.ranges), **who)
            groups = _by_range(rows)
        if groups:
            await failpoint("claim.before_commit")
        left = _not_in(wanted.ids, groups) or _ids_of_empty(wanted.ranges, groups)
        if not left:
            return groups, []
        states = await _sql.claim_states(connection, shard=shard, task_ids=left, runtimes=who["runtimes"])
        return groups, states

    async def _claim_capped(self, ids: list[UUID], jobs: list[UUID], how: dict[str, Any]) -> list[_Group]:
        async def claim(connection: Connection, some: Sequence[UUID]) -> list[_Group]:
            await _sql.lock_capped_jobs(connection, job_ids=jobs)
            rows = await _sql.claim_capped(connection, task_ids=list(some), job_ids=jobs, **how)
            await failpoint("claim.before_commit")
            return _grouped(rows)

        done, aside = await isolated("claim", ids, lambda some: self._database.run(lambda c: claim(c, some)))
        if aside:  # a key that does not fit into an index entry
            unfit = {"shard": how["shard"], "task_ids": [task_id for task_id, _ in aside]}
            await self._database.run(lambda c: _sql.fail_unclaimable(c, **unfit))
        return [*chain.from_iterable(done)]

    async def _settle(self, wanted: _Wanted, groups: list[_Group], who: dict[str, Any]) -> int:
        """Acks messages after the claim has committed. If a crash skips this, the next claim finds nothing to claim."""
        by_queue: defaultdict[str, list[Handle]] = defaultdict(list)
        for message in wanted.messages:
            by_queue[message.queue].append(Handle(message.message_id, message.receipt))
        left = 0
        for queue, handles in by_queue.items():
            left = await self._give_back_rest(wanted, groups, queue, handles[0], who)
            if not left:
                await self._queue.ack(queue, handles)
        return left

    async def _give_back_rest(
        self, wanted: _Wanted, groups: list[_Group], queue: str, handle: Handle, who: dict[str, Any]
    ) -> int:
        """Returns how many tasks of a range are left for others when the worker had room for its start only."""
        if wanted.limit is None:
            return 0
        only = wanted.ranges[0]
        taken = [task.index for group in groups for task in group.tasks if task.index is not None]
        start = await self._next_queued(only, taken, wanted.limit, who)
        if start <= only.end:
            await self._keep_rest(only, queue, handle, start, 0.0 if taken else _LOCKED_SECONDS)
        return only.end + 1 - start

    async def _next_queued(self, span: ClaimRange, taken: Sequence[int], limit: int, who: dict[str, Any]) -> int:
        """Returns the first index of the range that is left to claim, or the one after its end.

        A partial claim skips locked rows. If it took the first `limit` indexes it has skipped none. Otherwise a skipped
        row may be unlocked unchanged, by a rollback or by the sweep of files, so it must keep a message.
        """
        if len(taken) == limit and max(taken) == span.start + limit - 1:
            return span.start + limit
        shards = await self.shards.of_runs([span.run_id])
        if span.run_id not in shards:
            return span.end + 1
        where = {"shard": shards[span.run_id], "run_id": span.run_id, "first": span.start, "last": span.end}
        async with self._database.connection() as connection:
            index: int | None = await _sql.next_queued(connection, runtimes=who["runtimes"], **where)
        return span.end + 1 if index is None else index

    async def _keep_rest(self, span: ClaimRange, queue: str, handle: Handle, start: int, delay: float) -> None:
        jobs = await self.shards.jobs_of([span.run_id])
        rest = {"job_id": jobs[span.run_id], "run_id": span.run_id, "start": start, "end": span.end}
        await self._queue.replace(queue, handle, msgspec.json.encode(rest).decode(), delay_seconds=delay)

    async def _claims(self, group: _Group, job: _Job, secrets: list[TaskSecret], *, tokens: bool) -> list[ClaimReply]:
        lease, attempt = group.lease, group.attempt
        tasks = [self._payload(one, attempt, lease, job) for one in group.tasks]
        issued: Sequence[str | None] = [None] * len(tasks)
        if tokens:
            grants = [Grant(lease.org_id, task.task_id, attempt, task.outputs, job.inputs) for task in tasks]
            issued = await self._tokens.issue(grants, lease.kid)
        return [
            ClaimReply(
                status="Claimed",
                task_id=task.task_id,
                attempt=attempt,
                lease_token=lease.lease_token,
                lease_expires_at=lease.lease_expires_at,
                capability_token=token,
                task=task,
                secrets=secrets,
            )
            for task, token in zip(tasks, issued, strict=True)
        ]

    async def _jobs(self, wanted: set[tuple[UUID, str]]) -> dict[UUID, _Job]:
        """Returns job definitions, cached by id and row version: a cached entry is never stale."""
        missing = [key for key in wanted if key not in self._known_jobs]
        if missing:
            if len(self._known_jobs) > _CACHED_JOBS:
                self._known_jobs.clear()
            async with self._database.connection() as connection:
                found = await _sql.claimed_jobs(connection, job_ids=[job_id for job_id, _ in missing])
                inputs = await self._inputs.of(connection, _reading(found))
            # A definition may have been replaced since the claim. Using the newer one is correct.
            newest = {row["job_id"]: _job(row, inputs) for row in found}
            self._known_jobs |= {(row["job_id"], row["version"]): newest[row["job_id"]] for row in found}
            return {job_id: self._known_jobs.get((job_id, version)) or newest[job_id] for job_id, version in wanted}
        return {key[0]: self._known_jobs[key] for key in wanted}

    def _payload(self, task: GroupedTask, attempt: int, owner: _Owner, job: _Job) -> TaskPayload:
        outputs = write_grants(self._objects_root, task.task_id, attempt, job.outputs) if job.outputs else []
        return TaskPayload(
            task_id=task.task_id,
            attempt=attempt,
            job_id=owner.job_id,
            job=job.ref,
            operator=job.operator,
            config=job.config,
            inputs=job.inputs_for(task.payload) if job.inputs else [],
            payload=task.payload,
            org_id=owner.org_id,
            run_id=owner.run_id,
            index=task.index,
            outputs=outputs,
            partition=job.partition,
            timeout_at=owner.timeout_at,
        )

    async def fetch(self, task_id: UUID, worker: WorkerIdentity) -> FetchReply:
        async with self._database.connection() as connection:
            shard = await find_task(connection, task_id)
            row = await _sql.fetch_task(connection, shard=shard, task_id=task_id, runtimes=self._reach(worker))
            if row is None:
                raise NotFound(f"There is no task {task_id}.")
            job = _job(row, await self._inputs.of(connection, _reading([row])))
        status = TaskStatus.CANCELED if row["cancel_requested"] else TaskStatus(row["status"])
        task = GroupedTask(row["task_id"], row["task_index"], Raw(row["payload"]))
        owner = _Owner(row["job_id"], row["org_id"], row["run_id"], row["timeout_at"])
        return FetchReply(status=status, task=self._payload(task, row["attempt"], owner, job))


def _refused(group: _Group, task_id: UUID, reason: str) -> Completion:
    return Completion(
        task_id=task_id,
        attempt=group.attempt,
        lease_token=group.lease.lease_token,
        status="Failed",
        error_class=NOT_ALLOWED,
        error_message=reason,
    )


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
        raise BadRequest("The claim names no tasks: give task_id, task_ids, ranges, or run_id with start and end.")
    only = ClaimRange(request.run_id, request.start, request.end, request.message)
    size = _check_sizes([only])
    limit = request.limit if request.limit is not None and request.limit < size else None
    return _Wanted(ranges=[only], limit=limit, messages=messages)


def _check_sizes(ranges: Sequence[ClaimRange]) -> int:
    for span in ranges:
        if span.end < span.start:
            raise BadRequest(f"The end of a range must not be less than its start, got {span.start}-{span.end}.")
    size = sum(span.end - span.start + 1 for span in ranges)
    if size > MAX_RANGE:
        raise BadRequest(f"A claim takes at most {MAX_RANGE} tasks; these ranges have {size}.")
    return size


def _spans(ranges: Sequence[ClaimRange]) -> dict[str, Any]:
    return {
        "run_ids": [span.run_id for span in ranges],
        "firsts": [span.start for span in ranges],
        "lasts": [span.end for span in ranges],
    }


def _ids_of_empty(ranges: Sequence[ClaimRange], groups: list[_Group]) -> list[UUID]:
    """Returns the ids of ranges that yielded no task: their job may have a concurrency cap."""
    fruitful = {group.lease.run_id for group in groups}
    return [
        run_task_id(span.run_id, index)
        for span in ranges
        if span.run_id not in fruitful
        for index in range(span.start, span.end + 1)
    ]


def _reading(jobs: Sequence[Row]) -> list[UUID]:
    return [row["job_id"] for row in jobs if row["inputs"]]


def _job(row: Row, inputs: dict[UUID, list[TaskInput]]) -> _Job:
    ref = JobRef(dag_name=row["dag_name"], name=row["name"])
    read = inputs.get(row["job_id"], [])
    together = row["wait_for_all"] or len(read) == 1
    names = tuple(secret_names(row["config"]))
    return _Job(ref, row["operator"], Raw(row["config"]), outputs_of(row), read, together, row["partition"], names)


def _by_range(rows: list[Row]) -> list[_Group]:
    """Groups rows of claim_ranges. A row without a task has the lease of its range as payload."""
    leases = {row["n"]: _lease.decode(row["payload"]) for row in rows if row["task_id"] is None}
    groups: defaultdict[tuple[int, int], list[GroupedTask]] = defaultdict(list)
    for row in rows:
        if row["task_id"] is not None:
            task = GroupedTask(row["task_id"], row["task_index"], Raw(row["payload"]))
            groups[row["n"], row["attempt"]].append(task)
    return [_Group(leases[n], attempt, tasks) for (n, attempt), tasks in groups.items()]


def _grouped(rows: list[Row]) -> list[_Group]:
    """Groups tasks by job. One statement claimed them, so tasks of a job share a lease and a timeout."""
    groups: dict[tuple[UUID, UUID | None, int], _Group] = {}
    for row in rows:
        key = row["job_id"], row["run_id"], row["attempt"]
        if key not in groups:
            groups[key] = _Group(_lease_of(row), row["attempt"], [])
        groups[key].tasks.append(GroupedTask(row["task_id"], row["task_index"], Raw(row["payload"])))
    return list(groups.values())


def _lease_of(row: Row) -> _Lease:
    return _Lease(**{name: row[name] for name in _Lease.__struct_fields__})


def _claim_group(group: _Group, job: _Job, secrets: list[TaskSecret]) -> ClaimGroup:
    lease = group.lease
    return ClaimGroup(
        job_id=lease.job_id,
        job=job.ref,
        operator=job.operator,
        config=job.config,
        org_id=lease.org_id,
        run_id=lease.run_id,
        attempt=group.attempt,
        lease_token=lease.lease_token,
        lease_expires_at=lease.lease_expires_at,
        timeout_at=lease.timeout_at,
        tasks=group.tasks,
        partition=job.partition,
        secrets=secrets,
    )


def _not_claimed(wanted: _Wanted, groups: list[_Group], states: list[Row]) -> list[ClaimReply]:
    """Returns a verdict for every id that was requested and not claimed. Ranges get no verdicts."""
    found = {state["task_id"]: state for state in states}
    return [
        ClaimReply(status="NotClaimed", task_id=task_id, reason=_reason(found.get(task_id)))
        for task_id in _not_in(wanted.ids, groups)
    ]


def _not_in(ids: list[UUID], groups: list[_Group]) -> list[UUID]:
    taken = {task.task_id for group in groups for task in group.tasks} if ids else ()
    return [task_id for task_id in ids if task_id not in taken]


def _unknown(ids: list[UUID], groups: list[_Group], states: list[Row]) -> list[UUID]:
    known = {state["task_id"] for state in states} if ids else ()
    return [task_id for task_id in _not_in(ids, groups) if task_id not in known]


def _may_be_capped(state: Row) -> bool:
    return bool(state["capped"] and state["status"] == "Queued" and state["allowed"] and not state["held_back"])


def _reason(state: Row | None) -> Reason:
    if state is None or not state["allowed"]:
        return "NotFound"
    if state["status"] == "Queued" and state["held_back"]:
        return "NotDue"  # its run is paused or being deleted
    if state["status"] == "Queued":
        # The job is at its cap, or another claim holds the row lock and is about to win.
        return "LimitReached" if state["capped"] else "AlreadyRunning"
    if state["status"] == "Failed":
        return "Failed" if state["dead"] else "NotDue"
    reasons: dict[str, Reason] = {
        "Running": "AlreadyRunning",
        "Completed": "Completed",
        "Canceled": "Canceled",
    }
    return reasons[state["status"]]
