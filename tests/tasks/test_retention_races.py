"""Races between retention and the renewal of a row that it is about to delete."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

from interlock.clock import ManualClock
from interlock.stores.postgres import Connection, queries
from tests.support.system import System, until

HOUR = 3600


async def deleted_beside(system: System, renew: Callable[[Connection], Awaitable[Any]], delete: Any) -> int:
    """Returns the number of rows deleted during a renewal, which commits once the deletion is done or waits for it."""
    database = system.kernel.stores.database

    async def deletion() -> int:
        async with database.connection() as connection:
            return len(await delete(connection, limit=100))

    async with database.transaction() as connection:
        await renew(connection)
        deleting = asyncio.create_task(deletion())

        async def settled() -> bool:
            waiting = "select exists (select 1 from pg_locks where not granted and pid <> pg_backend_pid())"
            return deleting.done() or bool(await connection.fetchval(waiting))

        await until(settled)
    return await deleting


async def test_request_repeated_as_its_record_expires_is_recognised(still: System, clock: ManualClock) -> None:
    record = {"org_id": still.org_id, "endpoint": "POST /v1/jobs", "key": "again", "request_hash": b"hash"}

    async def remember(connection: Connection) -> Any:
        return await queries("interlock.tasks", "jobs").remember_request(connection, seconds=HOUR, **record)

    async with still.kernel.stores.database.connection() as connection:
        await remember(connection)
    clock.advance(HOUR + 1)
    assert await deleted_beside(still, remember, queries("interlock.tasks", "runs").delete_expired_requests) == 0
    assert await still.value("select count(*) from interlock.idempotency_keys where expires_at > $1", clock.now()) == 1


async def test_capability_renewed_as_it_expires_stays_valid(still: System, clock: ManualClock) -> None:
    sql = queries("interlock.access", "principals")
    async with still.kernel.stores.database.connection() as connection:
        capability: UUID = await sql.insert_capability(
            connection, task_id=uuid4(), attempt=1, grants="[]", seconds=HOUR
        )
    clock.advance(HOUR + 1)

    async def renew(connection: Connection) -> Any:
        return await sql.renew_capability(connection, capability_id=capability, seconds=HOUR)

    assert await deleted_beside(still, renew, queries("interlock.tasks", "retention").delete_expired_capabilities) == 0
    async with still.kernel.stores.database.connection() as connection:
        assert await sql.find_capability(connection, capability_id=capability) is not None
