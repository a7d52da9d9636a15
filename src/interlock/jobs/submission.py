"""Synchronous submission: writes and enqueues a closed list of tasks in one transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.access.secrets import check_references
from interlock.errors import BadRequest, Conflict, NotFound, TooLarge
from interlock.failpoints import failpoint
from interlock.settings import Runtime, RuntimeKind, Settings
from interlock.stores.isolation import UNSTORABLE
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.strict_json import NotStrict, first_not_strict, pointed, require_strict
from interlock.tasks.completion import enqueue, run_task_id
from interlock.tasks.idempotency import answered_before, remember
from interlock.tasks.limits import rate_key
from interlock.tasks.operators import Operators
from interlock.tasks.reads import job_by_name
from interlock.tasks.runs import record_run_events
from interlock.telemetry import TASKS_CREATED
from interlock.untrusted.bundles import pin
from interlock.untrusted.udf import UDF
from interlock.wire.access import secret_names
from interlock.wire.base import Priority, RunState
from interlock.wire.jobs import JobAccepted, JobRequest, Policy, RunLimits, Scaling

_sql = queries(__name__, "submission")
_ENDPOINT = "POST /v1/jobs"


@dataclass(frozen=True)
class Submitted:
    """The response to a submission. `replayed` marks a stored response."""

    body: bytes
    replayed: bool
    runtime: str = ""
    created: int = 0


@dataclass(frozen=True)
class Items:
    """The list of tasks by column, as it is inserted."""

    payloads: list[str]
    dedupe_keys: list[str | None] | None
    slot_keys: list[str | None]

    def __len__(self) -> int:
        return len(self.payloads)


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run, by column. A rerun has the settings of the run it repeats."""

    max_concurrency: int | None
    rate_key: str | None
    rate_per_second: float | None
    tolerated_share: float | None
    deadline_seconds: float | None
    retention_days: float | None

    @classmethod
    def asked(cls, limits: RunLimits, retention_days: float | None) -> RunSettings:
        return cls(
            max_concurrency=limits.max_concurrency,
            rate_key=limits.rate.key if limits.rate else None,
            rate_per_second=limits.rate.per_second if limits.rate else None,
            tolerated_share=limits.tolerated_failure_share,
            deadline_seconds=limits.deadline_seconds,
            retention_days=retention_days,
        )

    @classmethod
    def of_run(cls, run: Row) -> RunSettings:
        return cls(**{field.name: run[field.name] for field in fields(cls)})

    @property
    def columns(self) -> dict[str, Any]:
        return asdict(self)


