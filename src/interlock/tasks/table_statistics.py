"""Keeps PostgreSQL from planning for empty tables.

A VACUUM of a table whose rows were all deleted records that its pages hold no rows. From then on, until the next
ANALYZE, the planner expects one row, however large the table becomes. A lookup by key then costs as much as a scan of
any index, and statements are planned as such scans: they read all tasks, and they lock rows in the order of that index,
so that two of them can deadlock. Without a count, the planner expects a few pages of rows and uses keys.
"""

from __future__ import annotations

from typing import Final

import asyncpg
import structlog

from interlock.processes.loop import Periodic
from interlock.stores.postgres import Connection, Database, queries

log = structlog.get_logger()
_sql = queries(__name__, "statistics")

_FEW_ROWS: Final = 100


class TableStatistics(Periodic):
    """Forgets the row counts of tables that were almost empty when they were counted."""

    name = "statistics"

    def __init__(self, database: Database) -> None:
        self._database = database

    async def run_once(self) -> int:
        async with self._database.connection() as connection:
            rows = await _sql.tables_counted_empty(connection, rows=_FEW_ROWS)
        for row in rows:
            await self._forget(row["name"])
        return 0  # an autovacuum may count again; the next pass can wait

    async def _forget(self, name: str) -> None:
        async def work(connection: Connection) -> None:
            await _sql.wait_briefly(connection)
            await _sql.forget_count(connection, name=name)

        try:
            await self._database.run(work)
        except asyncpg.LockNotAvailableError:
            log.info("statistics.table_busy", table=name)  # the next pass tries again
