"""A half-open LISTEN connection: work continues without it, and it is detected in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from uuid import uuid4

import pytest

from interlock.stores.notifications import CHECK_SECONDS, LOST_SECONDS
from interlock.wire.tasks import ReceiveRequest
from tests.crash.database_proxy import Line, Wire
from tests.crash.ledger import Ledger
from tests.crash.load import KINDS, Kind, Load
from tests.support.deployment import Deployment, deployed
from tests.support.polls import PATIENCE

SLOW_MACHINE_SECONDS = 10.0
"""Allowance for a busy machine."""


def listening(line: Line) -> bool:
    return line.listens


def about_to_listen(line: Line) -> bool:
    return line.listens and b"LISTEN" in line.sent


def notified(line: Line) -> bool:
    """A notification has come through."""
    return not line.silent and b"interlock_queue\0platform" in line.received


async def _seconds_until_given_up(wire: Wire, line: Line) -> float:
    began = asyncio.get_running_loop().time()
    await wire.first(lambda one: one is line and one.abandoned, PATIENCE)
    return asyncio.get_running_loop().time() - began


async def _seconds_until_received(deployment: Deployment, load: Load) -> float:
    """A waiting receiver gets a new message because the dispatcher polls, long before its wait ends."""
    me = f"here-{uuid4()}"
    request = ReceiveRequest(queue="udf", worker_id=me, wait_seconds=3 * SLOW_MACHINE_SECONDS, visibility_seconds=600)
    async with deployment.worker_client() as worker, deployment.client() as client:
        receiving = asyncio.create_task(worker.receive(request))
        await deployment.until("select exists (select from interlock.workers where worker_id = $1)", me)
        one = await load.submit(Kind(1, {}, {"runtime": "udf"}))
        began = asyncio.get_running_loop().time()
        assert (await receiving).messages
        seconds = asyncio.get_running_loop().time() - began
        one.canceled = True
        await client.cancel_run(one.run_id)
    return seconds


@pytest.fixture(scope="module")
async def deployment() -> AsyncIterator[Deployment]:
    async with deployed() as started:
        yield started


@pytest.fixture(scope="module")
def load(deployment: Deployment) -> Load:
    return Load(deployment.client, Ledger(deployment.journal), "half open")


@pytest.mark.parametrize(
    ("dies", "seconds"), [(listening, LOST_SECONDS), (about_to_listen, CHECK_SECONDS)], ids=["later", "at_once"]
)
async def test_silent_listen_connection_is_replaced_while_tasks_continue(
    deployment: Deployment, load: Load, dies: Callable[[Line], bool], seconds: float
) -> None:
    async with Wire(deployment.state_url).up() as wire:
        dispatcher = deployment["dispatcher"]
        await dispatcher.kill()
        load.ledger.blows += 1
        if dies is about_to_listen:
            wire.kill(about_to_listen)
        await dispatcher.start(state_url=wire.url)
        await dispatcher.ready()
        line = await wire.first(about_to_listen, PATIENCE)
        wire.kill(listening)
        replacing = asyncio.create_task(_seconds_until_given_up(wire, line))
        # No notification reaches this dispatcher: neither its receivers nor its relay.
        assert await _seconds_until_received(deployment, load) < SLOW_MACHINE_SECONDS
        for kind in ("plain", "inline", "flaky"):
            await load.ended(await load.submit(KINDS[kind]))
        assert await replacing < seconds + SLOW_MACHINE_SECONDS
        assert not any(map(notified, wire.lines))
        wire.mend()
        hearing = asyncio.create_task(wire.first(notified, PATIENCE))
        async with load.running():
            await hearing
        await load.settle(deployment.state_url)
        await dispatcher.kill()
    await deployment.start()
