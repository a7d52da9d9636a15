"""Accepted commands for tests of what becomes of them afterwards."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pyarrow.parquet as pq

from interlock.bus.decision import Decision, Outcome
from interlock.bus.dispatched import dispatched
from interlock.bus.effects import Effects
from interlock.bus.envelope import read
from interlock.bus.model import Route
from tests.bus.producing import signed
from tests.system import System


async def owe_commands(system: System, payloads: Sequence[Any], *, seconds_ago: float = 0.0) -> None:
    """As one request would."""
    now = system.kernel.clock.now() - timedelta(seconds=seconds_ago)
    effects = Effects(now)
    for payload in payloads:
        envelope = read(signed(now.timestamp(), payload=payload, target="discord-bot", name="post-message"))
        route = Route("discord-bot", "post-message", queue="posts")
        delivered = dispatched("default/billing", [Decision(Outcome.DELIVERED, envelope, route=route)])
        effects.dispatch(system.org_id, delivered, 0.0)
    async with system.kernel.database.transaction() as connection:
        await effects.write(connection)


async def archived_rows(system: System) -> list[dict[str, Any]]:
    """Of the partitions that are committed, in their order."""
    page = (await system.user("GET", "/v1/datasets/bus_commands/partitions")).json()
    rows: list[dict[str, Any]] = []
    for partition in page["partitions"]:
        data = await system.kernel.objects.read(partition["location"])
        assert data is not None
        rows += pq.read_table(io.BytesIO(data)).to_pylist()
    return rows


async def archived_payloads(system: System) -> list[Any]:
    return [json.loads(row["payload"]) for row in await archived_rows(system)]
