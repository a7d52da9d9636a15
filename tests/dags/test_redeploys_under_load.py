"""Deploys, rollbacks and swaps in any order, while sources report and tasks complete, end in a complete version."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tests.dags.test_cutover import chain
from tests.support.deployed_dags import DeployedDags
from tests.support.system import System

LOOPS = ("router", "scopes", "cutover", "retirement")
JOBS = ("derive", "roll")
UNMADE = """
    select count(*) from interlock.edges e
    join interlock.jobs j on j.job_id = e.job_id and j.current
    join interlock.partitions p on p.dataset_version = e.dataset_version
    left join interlock.dataset_versions v on v.job_id = j.job_id
    left join interlock.partitions made on made.dataset_version = v.dataset_version
         and made.range_start = p.range_start and made.range_end = p.range_end and made.input_commit >= p.commit_id
    where made.commit_id is null"""
MISPLACED = """
    select count(*) from interlock.partitions p
    join interlock.dataset_versions v on v.dataset_version = p.dataset_version
    join interlock.jobs j on j.job_id = v.job_id and j.name <> 'follow'
    where p.location not like '%/' || p.dataset_version || '@%'"""
AT_ODDS = """
    select count(*) from interlock.dag_versions d
    join interlock.dag_version_jobs m on m.dag_version = d.dag_version
    join interlock.jobs j on j.job_id = m.job_id
    join interlock.dataset_versions v on v.job_id = j.job_id
    join interlock.datasets s on s.dataset_uuid = v.dataset_uuid
    where d.state = 'Current' and not (j.current and j.active and s.current_version = v.dataset_version)"""


@asynccontextmanager
async def going(*works: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Repeats each function until the block ends. An exception in one of them fails the test."""
    over = asyncio.Event()

    async def again(work: Callable[[], Awaitable[object]]) -> None:
        while not over.is_set():
            await work()

    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(again(work))
        yield
        over.set()


async def _work(chained: DeployedDags, dice: random.Random) -> None:
    """Claims and completes a task of any generation, as a worker does. A task canceled since then is refused."""
    job_ids = [job_id for name in JOBS for job_id in await chained.generations("chain", name)]
    tasks = await chained.waiting_of(*job_ids)
    if not tasks:
        return
    request = {"task_id": str(dice.choice(tasks)), "worker_id": "test"}
    reply = await chained.system.worker("POST", "/internal/task-claim", json=request)
    if reply.status_code == 200 and reply.json()["status"] == "Claimed":
        assert (await chained.complete(reply.json())).status_code in (200, 409)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_deploys_and_rollbacks_under_load_lose_nothing(system: System, seed: int) -> None:
    dice = random.Random(seed)
    chained = DeployedDags(system)
    await chained.deploy(chain())

    async def report() -> None:
        start = dice.randrange(12) * 10
        await chained.emit("chain", "follow", (start, start + 9))

    async def change() -> None:
        action = dice.choice(["deploy", "deploy", "rollback", "cutover"])
        if action == "deploy":
            await chained.deploy(chain(dice.randrange(4)))
        else:
            reply = await system.user("POST", f"/v1/dags/chain/{action}", json={})
            assert reply.status_code in (200, 409), reply.text

    workers = [lambda: _work(chained, dice)] * 2
    loops = [lambda name=name: system.pass_of(name) for name in LOOPS]
    async with going(*workers, *loops):
        for _ in range(40):
            await report()
            if dice.random() < 0.4:
                await change()
    while await chained.work("chain", *JOBS) + await system.pass_of("retirement") + await system.pass_of("cutover"):
        continue
    assert await system.value(UNMADE) == 0
    assert await system.value(MISPLACED) == 0
    assert await system.value(AT_ODDS) == 0
    view = await chained.view("chain")
    assert view["building"] is None
    reported = await chained.locations(await chained.version("chain", "follow"))
    for name in JOBS:
        made = await chained.locations(await chained.version("chain", name))
        assert set(made) == set(reported)