class Submissions:
    def __init__(self, database: Database, settings: Settings, operators: Operators | None = None) -> None:
        self._database = database
        self._settings = settings
        self._operators = operators or Operators(database, settings)

    async def submit(self, request: JobRequest, org_id: UUID, *, idempotency_key: str | None, body: bytes) -> Submitted:
        """Submits a job. `body` is the raw request: an Idempotency-Key is bound to its bytes."""
        self._check_size(request)

        async def work(connection: Connection) -> Submitted:
            if idempotency_key is not None:
                known = await answered_before(connection, self._settings, org_id, _ENDPOINT, idempotency_key, body)
                if known is not None:
                    return Submitted(known, replayed=True)
            written, runtime = await self._write(connection, request, org_id)
            accepted = msgspec.json.encode(written)
            if idempotency_key is not None:
                await remember(connection, org_id, _ENDPOINT, idempotency_key, 201, accepted)
            await failpoint("submit.before_commit")
            return Submitted(accepted, replayed=False, runtime=runtime, created=written.total or 0)

        try:
            submitted = await self._database.run(work)
        except UNSTORABLE as error:
            raise BadRequest(f"A payload cannot be stored: {str(error).splitlines()[0]}.", code="bad_payload") from None
        await failpoint("submit.committed")
        if submitted.created:
            TASKS_CREATED.labels(runtime=submitted.runtime).inc(submitted.created)
        return submitted

    async def within(self, connection: Connection, request: JobRequest, org_id: UUID) -> JobAccepted:
        """Writes a job of the platform itself, within a larger transaction. Its operator is not checked."""
        self._check_size(request)
        written, _ = await self._write(connection, request, org_id, check=False)
        return written

    def _check_size(self, request: JobRequest) -> None:
        limit = self._settings.sync_threshold
        if len(request.listed) > limit:
            raise TooLarge(f"The request has {len(request.listed)} tasks; the limit is {limit}.", code="too_many_tasks")
        self.check_payloads(request)

    def check_payloads(self, request: JobRequest) -> None:
        """Raises for a request that is refused before anything is written."""
        _check_name(request.name)
        _check_config(request.config)
        self.check_tasks(request.listed)
        if request.limits.rate is not None:
            _check_rate_keys(request.listed, request.limits.rate.key)

    def check_tasks(self, tasks: list[Raw]) -> None:
        """Raises for the first payload that is too large or that a later reader could not parse."""
        limit = self._settings.payload_limit_bytes
        for index, task in enumerate(tasks):
            if len(task) > limit:
                raise TooLarge(
                    f"tasks[{index}] has {len(task)} bytes; the limit is {limit}.",
                    code="payload_too_large",
                )
        if found := first_not_strict(tasks):
            place, reason = found
            raise BadRequest(f"tasks[{place}] cannot be stored: {reason}.", code="bad_payload")

    async def _write(
        self, connection: Connection, request: JobRequest, org_id: UUID, *, check: bool = True
    ) -> tuple[JobAccepted, str]:
        job = await self.job(connection, request, org_id, check=check)
        items = items_of(request.listed, request.dedupe_by, job["concurrency_key"])
        settings = RunSettings.asked(request.limits, request.retention_days)
        return await self._run_of(connection, job, items, settings), job["runtime"]

    async def run_of(self, connection: Connection, job: Row, tasks: list[Raw], settings: RunSettings) -> JobAccepted:
        """Adds a run to an existing job, within a larger transaction."""
        items = items_of(tasks, None, job["concurrency_key"])
        return await self._run_of(connection, job, items, settings)

    async def _run_of(self, connection: Connection, job: Row, items: Items, settings: RunSettings) -> JobAccepted:
        run = await _sql.insert_run(
            connection,
            org_id=job["org_id"],
            job_id=job["job_id"],
            last_index=len(items) - 1,
            range_size=self._settings.range_size,
            total=len(items) if items.dedupe_keys is None else None,
            **settings.columns,
        )
        indexes = await self._tasks(connection, job, run["run_id"], items)
        if items.dedupe_keys is not None:
            run = await _sql.latch_run(connection, run_id=run["run_id"], total=len(indexes))
        if not indexes:  # The run has already ended, and no counter fold will follow.
            over = [run["run_id"]]
            now, kept = self._database.clock.now(), self._settings.retention_days
            await record_run_events(connection, over, ended=over, now=now, retention_days=kept)
        await self._enqueue(connection, job, run["run_id"], indexes, len(items) - 1)
        return JobAccepted(
            job_id=job["job_id"],
            run_id=run["run_id"],
            state=RunState(run["state"]),
            total=len(indexes),
            deduplicated=len(items) - len(indexes),
            tasks_url=f"/v1/jobs/{job['job_id']}/tasks",
            status_url=f"/v1/jobs/{job['job_id']}",
        )

    async def _tasks(self, connection: Connection, job: Row, run_id: UUID, items: Items) -> list[int]:
        shared = {
            "run_id": run_id,
            "org_id": job["org_id"],
            "job_id": job["job_id"],
            "max_attempts": job["max_attempts"],
            "priority": job["priority"],
            "payloads": items.payloads,
            "slot_keys": items.slot_keys,
        }
        if items.dedupe_keys is not None:
            rows = await _sql.insert_tasks(connection, dedupe_keys=items.dedupe_keys, **shared)
            return [row["task_index"] for row in rows]
        await _sql.insert_all_tasks(connection, **shared)
        return list(range(len(items)))

    async def _enqueue(self, connection: Connection, job: Row, run_id: UUID, indexes: list[int], last: int) -> None:
        direct = self._settings.queue_direct
        if indexes and job["queue"] is None:
            await enqueue(connection, [run_task_id(run_id, i) for i in indexes], direct=direct)
        elif indexes:
            await _sql.enqueue_ranges(
                connection,
                org_id=job["org_id"],
                job_id=job["job_id"],
                run_id=run_id,
                indexes=indexes,
                last=last,
                queue=job["queue"],
                priority=job["priority"],
                range_size=self._settings.range_size,
                direct=direct,
            )

    async def job(self, connection: Connection, request: JobRequest, org_id: UUID, *, check: bool = True) -> Row:
        """Returns the job of a request: existing, new or updated."""
        if request.operator is None:
            known = await self._known_job(connection, request, org_id)
            await self._operators.check_job(connection, known)
            return known
        definition = self._definition(request, await self._config(connection, request, org_id), org_id)
        if check:
            await self._operators.check(connection, org_id, request.runtime, request.operator, request.config)
        await self._own_outputs(connection, request, org_id)
        job: Row | None = await _sql.insert_job(connection, **definition)
        if job is not None:
            return job
        job = await job_by_name(connection, request.name, org_id)
        if job is not None and bytes(job["definition_hash"]) == definition["definition_hash"]:
            return job
        if not request.update:
            raise Conflict(
                f"Job {request.name!r} exists with another definition. Post only its name and tasks to use that, "
                'or add "update": true to replace it.',
                code="job_differs",
            )
        replaced: Row = await _sql.replace_job(connection, **definition)
        return replaced

    async def _known_job(self, connection: Connection, request: JobRequest, org_id: UUID) -> Row:
        if request.name is None:
            raise BadRequest(
                "Give the `operator` that runs the tasks, or the `name` of an existing job.", code="operator_missing"
            )
        job: Row | None = await job_by_name(connection, request.name, org_id)
        if job is None:
            raise NotFound(f"There is no job {request.name!r}; its first submission must give an `operator`.")
        return job

    async def _own_outputs(self, connection: Connection, request: JobRequest, org_id: UUID) -> None:
        if request.outputs:
            uuids = [o.dataset_uuid for o in request.outputs]
            versions = [o.dataset_version for o in request.outputs]
            await _sql.register_datasets(connection, org_id=org_id, uuids=uuids, versions=versions)
            await _sql.register_versions(connection, org_id=org_id, uuids=uuids, versions=versions)
            foreign = await _sql.foreign_datasets(connection, org_id=org_id, uuids=uuids, versions=versions)
            if foreign and foreign[0]["own"] and foreign[0]["dag_name"]:
                raise Conflict(
                    f"Dataset {foreign[0]['dataset_uuid']} is written by DAG {foreign[0]['dag_name']!r} only.",
                    code="dataset_of_a_dag",
                )
            if foreign:
                raise NotFound(f"There is no dataset {foreign[0]['dataset_uuid']} with that version in this org.")

    async def _config(self, connection: Connection, request: JobRequest, org_id: UUID) -> dict[str, Any]:
        """Pins user code to a bundle digest. It must run in a runtime for untrusted code, and nothing else may."""
        runtime = runtime_of(self._settings, request.runtime)
        if (runtime.kind is RuntimeKind.INVOKE) != (request.operator == UDF):
            raise BadRequest(
                f"Operator {UDF!r} needs a runtime for untrusted code, such as 'lambda'; other operators need another.",
                code="bad_udf",
            )
        await check_references(connection, org_id, [(runtime.kind, request.config)])
        return await pin(connection, request.config, org_id) if request.operator == UDF else request.config

    def _definition(self, request: JobRequest, config: dict[str, Any], org_id: UUID) -> dict[str, Any]:
        runtime = runtime_of(self._settings, request.runtime)
        definition = {
            "name": request.name,
            **work_columns(runtime, name=request.runtime, operator=request.operator, config=config),
            **policy_columns(
                runtime, request.policy, request.scaling, request.priority, operator=request.operator, config=config
            ),
            "outputs": msgspec.json.encode(request.outputs).decode(),
        }
        digest = hashlib.sha256(msgspec.json.encode(definition, order="sorted")).digest()
        return definition | {"org_id": org_id, "definition_hash": digest}


