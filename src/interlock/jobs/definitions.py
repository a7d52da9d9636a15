"""Definitions of jobs: operator, config, runtime, policy and outputs, as columns of `jobs`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

import msgspec

from interlock.access.secrets import check_references
from interlock.errors import BadRequest, Conflict, NotFound
from interlock.settings import Runtime, RuntimeKind, Settings
from interlock.stores.postgres import Connection, Row, queries
from interlock.tasks.operators import Operators
from interlock.tasks.reads import job_by_name
from interlock.untrusted.bundles import UDF, pin
from interlock.wire.access import secret_names
from interlock.wire.base import Priority
from interlock.wire.jobs import JobRequest, Policy, Scaling

_sql = queries(__name__, "submission")


class Definitions:
    def __init__(self, settings: Settings, operators: Operators) -> None:
        self._settings = settings
        self._operators = operators

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
