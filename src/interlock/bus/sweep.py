"""Deletes what the path of commands has no more use for."""

from __future__ import annotations

from typing import Final

from interlock.adapters.postgres import Database, queries
from interlock.kernel.loop import Periodic
from interlock.settings import Settings

_sql = queries("bus_path")

_MOST: Final = 5_000


class BusSweep(Periodic):
    name = "bus_sweep"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.retention_seconds
        self._database = database

    async def run_once(self) -> int:
        """Ids of strict commands whose time is over: nobody would find them in the way, but they add up."""
        async with self._database.connection() as connection:
            return len(await _sql.forget_ids(connection, most=_MOST))
