"""How telemetry is owed: written in the transaction of the decision that it tells of.

The events themselves are in `interlock.wire.bus_events`. A statement that decides about many commands at once takes
`owed(...)` as three arrays and writes them beside everything else; whoever has no such statement calls `tell`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from uuid import UUID

from interlock.adapters.postgres import Connection, queries
from interlock.wire.bus_events import BusEvent, encoded

_sql = queries("bus_telemetry")


class Owed(NamedTuple):
    """Columns of `bus_telemetry`, a row per tenant."""

    org_ids: list[UUID]
    events: list[str]
    """JSON arrays."""
    events_in: list[int]


def owed(events: Iterable[tuple[UUID, BusEvent]]) -> Owed:
    """`events` with the org of each: the one whose service has sent the command."""
    by_org: dict[UUID, list[bytes]] = {}
    for org_id, event in events:
        by_org.setdefault(org_id, []).append(encoded(event))
    return Owed(list(by_org), [_array(each) for each in by_org.values()], [len(each) for each in by_org.values()])


def _array(items: list[bytes]) -> str:
    return (b"[" + b",".join(items) + b"]").decode()


async def tell(connection: Connection, events: Iterable[tuple[UUID, BusEvent]]) -> None:
    """In the caller's transaction."""
    rows = owed(events)
    if rows.org_ids:
        await _sql.tell(connection, org_ids=rows.org_ids, events=rows.events, events_in=rows.events_in)
