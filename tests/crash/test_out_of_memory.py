"""Child processes that are killed, by the kernel for memory or by a signal: the attempt records which, the task
continues.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from uuid import UUID

import psutil
import pytest

from interlock.tasks.shards import run_task_id
from interlock.wire.base import Outcome
from interlock.wire.tasks import Crash
from tests.crash.ledger import Ledger
from tests.crash.load import Kind, Load
from tests.crash.memory_group import MemoryGroup, NoMemoryGroup, memory_group
from tests.crash.named_pipe import Gate
from tests.support.deployment import Deployment, deployed
from tests.support.polls import eventually

LIMIT_BYTES = 400 << 20
"""Enough for a worker and its children as long as they are idle."""


@pytest.fixture(scope="module")
def group() -> Iterator[MemoryGroup]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(memory_group(LIMIT_BYTES))
        except NoMemoryGroup as reason:
            pytest.skip(f"the kernel cannot be made to kill for memory here: {reason}")
        yield made


@pytest.fixture(scope="module")
async def deployment() -> AsyncIterator[Deployment]:
    async with deployed() as started:
        yield started


@pytest.fixture(scope="module")
def load(deployment: Deployment) -> Load:
    return Load(deployment.client, Ledger(deployment.journal), "children")


async def test_child_killed_by_the_oom_killer_is_distinguished_from_other_kills(
    group: MemoryGroup, deployment: Deployment, load: Load
) -> None:
    worker = deployment["worker"]
    await worker.kill()
    worker.on_start = group.add
    await worker.start()
    before = await _children(deployment)
    hoard = await load.submit(Kind(1, {}, {"operator": "crash.hoard"}))
    load.ledger.blows += 1  # the kernel kills the child
    await load.ended(hoard)
    assert await _ends(deployment, run_task_id(hoard.run_id, 0)) == [
        (Outcome.FAILED, "WorkerCrashed", Crash(signal="SIGKILL", oom=True)),
        (Outcome.COMPLETED, None, None),
    ]
    # The other child survived the first one's death and is killed by a signal now.
    survivor = (before & await _children(deployment)).pop()
    await _kill_by_hand(deployment, load, survivor)
    await load.settle(deployment.state_url)


async def test_killed_child_costs_one_attempt_with_a_crash_record(deployment: Deployment, load: Load) -> None:
    await _kill_by_hand(deployment, load, (await _children(deployment)).pop())
    await load.settle(deployment.state_url)


async def _children(deployment: Deployment) -> set[int]:
    """Waits for both children of the worker."""

    def two() -> set[int]:
        return {child.pid for child in psutil.Process(deployment["worker"].pid).children()}

    return await eventually(lambda: found if len(found := two()) == 2 else None)


async def _kill_by_hand(deployment: Deployment, load: Load, victim: int) -> None:
    """Kills one of two children that block at a gate: the victim's task has started and is not done."""
    gate = Gate(deployment.work / f"gate-{victim}")
    one = await load.submit(Kind(2, {"gate": str(gate.path)}))
    tasks = [run_task_id(one.run_id, index) for index in range(2)]
    for task_id in tasks:
        await load.ledger.has(task_id, "began")
    (killed,) = [step.task_id for step in load.ledger.steps() if step.pid == victim and step.task_id in tasks]
    psutil.Process(victim).kill()
    load.ledger.blows += 1
    await gate.open()
    await load.ended(one)
    assert await _ends(deployment, killed) == [
        (Outcome.FAILED, "WorkerCrashed", Crash(signal="SIGKILL", oom=False)),
        (Outcome.COMPLETED, None, None),
    ]


async def _ends(deployment: Deployment, task_id: UUID) -> list[tuple[Outcome | None, str | None, Crash | None]]:
    async with deployment.client() as client:
        page = await client.attempts(task_id)
    return [(attempt.outcome, attempt.error_class, attempt.crash) for attempt in page.attempts]
