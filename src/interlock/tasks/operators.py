"""Names of operators: built-in ones, those that workers declare, and those that an org is limited to.

A worker reports its operators when it starts and every few seconds. A job may name a reported operator for
`operator_hours` after the last report, so that a restart of the workers does not cause refusals. The worker decides in
the end: it runs a function only if it was started with the module that declares it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, Final
from uuid import UUID

import msgspec

from interlock.access.principals import org_by_name
from interlock.errors import BadRequest, Forbidden, NotFound
from interlock.settings import RuntimeKind, Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.access import OrgOperators
from interlock.wire.tasks import OperatorsReport

_sql = queries(__name__, "operators")

PYTHON: Final = "python"
SPARK_MAP: Final = "spark_map"
_NAMING: Final = {PYTHON: "function", SPARK_MAP: "operator"}
"""Operators whose config names a function, with the field that holds the name."""
BUILT_IN: Final = frozenset(
    {
        "block_follower",
        "block_ingest",
        "dedupe",
        "echo",
        "erc20_transfers",
        "fail",
        "http_fetch",
        "integrity_check",
        "parquet_compact",
        PYTHON,
        "range_aggregator",
        "range_splitter",
        "rollup",
        "sleep",
        SPARK_MAP,
        "sql",
        "udf",
    }
)
"""Operators of the platform that a user's job may name."""
_INTERNAL: Final = frozenset({"batch_query", "buffer_load", "list_load", "run_export"})
"""Operators of tasks that the platform itself creates. No job can name them, and no org's limit applies to them."""
NOT_ALLOWED: Final = "OperatorNotAllowed"
"""The error class of an attempt that was ended because of its org's limit."""

UNKNOWN: Final = "unknown_operator"
LIVE_SECONDS: Final = 60.0
"""Workers report every 20 s. A worker that has not reported for this long has stopped."""
_KNOWN_SECONDS: Final = 30.0
"""How long a declared name is cached."""
_LIMITS_SECONDS: Final = 2.0
_MAX_KNOWN: Final = 10_000
_SUGGESTED_FROM: Final = 1_000

Limits = Mapping[UUID, tuple[str, ...]]


def named_in(operator: str, config: Mapping[str, Any]) -> list[str]:
    """Returns the operator and, if its config names a function, that function."""
    function = config.get(_NAMING[operator]) if operator in _NAMING else None
    return [operator, function] if isinstance(function, str) else [operator]


def allows(limit: Collection[str], name: str) -> bool:
    return any(name == one or (one.endswith("*") and name.startswith(one[:-1])) for one in limit)


