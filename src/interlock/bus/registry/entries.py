"""The kinds of registry entries, how each is stored, named and validated, and the changelog of all of them.

A request contains the complete entry. The same validation runs when an entry is created, when a change is reverted, and
when a snapshot is published or loaded.

The changelog has every change with its author, its time, and the entry before and after.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

import msgspec
from msgspec import Raw

from interlock.errors import BadRequest, Conflict, NotFound
from interlock.stores.postgres import Connection, Row, queries
from interlock.wire.bus_registry import (
    AclRequest,
    DedupeMode,
    DispatchMode,
    Enforcement,
    Fairness,
    LimitRequest,
    RegistryAction,
    RegistryChange,
    RegistryKind,
    RouteRequest,
    Sensitivity,
    ServiceRequest,
)

_sql = queries(__name__, "writes")
_FOREVER: Final = timedelta(days=36_525)
_fairness = msgspec.json.Decoder(Fairness)

R = TypeVar("R", bound=msgspec.Struct)


@dataclass(frozen=True)
class Org:
    """The org of a request, and the current time."""

    org_id: UUID
    name: str
    now: datetime

    def service(self, source: str) -> str:
        """Returns the service of a source, which may be `service` or `org/service`."""
        org, slash, service = source.rpartition("/")
        if slash and org != self.name:
            raise BadRequest(
                f"{source!r} is a service of another org; a source must be a service of {self.name!r}.",
                code="foreign_source",
            )
        return service

    def source(self, service: str) -> str:
        return f"{self.name}/{service}"


@dataclass(frozen=True)
class Entry(Generic[R]):
    """A kind of entry. `key` returns the columns of its key, `columns` all others."""

    kind: RegistryKind
    request: type[R]
    parts: Callable[[R, Org], tuple[str, ...]]
    key: Callable[[R, Org], dict[str, object]]
    columns: Callable[[R], dict[str, object]]
    document: Callable[[Row, Org], R]
    """Returns the request that would create the stored entry."""
    check: Callable[[Connection, R, Org], Awaitable[None]]
    find: str
    put: str
    drop: str

    def subject(self, request: R, org: Org) -> str:
        """Returns the name of the entry in the changelog."""
        return "/".join(self.parts(request, org))


# Services


async def _check_service(_connection: Connection, _request: ServiceRequest, _org: Org) -> None:
    """Does nothing: decoding has validated the name already."""


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
    """Validates a route without a look at other entries."""
    if (request.queue is None) == (request.job is None):
        raise BadRequest(
            "A route has one destination: set `queue` with its `dlq`, or `job`, with its `dag` if it has one.",
            code="bad_destination",
        )
    if request.queue is None and request.dlq is not None:
        raise BadRequest(
            "A route to a job has no `dlq`: a job has its own dead letters. Leave `dlq` out.", code="bad_destination"
        )
    if request.queue is not None and (request.dlq is None or request.dag is not None):
        raise BadRequest(
            "A route to a queue needs a `dlq` for its dead letters, and no `dag`: set a name such as "
            f"{request.queue + '-dlq'!r}.",
            code="bad_destination",
        )
    if request.queue is not None and request.queue == request.dlq:
        raise BadRequest("`queue` and `dlq` must differ.", code="bad_destination")
    check_expiry(request.expires_at, now)


def check_expiry(expires_at: datetime | None, now: datetime) -> None:
    if expires_at is None:
        return
    if expires_at <= now:
        raise BadRequest("`expires_at` is in the past; set a later time, or leave it out.", code="expired_already")
    if expires_at - now > _FOREVER:
        raise BadRequest("`expires_at` is more than a century away; leave it out for an entry that does not expire.")


async def _check_route(connection: Connection, request: RouteRequest, org: Org) -> None:
    check_route(request, org.now)
    await _require_services(connection, org, request.target)
    if request.queue is not None:
        await _check_queue(connection, request, org)
    elif not await _sql.job_exists(connection, org_id=org.org_id, dag=request.dag, job=request.job):
        which = request.job if request.dag is None else f"{request.dag}/{request.job}"
        raise NotFound(f"There is no job {which!r} in this org; deploy it first.", code="unknown_job")


async def _check_queue(connection: Connection, request: RouteRequest, org: Org) -> None:
    names = {"org_id": org.org_id, "queue": request.queue, "dlq": request.dlq}
    other = await _sql.other_routes_of_queue(connection, target=request.target, name=request.name, **names)
    if other is not None and other["target"] != request.target:
        raise Conflict(
            f"The queue {request.queue!r} belongs to {other['target']}/{other['name']}; a queue has one target: choose "
            "another name.",
            code="queue_taken",
        )
    if other is not None:
        raise Conflict(
            f"The queue {request.queue!r} has the `dlq` {other['dlq']!r} in another route; set the same.",
            code="queue_taken",
        )
    if (other := await _sql.queue_named(connection, **names)) is not None:
        raise Conflict(
            f"{other['target']}/{other['name']} uses {request.queue!r} or {request.dlq!r} for another purpose: queues "
            "and dead letters need distinct names.",
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
    """Validates a limit without a look at other entries."""
    if (request.target is None) != (request.name is None) or (request.target is None and request.source is None):
        raise BadRequest(
            "A limit is on a command, with `target` and `name`, or on a source alone, with only `source`.",
            code="bad_limit",
        )


async def _check_limit(connection: Connection, request: LimitRequest, org: Org) -> None:
    check_limit(request)
    named = (request.target, None if request.source is None else org.service(request.source))
    await _require_services(connection, org, *(name for name in named if name is not None))


def _limit_parts(request: LimitRequest, org: Org) -> tuple[str, ...]:
    """Uses `*` for a limit on a source alone: it is not a valid name, so that the subject is unique."""
    lane = (request.target or "*", request.name or "*")
    return lane if request.source is None else (*lane, org.service(request.source))


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

# Any: each kind has its own request type, and the caller converts a document into it.
ENTRIES: Final[dict[RegistryKind, Entry[Any]]] = {entry.kind: entry for entry in (SERVICE, ROUTE, ACL, LIMIT)}


@dataclass(frozen=True)
class Registrar:
    """The author of a change, and the org of the registry."""

    org_id: UUID
    org: str
    user: str


@dataclass(frozen=True)
class Change:
    kind: RegistryKind
    action: RegistryAction
    subject: str
    before: object | None
    after: object | None
    version: int
    reverts: int | None = None

    def view(self, by: Registrar, now: datetime, *, dry_run: bool) -> RegistryChange:
        return RegistryChange(
            change_id=None,
            kind=self.kind,
            action=self.action,
            subject=self.subject,
            before=_raw(self.before),
            after=_raw(self.after),
            dry_run=dry_run,
            changed_at=now,
            changed_by=by.user,
            reverts=self.reverts,
        )


async def record(connection: Connection, what: Change, by: Registrar) -> Row:
    """Writes the changelog and notifies dispatchers, in the transaction of the change."""
    row: Row = await _sql.record_change(
        connection,
        org_id=by.org_id,
        kind=what.kind,
        action=what.action,
        subject=what.subject,
        before=_text(what.before),
        after=_text(what.after),
        version=what.version,
        changed_by=by.user,
        reverts=what.reverts,
    )
    await _sql.announce(connection)
    return row


def change_view(row: Row) -> RegistryChange:
    return RegistryChange(
        change_id=row["change_id"],
        kind=RegistryKind(row["kind"]),
        action=RegistryAction(row["action"]),
        subject=row["subject"],
        before=Raw((row["before"] or "null").encode()),
        after=Raw((row["after"] or "null").encode()),
        dry_run=False,
        changed_at=row["changed_at"],
        changed_by=row["changed_by"],
        reverts=row["reverts"],
    )


def _text(document: object | None) -> str | None:
    return None if document is None else msgspec.json.encode(document).decode()


def _raw(document: object | None) -> Raw:
    return Raw(msgspec.json.encode(document))