def _check_name(name: str | None) -> None:
    try:
        UUID(name or "")
    except ValueError:
        return
    raise BadRequest("A job's name must not be a UUID, because paths accept a name or an id.", code="bad_job_name")


def _check_config(config: dict[str, Any]) -> None:
    try:
        require_strict(msgspec.json.encode(config))
    except NotStrict as error:
        raise BadRequest(f"`config` cannot be stored: {error}.", code="bad_config") from None


def _check_rate_keys(tasks: list[Raw], pointer: str) -> None:
    """Refuses a rate key that is a list, an object or too long. A missing key means no limit."""
    for index, task in enumerate(tasks):
        try:
            rate_key(pointer, msgspec.json.decode(task))
        except ValueError as error:
            raise BadRequest(f"tasks[{index}]: the rate key at {pointer!r} {error}.", code="bad_pointer") from None


def items_of(tasks: list[Raw], dedupe_by: str | None, slot_by: str | None) -> Items:
    payloads = [_text(index, task) for index, task in enumerate(tasks)]
    if dedupe_by is None and slot_by is None:
        return Items(payloads, None, [None] * len(payloads))
    values = [_value(index, task) for index, task in enumerate(tasks)]
    dedupe = [_pointed(i, value, dedupe_by, required=True) for i, value in enumerate(values)] if dedupe_by else None
    slots = [_pointed(i, value, slot_by, required=False) if slot_by else None for i, value in enumerate(values)]
    return Items(payloads, dedupe, slots)


def _text(index: int, task: Raw) -> str:
    try:
        return str(task, "utf-8")
    except UnicodeDecodeError:
        raise _not_json(index) from None


