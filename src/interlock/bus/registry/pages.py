"""Pages of the registry, and trials of a command against it."""

from __future__ import annotations

from typing import Any

import msgspec

from interlock.bus.registry.entries import Org, Registrar, route_of
from interlock.errors import NotFound
from interlock.http.cursors import next_cursor
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.bus_registry import (
    AclPage,
    AclView,
    DispatchMode,
    Enforcement,
    LimitPage,
    LimitView,
    RouteCheck,
    RoutePage,
    RouteTrial,
    RouteTrialRequest,
    RouteView,
    Sensitivity,
    ServicePage,
    ServiceView,
)

_sql = queries(__name__, "writes")
_reads_sql = queries(__name__, "registry")
_keys_sql = queries(__name__, "keys")


class RegistryPages:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def services(self, by: Registrar, cursor: str | None, limit: int) -> ServicePage:
        async with self._database.connection() as connection:
            rows = await _sql.list_services(connection, org_id=by.org_id, after=cursor or "", limit=limit)
        return ServicePage(services=[_service(row, by) for row in rows], next_cursor=next_cursor(rows, limit, "name"))

    async def service(self, name: str, by: Registrar) -> ServiceView:
        async with self._database.connection() as connection:
            row = await _sql.find_service(connection, org_id=by.org_id, name=name)
        if row is None:
            raise NotFound(f"There is no service {name[:100]!r} in this org.", code="unknown_service")
        return _service(row, by)

    async def routes(self, by: Registrar, target: str | None, cursor: str | None, limit: int) -> RoutePage:
        rows = await self._rows("routes", ("target", "name"), by, target, cursor, limit)
        return RoutePage(routes=[_route(row) for row in rows], next_cursor=next_cursor(rows, limit, "target", "name"))

    async def route(self, target: str, name: str, by: Registrar) -> RouteView:
        async with self._database.connection() as connection:
            row = await _sql.find_route(connection, org_id=by.org_id, target=target, name=name)
        if row is None:
            raise NotFound(f"There is no route for {name[:100]!r} of {target[:100]!r} in this org.")
        return _route(row)

    async def acls(self, by: Registrar, target: str | None, cursor: str | None, limit: int) -> AclPage:
        rows = await self._rows("acls", ("target", "name", "source"), by, target, cursor, limit)
        return AclPage(
            acls=[_acl(row, by) for row in rows], next_cursor=next_cursor(rows, limit, "target", "name", "source")
        )

    async def limits(self, by: Registrar, target: str | None, cursor: str | None, limit: int) -> LimitPage:
        rows = await self._rows("limits", ("target", "name", "source"), by, target, cursor, limit)
        return LimitPage(
            limits=[_limit(row, by) for row in rows], next_cursor=next_cursor(rows, limit, "target", "name", "source")
        )

    async def _rows(
        self, kind: str, parts: tuple[str, ...], by: Registrar, target: str | None, cursor: str | None, limit: int
    ) -> list[Row]:
        """Returns a page of one target or of all, in the order of the key."""
        after = dict(zip(parts, [*(cursor or "").split("/"), "", "", ""][: len(parts)], strict=True))
        page: dict[str, Any] = {f"after_{part}": text for part, text in after.items()}
        if target is not None:
            page = {name: value for name, value in page.items() if name != "after_target"} | {"target": target}
        statement = f"list_{kind}" if target is None else f"list_{kind}_of_target"
        async with self._database.connection() as connection:
            rows: list[Row] = await getattr(_sql, statement)(connection, org_id=by.org_id, limit=limit, **page)
        return rows

    # A trial

    async def trial(self, request: RouteTrialRequest, by: Registrar) -> RouteTrial:
        """Checks a command against the registry. It sends nothing and uses up no limit."""
        org = Org(by.org_id, by.org, self._database.clock.now())
        source = org.service(request.source)
        async with self._database.connection() as connection:
            checks = [
                await _try_service(connection, org, source),
                await _try_key(connection, org, source),
                await _try_acl(connection, org, source, request),
                *await _try_route(connection, org, request),
                *await _try_limits(connection, org, source, request),
            ]
        return RouteTrial(
            source=org.source(source),
            target=request.target,
            name=request.name,
            deliverable=all(check.ok for check in checks),
            checks=checks,
        )


