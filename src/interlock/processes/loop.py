"""Runs background services: pass after pass while there is work, else a pause."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from interlock.errors import InterlockError
from interlock.telemetry import LOOP_PASSES, LOOP_SECONDS

log = structlog.get_logger()


class Service(Protocol):
    """One background service. Dispatchers may run passes of the same service concurrently."""

    name: str
    seconds: float
    """Pause after a pass that found no work."""

    async def run_once(self) -> int:
        """Does a bounded amount of work and returns how much; 0 if there was none."""

    async def idle(self, seconds: float) -> None:
        """Waits for more work, at most this long."""


class Periodic:
    """A service that only polls."""

    name = ""
    seconds = 1.0

    async def idle(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Gathering(Periodic):
    """A service that would find a little work after every pass, each at the cost of a full pass."""

    batching_pause = 0.0
    """Pause after a pass that found work, so that the next pass handles a larger batch. 0 disables it."""


async def forever(service: Service, uniform: Callable[[], float] = random.random) -> None:
    """Runs passes forever. A failed pass is logged and retried: nobody would notice a loop that stopped."""
    failures = 0
    while True:
        started = time.perf_counter()
        try:
            done = await service.run_once()
        except Exception as error:
            failures += 1
            LOOP_PASSES.labels(loop=service.name, result="error").inc()
            expected = isinstance(error, InterlockError)
            log.warning("loop.failed", loop=service.name, reason=str(error), exc_info=None if expected else error)
            await asyncio.sleep(min(5.0, service.seconds * 2 ** min(failures, 6)) * (0.5 + uniform()))
            continue
        failures = 0
        LOOP_PASSES.labels(loop=service.name, result="work" if done else "idle").inc()
        LOOP_SECONDS.labels(loop=service.name).observe(time.perf_counter() - started)
        if not done:
            await service.idle(service.seconds)
        elif isinstance(service, Gathering) and service.batching_pause:
            await service.idle(service.batching_pause)
