"""Accepted commands for tests of what becomes of them afterwards."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pyarrow.parquet as pq
from msgspec import Raw
from msgspec.json import encode

from interlock.bus.archived import ArchivedCommand, keep
from tests.system import System


async def owe_commands(system: System, payloads: Sequence[Any], *, seconds_ago: float = 0.0, **more: Any) -> None:
    """As one request would."""
    now = system.kernel.clock.now() - timedelta(seconds=seconds_ago)
    fields: dict[str, Any] = {"source": "default/billing", "target": "discord-bot", "name": "post-message"} | more
    commands = [
        ArchivedCommand(
            command_id=uuid4(),
            timestamp=now,
            version_id="hmac-v1",
            accepted_at=now,
            payload=Raw(encode(payload)),
            **fields,
        )
        for payload in payloads
    ]
    async with system.kernel.database.transaction() as connection:
        await keep(connection, [(system.org_id, command) for command in commands])
        await connection.execute(
            "update interlock.bus_archive set accepted_at = accepted_at - make_interval(secs => $1)", seconds_ago
        )


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