def _value(index: int, task: Raw) -> Any:
    try:
        return msgspec.json.decode(task)
    except (msgspec.DecodeError, RecursionError):
        raise _not_json(index) from None


def _not_json(index: int) -> BadRequest:
    return BadRequest(f"tasks[{index}] is not valid JSON in UTF-8.", code="bad_payload")


def _pointed(index: int, value: Any, pointer: str, *, required: bool) -> str | None:
    """Returns the scalar that a JSON pointer selects in a payload, as text."""
    try:
        text = pointed(value, pointer)
    except ValueError:
        raise BadRequest(
            f"tasks[{index}]: the value at {pointer!r} is too long or not text.", code="bad_pointer"
        ) from None
    if text is None and required:
        raise BadRequest(f"tasks[{index}] has no single value at {pointer!r}.", code="bad_pointer")
    return text


_ON_CHAINS: Final = ("AddressRefused", "BadUrl", "HostNotBound")
NEVER_RETRIED: Final = {
    "block_follower": _ON_CHAINS,
    "block_ingest": _ON_CHAINS,
    "integrity_check": _ON_CHAINS,
    "http_fetch": (
        "AddressRefused",
        "BadConfig",
        "BadPayload",
        "BadUrl",
        "BodyTooLarge",
        "HostNotBound",
        "HttpRefused",
        "ReplyTooLarge",
        "TooManyRedirects",
    ),
}
"""Error classes, by operator, that another attempt would only repeat. They are added to those of the job's policy."""


INLINE_OPERATORS: Final = frozenset({"echo", "fail", "range_aggregator", "range_splitter"})
"""Operators that run inside the dispatcher. Each ends quickly, because all orgs share its few slots."""


def inline_problem(operator: str | None) -> str | None:
    """Returns why an operator cannot run inside the dispatcher, as a clause."""
    if operator in INLINE_OPERATORS:
        return None
    known = ", ".join(sorted(INLINE_OPERATORS))
    return f"operator {str(operator)[:60]!r} does not run inside the dispatcher, which runs only {known}"


def runtime_of(settings: Settings, name: str) -> Runtime:
    """Returns the runtime. Refuses one that nothing in this installation can run tasks in."""
    try:
        runtime = settings.runtime(name)
    except KeyError:
        known = ", ".join(settings.runtime_names)
        raise BadRequest(f"There is no runtime {name!r}; choose one of: {known}.", code="unknown_runtime") from None
    if runtime.kind is RuntimeKind.INVOKE and not settings.has_runner:
        raise BadRequest(
            f"Runtime {name!r} has no runner in this installation: set runner_url or runner_lambda.",
            code="runtime_without_runner",
        )
    return runtime


def work_columns(runtime: Runtime, *, name: str, operator: str | None, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the columns that define the job's work and where it runs. Any: columns of a row."""
    if runtime.kind is RuntimeKind.INLINE and (wrong := inline_problem(operator)):
        raise BadRequest(
            f"In runtime {name!r}, {wrong}; choose another runtime, such as 'platform'.", code="operator_not_inline"
        )
    return {
        "operator": operator,
        "runtime": name,
        "queue": runtime.queue if runtime.kind is RuntimeKind.QUEUE else None,
        "config": msgspec.json.encode(config, order="sorted").decode(),
    }


def policy_columns(
    runtime: Runtime,
    policy: Policy,
    scaling: Scaling,
    priority: Priority,
    *,
    operator: str | None,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the columns for priority, retries, timeouts and caps. Changing them does not change the job's output."""
    if scaling.max_concurrency_per_key is not None and scaling.key is None:
        raise BadRequest("scaling.max_concurrency_per_key needs scaling.key, a pointer into the payload.")
    timeout = policy.timeout_seconds or runtime.timeout_seconds
    final = [*NEVER_RETRIED.get(operator or "", ()), *_of_secrets(config)]
    return {
        "priority": 1 if priority is Priority.BULK else 0,
        "max_attempts": policy.max_attempts,
        "backoff_seconds": policy.backoff_seconds,
        "backoff_factor": policy.backoff_factor,
        "backoff_cap_seconds": policy.backoff_cap_seconds,
        "jitter": policy.jitter,
        "non_retryable": list(dict.fromkeys([*policy.non_retryable, *final])),
        "lease_seconds": min(policy.lease_seconds or runtime.lease_seconds, timeout),
        "timeout_seconds": timeout,
        "max_concurrency": scaling.max_concurrency,
        "concurrency_key": scaling.key,
        "max_concurrency_per_key": scaling.max_concurrency_per_key,
    }


def _of_secrets(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns error classes of secrets: a secret that is missing now is missing for the next attempt too."""
    return ("SecretMissing", "SecretBound") if secret_names(msgspec.json.encode(config).decode()) else ()
