"""The ingest process: makes the tasks of staged lists and of backfills. It needs the state database and the objects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from interlock.apps.metrics import serving_metrics
from interlock.apps.process import run_loops, stop_on_signals
from interlock.apps.stores import listening, process_objects, state_database, state_url
from interlock.clock import Clock
from interlock.jobs import loops
from interlock.processes.loop import Service
from interlock.settings import Settings
from interlock.tasks.build import open_queue


@asynccontextmanager
async def ingest(
    settings: Settings, *, clock: Clock | None = None, wait_seconds: float = 10.0
) -> AsyncIterator[list[Service]]:
    async with (
        state_database(settings, "ingest", clock) as database,
        serving_metrics(settings, database, "ingest_metrics"),
        listening(settings) as wakeups,
    ):
        queue, objects = open_queue(settings, database, wakeups), process_objects(settings)
        yield loops.services(settings, database, queue, objects, state_url(settings), wait_seconds=wait_seconds)


async def run_ingest(settings: Settings) -> None:
    stop = stop_on_signals()
    async with ingest(settings) as services:
        await run_loops(services, stop)
