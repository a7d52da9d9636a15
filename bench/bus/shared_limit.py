"""Eight slow stages, each a separate process, share one strict limit: how many commands pass, and how many could."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any
from uuid import UUID

import asyncpg

from bench.bus.registry import NAME, PRODUCER, TARGET, message
from bench.harness import Installation
from interlock.bus.path.delivery import body
from interlock.wire.commands import read

DISPATCHERS = 8


async def competing(here: Installation, connection: asyncpg.Connection[Any], org_id: UUID, rate: int) -> dict[str, int]:
    """Hands over 50 % more commands than the limit admits, before any stage starts."""
    source = f"bench/{PRODUCER}"
    await connection.execute(
        "insert into interlock.bus_limits (org_id, target, name, rate, window_seconds, version, changed_by)"
        " values ($1, $2, $3, $4, 86400, 1, 'bench')",
        org_id,
        TARGET,
        NAME,
        rate,
    )
    before = await _delivered(connection)
    bodies = [body(read(message()), source) for _ in range(rate + rate // 2)]
    await connection.execute(
        "insert into interlock.bus_handoffs (org_id, source, command_id, reason, body, facts, received_at)"
        " select $1, $2, gen_random_uuid(), 'token_required', m, '{}', now() from unnest($3::text[]) m",
        org_id,
        source,
        bodies,
    )
    dispatchers = [await _start(here) for _ in range(DISPATCHERS)]
    try:
        while await connection.fetchval("select exists (select 1 from interlock.bus_handoffs)"):  # noqa: ASYNC110 - in other processes
            await asyncio.sleep(0.05)
    finally:
        for process in dispatchers:
            process.send_signal(signal.SIGTERM)
        for process in dispatchers:
            await process.wait()
        await connection.execute("delete from interlock.bus_limits where org_id = $1", org_id)
    return {"limit": rate, "commands": len(bodies), "delivered": await _delivered(connection) - before}


async def _delivered(connection: asyncpg.Connection[Any]) -> int:
    count: int = await connection.fetchval("select count(*) from interlock.queue_messages where queue like 'bus:%'")
    return count


async def _start(here: Installation) -> asyncio.subprocess.Process:
    environment = os.environ | {
        "INTERLOCK_STATE_URL": here.info["state_url"],
        "INTERLOCK_DIR": str(here.directory),
        "INTERLOCK_LOG_LEVEL": "warning",
    }
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "interlock.cli", "serve", "bus", env=environment)
