"""The command of the demo, from the producer to the tasks that it triggers."""

from __future__ import annotations

import asyncio

from interlock.apps.ingest import ingest
from interlock.bus.loops import TelemetryBatches
from interlock.cli.demos.pipeline import Office, Wanted
from interlock.client import Client
from tests.support.deployed_dags import DeployedDags
from tests.support.polls import answered
from tests.support.staged_lists import Intake
from tests.support.system import System

DAG = """
name: chain
jobs:
  - { name: feed, activation: source, source: { kind: manual }, operator: echo, outputs: [blocks] }
  - { name: activity, operator: echo, inputs: [{ from: { job: feed, output: blocks } }], outputs: [activity] }
"""


async def test_signed_command_recomputes_a_range(system: System) -> None:
    chain = DeployedDags(system)
    await chain.deploy(DAG)
    await chain.emit("chain", "feed", (0, 29), (30, 59))
    assert await chain.work("chain", "activity") == 2
    async with (
        Client(system.gateway_url, system.admin_key) as client,
        ingest(system.kernel.settings, wait_seconds=0) as services,
    ):
        asking = asyncio.create_task(Office(client, system.gateway_url).ask(Wanted("chain", "activity", 0, 29)))
        telemetry = TelemetryBatches(system.kernel.stores.database, system.kernel.settings)

        async def done() -> bool:
            await system.settle()
            await Intake(system, services).drain()
            await chain.work("chain", "activity")
            await telemetry.run_once()
            return asking.done()

        await answered(done)
        assert await asking
        (backfill,) = (await client.backfills.page()).backfills
    assert (backfill.start, backfill.end, backfill.reason) == (0, 29, "requested by test/auditor")
