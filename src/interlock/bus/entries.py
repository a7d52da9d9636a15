"""The kinds of entries of the registry: how each is stored, named, and judged.

A request is the whole of an entry. What is judged here is judged the same way when an entry is made, when a change is
taken back, and when a snapshot is published or loaded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

import msgspec

from interlock.adapters.postgres import Connection, Row, queries
from interlock.errors import BadRequest, Conflict, NotFound
from interlock.wire import (
    AclRequest,
    DedupeMode,
    DispatchMode,
    Enforcement,
    Fairness,
    LimitRequest,
    RegistryKind,
    RouteRequest,
    Sensitivity,
    ServiceRequest,
)

_sql = queries("bus_writes")
_FOREVER: Final = timedelta(days=36_525)
_fairness = msgspec.json.Decoder(Fairness)

R = TypeVar("R", bound=msgspec.Struct)


@dataclass(frozen=True)
class Org:
    """Whose registry it is, and what time it is there."""

    org_id: UUID
    name: str
    now: datetime

    def service(self, source: str) -> str:
        """The name of one of its services, which may be written in full."""
        org, slash, service = source.rpartition("/")
        if slash and org != self.name:
            raise BadRequest(
                f"{source!r} is a service of another org; sources are services of {self.name!r}.", code="foreign_source"
            )
        return service

    def source(self, service: str) -> str:
        return f"{self.name}/{service}"


@dataclass(frozen=True)
class Entry(Generic[R]):
    """One kind. `key` has the columns that name an entry, `columns` the others."""

    kind: RegistryKind
    request: type[R]
    parts: Callable[[R, Org], tuple[str, ...]]
    key: Callable[[R, Org], dict[str, object]]
    columns: Callable[[R], dict[str, object]]
    document: Callable[[Row, Org], R]
    """The request that would make what is stored."""
    check: Callable[[Connection, R, Org], Awaitable[None]]
    find: str
    put: str
    drop: str

    def subject(self, request: R, org: Org) -> str:
        """How the changelog names it."""
        return "/".join(self.parts(request, org))


def acl_subject(target: str, name: str, source: str) -> str:
    """How the changelog names an ACL; `source` is the service."""
    return f"{target}/{name}/{source}"


# Services


async def _check_service(_connection: Connection, _request: ServiceRequest, _org: Org) -> None:
    """Its name is all there is to judge, and that was judged where it was read."""


SERVICE: Final = Entry[ServiceRequest](
    kind=RegistryKind.SERVICES,
    request=ServiceRequest,
    parts=lambda request, _org: (request.name,),
    key=lambda request, _org: {"name": request.name},
    columns=lambda request: {"description": request.description, "dispatch_mode": request.dispatch_mode},
    document=lambda row, _org: ServiceRequest(
        name=row["name"],
        description=row["description"],
        dispatch_mode=None if row["dispatch_mode"] is None else DispatchMode(row["dispatch_mode"]),
    ),
    check=_check_service,
    find="find_service",
    put="put_service",
    drop="drop_service",
)


async def _require_services(connection: Connection, org: Org, *names: str) -> None:
    rows = await _sql.known_services(connection, org_id=org.org_id, names=list(names))
    if missing := [name for name in names if name not in {row["name"] for row in rows}]:
        raise NotFound(
            f"There is no service {missing[0]!r} in this org; register it: interlock service add {missing[0]}",
            code="unknown_service",
        )


# Routes


def check_route(request: RouteRequest, now: datetime) -> None:
    """What can be said of a route by itself."""
    if (request.queue is None) == (request.job is None):
        raise BadRequest(
            "A route leads to one place: write `queue` with its `dlq`, or `job`, with its `dag` if it has one.",
            code="bad_destination",
        )
    if request.queue is None and request.dlq is not None:
        raise BadRequest("A job has its own dead letters: leave `dlq` out.", code="bad_destination")
    if request.queue is not None and (request.dlq is None or request.dag is not None):
        raise BadRequest(
            "A queue has a `dlq` for what could not be consumed, and no `dag`: write a name for its dead letters, such "
            f"as {request.queue + '-dlq'!r}.",
            code="bad_destination",
        )
    if request.queue is not None and request.queue == request.dlq:
        raise BadRequest("`queue` and `dlq` must differ.", code="bad_destination")
    check_expiry(request.expires_at, now)


def check_expiry(expires_at: datetime | None, now: datetime) -> None:
    if expires_at is None:
        return
    if expires_at <= now:
        raise BadRequest("`expires_at` is over already; name a time to come, or leave it out.", code="expired_already")
    if expires_at - now > _FOREVER:
        raise BadRequest("`expires_at` is more than a century away; leave it out for something that stays.")


async def _check_route(connection: Connection, request: RouteRequest, org: Org) -> None:
    check_route(request, org.now)
    await _require_services(connection, org, request.target)
    if request.queue is not None:
        await _check_queue(connection, request, org)
    elif not await _sql.job_exists(connection, org_id=org.org_id, dag=request.dag, job=request.job):
        which = request.job if request.dag is None else f"{request.dag}/{request.job}"
        raise NotFound(f"There is no job {which!r} in this org; deploy it first.", code="unknown_job")


async def _check_queue(connection: Connection, request: RouteRequest, org: Org) -> None:
    places = {"org_id": org.org_id, "queue": request.queue, "dlq": request.dlq}
    other = await _sql.other_routes_of_queue(connection, target=request.target, name=request.name, **places)
    if other is not None and other["target"] != request.target:
        raise Conflict(
            f"The queue {request.queue!r} is that of {other['target']}/{other['name']}; a queue has one target: choose "
            "another name.",
            code="queue_taken",
        )
    if other is not None:
        raise Conflict(
            f"The queue {request.queue!r} has its dead letters under {other['dlq']!r}; write that as `dlq`.",
            code="queue_taken",
        )
    if (other := await _sql.queue_named(connection, **places)) is not None:
        raise Conflict(
            f"{other['target']}/{other['name']} uses {request.queue!r} or {request.dlq!r} otherwise: queues and their "
            "dead letters have names of their own.",
            code="queue_taken",
        )


def _route_columns(request: RouteRequest) -> dict[str, object]:
    return {
        "queue": request.queue,
        "dlq": request.dlq,
        "dag_name": request.dag,
        "job_name": request.job,
        "dedupe_mode": request.dedupe_mode,
        "dedupe_seconds": request.dedupe_seconds,
        "expected_drain_seconds": request.expected_drain_seconds,
        "fairness": msgspec.json.encode(request.fairness).decode(),
        "expires_at": request.expires_at,
    }


def route_of(row: Row) -> RouteRequest:
    return RouteRequest(
        target=row["target"],
        name=row["name"],
        queue=row["queue"],
        dlq=row["dlq"],
        dag=row["dag_name"],
        job=row["job_name"],
        dedupe_mode=DedupeMode(row["dedupe_mode"]),
        dedupe_seconds=row["dedupe_seconds"],
        expected_drain_seconds=row["expected_drain_seconds"],
        fairness=_fairness.decode(row["fairness"]),
        expires_at=row["expires_at"],
    )


ROUTE: Final = Entry[RouteRequest](
    kind=RegistryKind.ROUTES,
    request=RouteRequest,
    parts=lambda request, _org: (request.target, request.name),
    key=lambda request, _org: {"target": request.target, "name": request.name},
    columns=_route_columns,
    document=lambda row, _org: route_of(row),
    check=_check_route,
    find="find_route",
    put="put_route",
    drop="drop_route",
)


# ACLs


async def _check_acl(connection: Connection, request: AclRequest, org: Org) -> None:
    check_expiry(request.expires_at, org.now)
    await _require_services(connection, org, org.service(request.source), request.target)


ACL: Final = Entry[AclRequest](
    kind=RegistryKind.ACLS,
    request=AclRequest,
    parts=lambda request, org: (request.target, request.name, org.service(request.source)),
    key=lambda request, org: {
        "target": request.target,
        "name": request.name,
        "source": org.service(request.source),
    },
    columns=lambda request: {"sensitivity": request.sensitivity, "expires_at": request.expires_at},
    document=lambda row, org: AclRequest(
        source=org.source(row["source"]),
        target=row["target"],
        name=row["name"],
        sensitivity=Sensitivity(row["sensitivity"]),
        expires_at=row["expires_at"],
    ),
    check=_check_acl,
    find="find_acl",
    put="put_acl",
    drop="drop_acl",
)


# Limits


def check_limit(request: LimitRequest) -> None:
    """What can be said of a limit by itself."""
    if (request.target is None) != (request.name is None) or (request.target is None and request.source is None):
        raise BadRequest(
            "A limit is on a command, with `target` and `name`, or on a source alone, with `source` and neither.",
            code="bad_limit",
        )


async def _check_limit(connection: Connection, request: LimitRequest, org: Org) -> None:
    check_limit(request)
    named = (request.target, None if request.source is None else org.service(request.source))
    await _require_services(connection, org, *(name for name in named if name is not None))


def _limit_parts(request: LimitRequest, org: Org) -> tuple[str, ...]:
    """`*` is no name: that of a source alone is nobody else's."""
    whole = (request.target or "*", request.name or "*")
    return whole if request.source is None else (*whole, org.service(request.source))


LIMIT: Final = Entry[LimitRequest](
    kind=RegistryKind.LIMITS,
    request=LimitRequest,
    parts=_limit_parts,
    key=lambda request, org: {
        "target": request.target,
        "name": request.name,
        "source": None if request.source is None else org.service(request.source),
    },
    columns=lambda request: {
        "rate": request.rate,
        "window_seconds": request.window_seconds,
        "burst": request.burst,
        "cooldown_seconds": request.cooldown_seconds,
        "enforcement": request.enforcement,
    },
    document=lambda row, org: LimitRequest(
        target=row["target"],
        name=row["name"],
        source=None if row["source"] is None else org.source(row["source"]),
        rate=row["rate"],
        window_seconds=row["window_seconds"],
        burst=row["burst"],
        cooldown_seconds=row["cooldown_seconds"],
        enforcement=Enforcement(row["enforcement"]),
    ),
    check=_check_limit,
    find="find_limit",
    put="put_limit",
    drop="drop_limit",
)

# Any: each kind has a request of its own, and whoever takes one from here converts a document into it.
ENTRIES: Final[dict[RegistryKind, Entry[Any]]] = {entry.kind: entry for entry in (SERVICE, ROUTE, ACL, LIMIT)}
