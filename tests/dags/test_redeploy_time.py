"""A redeploy does not wait for polling loops: each step wakes the next one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from interlock.apps.dispatcher import services
from interlock.processes.loop import forever
from interlock.telemetry import REGISTRY
from tests.dags.test_cutover import chain
from tests.support.deployed_dags import DeployedDags
from tests.support.system import System, until

BOUND_SECONDS = 3.0


@asynccontextmanager
async def dispatching(system: System) -> AsyncIterator[None]:
    """Runs the loops of a dispatcher with their usual pauses, and a worker that executes every task."""
    deployed = DeployedDags(system)

    async def work() -> None:
        while True:
            for message in await system.receive(wait_seconds=20):
                claim = await system.claim(message["body"]["task_id"])
                if claim["status"] == "Claimed":
                    await deployed.complete(claim)

    listener = system.kernel.stores.listener
    before = _passes()
    tasks = [asyncio.create_task(one) for one in (listener.run(), work(), *map(forever, services(system.kernel)))]
    try:
        await _idle(before)
        await listener.connected.wait()
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.slow
async def test_redeploy_of_three_small_partitions_is_current_within_three_seconds(system: System) -> None:
    deployed = DeployedDags(system)
    await deployed.deploy(chain())
    await deployed.emit("chain", "follow", (0, 9), (10, 19), (20, 29))
    assert await deployed.work("chain", "derive", "roll") == 6
    async with dispatching(system):
        started = time.monotonic()
        assert (await deployed.deploy(chain(2)))["state"] == "Building"

        async def current() -> bool:
            return (await deployed.view("chain"))["building"] is None

        await until(current)
        assert time.monotonic() - started < BOUND_SECONDS
    assert len(await deployed.partitions("chain", "roll")) == 3


async def _idle(before: dict[str, float]) -> None:
    """Waits until every loop that a redeploy needs pauses."""

    async def pausing() -> bool:
        return all(passes > before[loop] for loop, passes in _passes().items())

    await until(pausing)


def _passes() -> dict[str, float]:
    """Returns the number of passes without work, by loop."""
    name = "interlock_loop_passes_total"
    loops = ("scopes", "cutover", "router")
    return {loop: REGISTRY.get_sample_value(name, {"loop": loop, "result": "idle"}) or 0.0 for loop in loops}