class Operators:
    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._settings = database, settings
        self._seconds = settings.operator_hours * 3600
        self._known: dict[tuple[str, str], float] = {}
        self._limits: Limits = {}
        self._limits_until = float("-inf")

    # Workers

    async def report(self, report: OperatorsReport) -> None:
        names = [name for name in dict.fromkeys(report.operators) if name not in BUILT_IN | _INTERNAL]

        async def work(connection: Connection) -> None:
            worker_id = report.worker_id.replace("\x00", "")
            await _sql.report_operators(connection, queue=report.queue, worker_id=worker_id, operators=names)
            await _sql.forget_operators(connection, seconds=self._seconds)

        await self._database.run(work)

    # Jobs

    async def check(
        self,
        connection: Connection,
        org_id: UUID,
        runtime: str,
        operator: str,
        config: Mapping[str, Any],
        *,
        of: str | None = None,
        live: bool = False,
    ) -> None:
        """Raises BadRequest for a name that no worker has declared, and Forbidden for one outside the org's limit.

        `of` is the name of the DAG's job, for the message. With `live`, a worker must have reported the name within the
        last minute.
        """
        try:
            await self._check(connection, org_id, runtime, operator, config)
            if live:
                await self._check_live(connection, runtime, operator, config)
        except (BadRequest, Forbidden) as error:
            raise type(error)(f"Job {of!r}: {error.detail}", code=error.code) if of else error from None

    async def _check(
        self, connection: Connection, org_id: UUID, runtime: str, operator: str, config: Mapping[str, Any]
    ) -> None:
        names = named_in(operator, config)
        limit = (await self._current_limits(connection)).get(org_id)
        for name in names if limit is not None else ():
            if not allows(limit or (), name):
                raise Forbidden(
                    f"This org may not use the operator {name!r}; an admin of the platform can allow it: "
                    "interlock users org-operators ORG --allow NAME.",
                    code="operator_not_allowed",
                )
        queue = self._queue(runtime)
        if operator in _NAMING and (len(names) == 1 or ":" not in names[1]):
            raise BadRequest(
                f"Operator {operator!r} needs a config like "
                f'{{"{_NAMING[operator]}": "module:function"}}, with a function that your workers declare.',
                code="unknown_operator",
            )
        unknown = [names[1]] if operator in _NAMING else [] if operator in BUILT_IN else [operator]
        if queue is not None and not await self._declared(connection, queue, unknown):
            raise await self._unknown(connection, runtime, queue, unknown[0], limit)
        if queue is None and unknown:
            raise BadRequest(
                f"Runtime {runtime!r} has no operator {unknown[0]!r}: it runs built-in operators only.",
                code="unknown_operator",
            )

    async def _check_live(self, connection: Connection, runtime: str, operator: str, config: Mapping[str, Any]) -> None:
        queue = self._queue(runtime)
        names = named_in(operator, config)[-1:] if operator in _NAMING else [operator]
        names = [name for name in names if name not in BUILT_IN]
        if queue is None or not names:
            return
        rows = await _sql.declared_operators(connection, queue=queue, names=names, seconds=LIVE_SECONDS)
        if not rows:
            raise BadRequest(
                f"No running worker of runtime {runtime!r} can import the operator {names[0]!r}. Workers that could "
                "have stopped, or were restarted without its folder: start one with interlock up --operators DIR, or "
                f"interlock serve worker --runtime {runtime} --operators DIR, or deploy with --force.",
                code="unknown_operator",
            )

    async def check_job(self, connection: Connection, job: Row) -> None:
        """Checks an existing job: its workers or its org's limit may have changed."""
        if job["runtime"] in self._settings.runtime_names:
            config = msgspec.json.decode(job["config"])
            await self.check(connection, job["org_id"], job["runtime"], job["operator"], config)

    def _queue(self, runtime: str) -> str | None:
        found = self._settings.runtime(runtime)
        return found.queue if found.kind is RuntimeKind.QUEUE else None

    async def _declared(self, connection: Connection, queue: str, names: list[str]) -> bool:
        now = time.monotonic()
        missing = [name for name in names if self._known.get((queue, name), 0.0) < now]
        if not missing:
            return True
        rows = await _sql.declared_operators(connection, queue=queue, names=missing, seconds=self._seconds)
        if len(self._known) > _MAX_KNOWN:
            self._known.clear()
        self._known |= {(queue, row["operator"]): now + _KNOWN_SECONDS for row in rows}
        return len(rows) == len(missing)

    async def _unknown(
        self, connection: Connection, runtime: str, queue: str, name: str, limit: Collection[str] | None
    ) -> BadRequest:
        rows = await _sql.some_operators(connection, queue=queue, seconds=self._seconds, limit=_SUGGESTED_FROM)
        declared = [row["operator"] for row in rows if limit is None or allows(limit, row["operator"])]
        near = get_close_matches(name, [*declared, *sorted(BUILT_IN)], 3, 0.6)
        what = f"No worker of runtime {runtime!r} has declared the operator {name!r}."
        meant = f" Did you mean {' or '.join(near)}?" if near else ""
        return BadRequest(
            f"{what}{meant} Decorate the function with @operator, and start a worker with its folder or module: "
            f"interlock serve worker --runtime {runtime} --operators DIR_OR_MODULE. `interlock up` uses the folder it "
            "was started in.",
            code="unknown_operator",
        )

    async def short_names(self, connection: Connection) -> list[str]:
        """Returns declared names that have no module."""
        rows = await _sql.short_operators(connection, seconds=self._seconds, limit=_SUGGESTED_FROM)
        return [row["operator"] for row in rows]

    # Limits of orgs

    async def limits(self) -> Limits:
        """Returns the operator limits by org, cached for about two seconds."""
        if time.monotonic() < self._limits_until:
            return self._limits
        async with self._database.connection() as connection:
            return await self._current_limits(connection)

    async def _current_limits(self, connection: Connection) -> Limits:
        if time.monotonic() >= self._limits_until:
            rows = await _sql.limited_orgs(connection)
            self._limits = {row["org_id"]: tuple(row["operators"]) for row in rows}
            self._limits_until = time.monotonic() + _LIMITS_SECONDS
        return self._limits

    async def limit(self, org: str, operators: list[str] | None) -> OrgOperators:
        """Sets which operators an org may use; None allows all. Other processes apply it within seconds."""
        async with self._database.connection() as connection:
            row = await _sql.limit_org(connection, name=org, operators=operators)
        self._limits_until = float("-inf")
        return _view(row, org)

    async def limit_of(self, org: str) -> OrgOperators:
        async with self._database.connection() as connection:
            return _view(await org_by_name(connection, org), org)


def refusal(limits: Limits, org_id: UUID, operator: str, config: bytes | msgspec.Raw) -> str | None:
    """Returns why an attempt of this org may not start, or None."""
    limit = limits.get(org_id)
    if limit is None or operator in _INTERNAL:
        return None
    found = msgspec.json.decode(config) if operator in _NAMING else {}
    names = named_in(operator, found if isinstance(found, dict) else {})
    refused = [name for name in names if not allows(limit, name)]
    return f"The org may not use the operator {refused[0]!r}." if refused else None


def _view(row: Row | None, org: str) -> OrgOperators:
    if row is None:
        raise NotFound(f"There is no org {org!r}.")
    return OrgOperators(org=row["name"], operators=row["operators"])
