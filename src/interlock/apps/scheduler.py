"""The scheduler process: starts cron sources. It needs the state database only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from interlock.apps.process import run_loops, stop_on_signals
from interlock.apps.stores import state_database
from interlock.clock import Clock
from interlock.dags.scheduler import Scheduler
from interlock.processes.loop import Service
from interlock.settings import Settings


@asynccontextmanager
async def scheduler(settings: Settings, *, clock: Clock | None = None) -> AsyncIterator[Service]:
    async with state_database(settings, "scheduler", clock) as database:
        yield Scheduler(database, settings)


async def run_scheduler(settings: Settings) -> None:
    stop = stop_on_signals()
    async with scheduler(settings) as service:
        await run_loops([service], stop)
