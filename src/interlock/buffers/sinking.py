"""The loops of one sink, on the stores that it is handed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from interlock.adapters.objects import Objects
from interlock.adapters.postgres import Database
from interlock.adapters.queue import Queue
from interlock.buffers.heavy import SparkLoads
from interlock.buffers.records import Records
from interlock.buffers.sink import Sink
from interlock.buffers.store import Store
from interlock.buffers.upkeep import BufferReconciler, BufferSweeper
from interlock.kernel.loop import Service
from interlock.settings import Settings

_CONNECTIONS: Final = 4
"""To the data database: two groups that are written, one sweep, one to spare."""
_PASSES: Final = 2
"""Of the sink at once: what the one has received is read while rows of the other are written. How much there is of both
in memory, the sink knows itself."""


@asynccontextmanager
async def services(
    settings: Settings, database: Database, queue: Queue, objects: Objects, data_url: str, *, wait_seconds: float
) -> AsyncIterator[list[Service]]:
    async with Store.open(data_url, size=_CONNECTIONS) as store:
        records = Records(database, settings)
        loads = SparkLoads(database, settings, store, records)
        sink = Sink(settings, queue, objects, store, records, loads, wait_seconds=wait_seconds)
        yield [
            *[sink] * _PASSES,
            loads,
            BufferReconciler(database, settings),
            BufferSweeper(database, settings, objects, store),
        ]
