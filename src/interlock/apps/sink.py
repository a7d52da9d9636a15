"""The sink process: loads published batches. It needs both databases and the objects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from interlock.apps.metrics import serving_metrics
from interlock.apps.process import run_loops, stop_on_signals
from interlock.apps.stores import listening, process_objects, state_database
from interlock.clock import Clock
from interlock.datasets.buffers import loops
from interlock.errors import ConfigurationError
from interlock.processes.loop import Service
from interlock.settings import Settings
from interlock.tasks.build import open_queue


@asynccontextmanager
async def sink(
    settings: Settings, *, clock: Clock | None = None, wait_seconds: float = 10.0
) -> AsyncIterator[list[Service]]:
    if settings.data_url is None:
        raise ConfigurationError(
            "data_url is not set. `interlock up` starts an embedded database and sets it for its processes; "
            "set INTERLOCK_DATA_URL for a sink that you start separately."
        )
    url = settings.data_url.get_secret_value()
    async with (
        state_database(settings, "sink", clock) as database,
        serving_metrics(settings, database, "sink_metrics"),
        listening(settings) as wakeups,
    ):
        queue, objects = open_queue(settings, database, wakeups), process_objects(settings)
        async with loops.services(settings, database, queue, objects, url, wait_seconds=wait_seconds) as services:
            yield services


async def run_sink(settings: Settings) -> None:
    stop = stop_on_signals()
    async with sink(settings) as services:
        await run_loops(services, stop)
