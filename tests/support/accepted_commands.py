"""Accepted commands, for tests of the archive."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pyarrow.parquet as pq

from interlock.bus.model import Decision, Outcome, Route
from interlock.bus.path.persistence import Dispatched, Effects
from interlock.wire.commands import read
from tests.support.signed_commands import signed
from tests.support.system import System


async def owe_commands(system: System, payloads: Sequence[Any], *, seconds_ago: float = 0.0) -> None:
    """Writes accepted commands to the archive queue, as one request does."""
    now = system.kernel.stores.clock.now() - timedelta(seconds=seconds_ago)
    effects = Effects(now)
    for payload in payloads:
        envelope = read(signed(now.timestamp(), payload=payload, target="discord-bot", name="post-message"))
        route = Route("discord-bot", "post-message", queue="posts")
        decision = Decision(Outcome.DELIVERED, envelope, route=route)
        effects.dispatch(system.org_id, Dispatched.of("default/billing", [decision]), 0.0)
    async with system.kernel.stores.database.transaction() as connection:
        await effects.write(connection)


async def archived_rows(system: System) -> list[dict[str, Any]]:
    """Returns the rows of committed partitions, in order."""
    page = (await system.user("GET", "/v1/datasets/bus_commands/partitions")).json()
    rows: list[dict[str, Any]] = []
    for partition in page["partitions"]:
        data = await system.kernel.access.objects.read(partition["location"])
        assert data is not None
        rows += pq.read_table(io.BytesIO(data)).to_pylist()
    return rows


async def archived_payloads(system: System) -> list[Any]:
    return [json.loads(row["payload"]) for row in await archived_rows(system)]
