"""Which workers ask for work, so that `explain` can say when nobody does."""

from __future__ import annotations

import time

from interlock.adapters.postgres import Database, Row, queries

_sql = queries("queue")
_EVERY_SECONDS = 10.0
_MOST = 10_000


class Presence:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._written: dict[tuple[str, str], float] = {}

    async def seen(self, worker_id: str, queue: str) -> None:
        """Written rarely: a busy worker asks a hundred times a second."""
        key, now = (worker_id.replace("\x00", ""), queue), time.monotonic()
        if now - self._written.get(key, float("-inf")) < _EVERY_SECONDS:
            return
        if len(self._written) > _MOST:
            self._written.clear()
        self._written[key] = now
        async with self._database.connection() as connection:
            await _sql.worker_seen(connection, worker_id=key[0], queue=queue)

    async def workers(self) -> list[Row]:
        async with self._database.connection() as connection:
            rows: list[Row] = await _sql.live_workers(connection)
        return rows
