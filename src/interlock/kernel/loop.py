"""The thin shell around every background loop: run a pass, again at once while there is work, else wait."""

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
    """One background service. A pass is safe beside the same pass in another dispatcher."""

    name: str
    seconds: float
    """Pause after a pass that found nothing to do."""

    async def run_once(self) -> int:
        """Does a bounded amount of work; returns how much, 0 when there was none."""

    async def idle(self, seconds: float) -> None:
        """Waits for more work, at most this long."""


class Periodic:
    """A service without a wake-up of its own."""

    name = ""
    seconds = 1.0

    async def idle(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Gathering(Periodic):
    """A service that would find a little work after every pass, and at the price of a whole one."""

    breath = 0.0
    """Pause after a pass that did something: what comes meanwhile is done together. 0 goes on at once."""


async def forever(service: Service, dice: Callable[[], float] = random.random) -> None:
    """A pass that fails, for whatever reason, is logged and tried again: a loop that is gone would go unnoticed."""
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
            await asyncio.sleep(min(5.0, service.seconds * 2 ** min(failures, 6)) * (0.5 + dice()))
            continue
        failures = 0
        LOOP_PASSES.labels(loop=service.name, result="work" if done else "idle").inc()
        LOOP_SECONDS.labels(loop=service.name).observe(time.perf_counter() - started)
        if not done:
            await service.idle(service.seconds)
        elif isinstance(service, Gathering) and service.breath:
            await service.idle(service.breath)