async def _try_service(connection: Connection, org: Org, source: str) -> RouteCheck:
    row = await _sql.find_service(connection, org_id=org.org_id, name=source)
    if row is None:
        return RouteCheck(
            check="service", ok=False, detail=f"There is no service {source!r}: interlock service add {source}"
        )
    return RouteCheck(check="service", ok=True, detail=f"{source} is registered")


async def _try_key(connection: Connection, org: Org, source: str) -> RouteCheck:
    rows = await _keys_sql.good_keys(connection, org_id=org.org_id, service=source)
    if not rows or rows[0]["expires_at"] is not None:
        return RouteCheck(
            check="key", ok=False, detail=f"{source!r} has no current key: interlock service-key rotate {source}"
        )
    return RouteCheck(check="key", ok=True, detail=f"it signs with hmac-v{rows[0]['number']}")


async def _try_acl(connection: Connection, org: Org, source: str, request: RouteTrialRequest) -> RouteCheck:
    key = {"org_id": org.org_id, "target": request.target, "name": request.name}
    row = await _reads_sql.read_one_acl(connection, source=source, **key)
    if row is None:
        write = f"interlock acl allow {source} {request.target} {request.name}"
        return RouteCheck(check="acl", ok=False, detail=f"{source!r} may not send this: {write}")
    return RouteCheck(check="acl", ok=True, detail=f"allowed, sensitivity {row['sensitivity']}")


async def _try_route(connection: Connection, org: Org, request: RouteTrialRequest) -> list[RouteCheck]:
    row = await _reads_sql.read_one_route(connection, org_id=org.org_id, target=request.target, name=request.name)
    if row is None:
        write = f"interlock route add {request.target} {request.name} --queue QUEUE"
        return [RouteCheck(check="route", ok=False, detail=f"There is no route: {write}")]
    found = RouteCheck(check="route", ok=True, detail=f"found, dedupe_mode {row['dedupe_mode']}")
    if row["queue"] is not None:
        destination = f"the queue {row['queue']}, with dead letters in {row['dlq']}"
        return [found, RouteCheck(check="destination", ok=True, detail=destination)]
    which = row["job_name"] if row["dag_name"] is None else f"{row['dag_name']}/{row['job_name']}"
    there = await _sql.job_exists(connection, org_id=org.org_id, dag=row["dag_name"], job=row["job_name"])
    detail = (
        f"the job {which}" if there else f"The job {which!r} does not exist any more; deploy it, or change the route."
    )
    return [found, RouteCheck(check="destination", ok=there, detail=detail)]


async def _try_limits(connection: Connection, org: Org, source: str, request: RouteTrialRequest) -> list[RouteCheck]:
    lane = {"target": request.target, "name": request.name, "source": None}
    own = {"target": None, "name": None, "source": source}
    found = []
    for key, of in ((lane, ""), (own, f", of all that {source} sends")):
        row = await _sql.find_limit(connection, org_id=org.org_id, **key)
        if row is not None:
            every = f"{row['rate']} every {row['window_seconds']:g} s, {row['enforcement']}{of}"
            found.append(RouteCheck(check="limit", ok=True, detail=every))
    return found or [RouteCheck(check="limit", ok=True, detail="none")]


def _service(row: Row, by: Registrar) -> ServiceView:
    return ServiceView(
        name=row["name"],
        source=f"{by.org}/{row['name']}",
        description=row["description"],
        dispatch_mode=None if row["dispatch_mode"] is None else DispatchMode(row["dispatch_mode"]),
        changed_at=row["changed_at"],
        changed_by=row["changed_by"],
    )


def _route(row: Row) -> RouteView:
    return RouteView(
        **msgspec.structs.asdict(route_of(row)), changed_at=row["changed_at"], changed_by=row["changed_by"]
    )


def _acl(row: Row, by: Registrar) -> AclView:
    return AclView(
        source=f"{by.org}/{row['source']}",
        target=row["target"],
        name=row["name"],
        sensitivity=Sensitivity(row["sensitivity"]),
        expires_at=row["expires_at"],
        changed_at=row["changed_at"],
        changed_by=row["changed_by"],
    )


def _limit(row: Row, by: Registrar) -> LimitView:
    return LimitView(
        target=row["target"],
        name=row["name"],
        source=None if row["source"] is None else f"{by.org}/{row['source']}",
        rate=row["rate"],
        window_seconds=row["window_seconds"],
        burst=row["burst"],
        cooldown_seconds=row["cooldown_seconds"],
        enforcement=Enforcement(row["enforcement"]),
        changed_at=row["changed_at"],
        changed_by=row["changed_by"],
    )
