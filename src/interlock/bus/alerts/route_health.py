"""Route health: a loop checks the queue of every route and opens alerts for those that are not drained.

It also reports dead letters of the task queues to the orgs of their tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final
from uuid import UUID

import msgspec

from interlock.access.principals import Principal
from interlock.bus.alerts.alerts import Raised, raise_alerts
from interlock.bus.metrics import ROUTES
from interlock.failpoints import failpoint
from interlock.http.cursors import bad_cursor, next_cursor
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.wire.bus_events import DEAD_LETTERS, ROUTE_UNHEALTHY, RouteHealth, RouteHealthPage, RouteStatus

_sql = queries(__name__, "monitor")

_PAGE: Final = 200
_BOUND: Final = 10_000
LOOKS: Final = 5
"""Consecutive checks before a condition that may be temporary counts."""
_KEPT_SECONDS: Final = 86_400.0
_FIRST: Final = (UUID(int=0), "", "")


class Monitor(Periodic):
    """Checks all routes in pages. Each page is one transaction, together with the alerts that it opens."""

    name = "monitor"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.monitor_seconds
        self._database = database
        self._alert_seconds = settings.alert_seconds
        self._queues = settings.queues

    async def run_once(self) -> int:
        """Always returns 0: a pass covers all routes."""
        after, found = _FIRST, Counter[str]()
        while True:
            rows = await self._look(after)
            found.update(row["status"] for row in rows)
            if len(rows) < _PAGE:
                break
            after = (rows[-1]["org_id"], rows[-1]["target"], rows[-1]["name"])
        for status in RouteStatus:
            if status is not RouteStatus.MISROUTED:
                ROUTES.labels(status=status.value).set(found[status.value])
        async with self._database.connection() as connection:
            await _sql.forget(connection, age_seconds=_KEPT_SECONDS, limit=_PAGE)
        await self._report_dead_letters()
        return 0

    async def _report_dead_letters(self) -> None:
        """Opens an alert for each org with new dead letters. The query reaches back two periods, since a message may
        become a dead letter during the pass; a repeated report only raises the count of the open alert."""
        async with self._database.transaction() as connection:
            rows = await _sql.dead_letters(connection, queues=self._queues, seconds=2 * self.seconds, limit=_BOUND)
            raised = {(row["org_id"], DEAD_LETTERS): Raised(row["dead_letters"], _dead_sample(row)) for row in rows}
            await raise_alerts(connection, raised, seconds=self._alert_seconds, now=self._database.clock.now())

    async def _look(self, after: tuple[UUID, str, str]) -> list[Row]:
        async with self._database.transaction() as connection:
            rows: list[Row] = await _sql.look(
                connection,
                org_id=after[0],
                target=after[1],
                name=after[2],
                limit=_PAGE,
                bound=_BOUND,
                looks=LOOKS,
                idle_seconds=self.seconds,
            )
            fallen = [row for row in rows if row["was"] == "healthy" and row["status"] != "healthy"]
            await raise_alerts(connection, _raised(fallen), seconds=self._alert_seconds, now=self._database.clock.now())
            await failpoint("monitor.before_commit")
        return rows


def _raised(fallen: Iterable[Row]) -> dict[tuple[UUID, str], Raised]:
    raised: dict[tuple[UUID, str], Raised] = {}
    for row in fallen:
        known = raised.get((row["org_id"], ROUTE_UNHEALTHY))
        if known is None:
            raised[row["org_id"], ROUTE_UNHEALTHY] = Raised(1, _sample(row))
        else:
            known.told += 1
    return raised


def _sample(row: Row) -> str:
    sample = {
        "event": ROUTE_UNHEALTHY,
        "target": row["target"],
        "command.name": row["name"],
        "status": row["status"],
        "depth": row["depth"],
        "oldest_age_seconds": row["oldest_age"],
        "expected_drain_seconds": row["expected_drain_seconds"],
    }
    return msgspec.json.encode(sample).decode()


def _dead_sample(row: Row) -> str:
    sample = {"event": DEAD_LETTERS, "queues": row["queues"], "dead_letters": row["dead_letters"]}
    return msgspec.json.encode(sample).decode()


async def count_misroutes(connection: Connection, misroutes: Counter[tuple[UUID, str, str]]) -> None:
    """Counts misroutes by org, target and name, in the transaction that delivers their telemetry."""
    if misroutes:
        await _sql.count_misroutes(
            connection,
            org_ids=[org_id for org_id, _, _ in misroutes],
            targets=[target for _, target, _ in misroutes],
            names=[name for _, _, name in misroutes],
            misroutes=list(misroutes.values()),
        )


class RouteHealths:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, caller: Principal, cursor: str | None, limit: int, *, only_bad: bool) -> RouteHealthPage:
        target, name = _position(cursor)
        statement = _sql.bad_health_of if only_bad else _sql.health_of
        async with self._database.connection() as connection:
            rows = await statement(connection, org_id=caller.org_id, target=target, name=name, limit=limit)
        following = next_cursor(rows, limit, "target", "name")
        return RouteHealthPage(routes=[_health(row) for row in rows], next_cursor=following)


def _position(cursor: str | None) -> tuple[str, str]:
    if cursor is None:
        return "", ""
    target, slash, name = cursor.partition("/")
    if not slash or "\x00" in cursor:
        raise bad_cursor()
    return target, name


def _health(row: Row) -> RouteHealth:
    return RouteHealth(
        target=row["target"],
        name=row["name"],
        status=RouteStatus(row["status"]),
        since=row["since"],
        checked_at=row["checked_at"],
        depth=row["depth"],
        in_flight=row["in_flight"],
        dead_letters=row["dead_letters"],
        oldest_age_seconds=row["oldest_age"],
        misroutes=row["misroutes"],
    )
