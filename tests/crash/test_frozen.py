"""Processes that are frozen past their leases while others do their work, and then continue."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest

from interlock.tasks.shards import run_task_id
from interlock.wire.base import Outcome, TaskStatus
from tests.crash.ledger import Accepted, Ledger
from tests.crash.load import Kind, Load
from tests.crash.named_pipe import Gate
from tests.crash.seed import KILLS, random_for
from tests.support.deployment import Deployment, Process, deployed
from tests.support.polls import PATIENCE, eventually

DATABASE_TIMEOUT_SECONDS = "3"
"""After this time the database releases the locks of a frozen process."""

ANYWHERE = "anywhere"
IN_THE_MIDDLE = {
    "dispatcher": ["fold.before_commit", "reap.before_commit", "complete.before_commit", "claim.before_commit"],
    "worker": ["worker.received", "worker.claimed", "worker.before_complete"],
}


class TwoDispatchers:
    """Two dispatchers with a worker each, on one database."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.ledger = Ledger(deployment.journal)

    def load(self, purpose: str) -> Load:
        return Load(self.deployment.client, self.ledger, purpose)

    async def settle(self, load: Load) -> None:
        await load.settle(self.deployment.state_url)


@pytest.fixture(scope="module")
async def site() -> AsyncIterator[TwoDispatchers]:
    async with deployed(database_timeout_seconds=DATABASE_TIMEOUT_SECONDS, log_level="info") as deployment:
        deployment.add_listening("dispatcher", "dispatcher-2")
        deployment.add_worker("worker-2", "dispatcher-2")
        await deployment.start()
        yield TwoDispatchers(deployment)


@pytest.mark.parametrize("name", ["dispatcher", "worker"])
async def test_frozen_process_blocks_no_other_and_changes_nothing_after_thaw(site: TwoDispatchers, name: str) -> None:
    load, chance = site.load(f"a frozen {name}"), random_for(f"where the {name} freezes")
    process = site.deployment[name]
    # The first holds a lock that every dispatcher needs; the others are random.
    first, *others = [*IN_THE_MIDDLE[name], ANYWHERE]
    places = [first, *(chance.choice(others) for _ in range(max(1, KILLS // 8)))]
    async with load.running():
        for place in places:
            await _freeze(site.ledger, process, place, chance)
            for one in list(site.ledger.accepted.values()):
                await _ends_meanwhile(load, one, place)
            process.thaw()
    await site.settle(load)


async def _freeze(ledger: Ledger, process: Process, place: str, chance: random.Random) -> None:
    if place == ANYWHERE:
        await ledger.reaches(len(ledger.accepted) + chance.randint(1, 4))
        process.freeze()
    else:
        await process.kill()
        ledger.blows += 1
        await process.start(f"{place}=stop*{chance.randint(0, 4)}")
    await process.frozen()
    ledger.blows += 1


async def _ends_meanwhile(load: Load, one: Accepted, place: str) -> None:
    """Checks that a run accepted before the freeze ends while the process is frozen."""
    try:
        async with asyncio.timeout(PATIENCE):
            await load.ended(one)
    except TimeoutError as error:
        error.add_note(f"frozen at {place}: {one} does not end")
        raise


async def _frozen_with_a_finished_task(site: TwoDispatchers, load: Load, **policy: Any) -> UUID:
    """Freezes the worker after its child has finished the task and before the worker has reported it."""
    await site.deployment["worker-2"].kill()
    gate = Gate(site.deployment.work / f"gate-{len(site.ledger.accepted)}")
    kind = Kind(1, {"gate": str(gate.path), "quiet": True}, outputs=1)
    one = await load.submit(kind, lease_seconds=2, **policy)
    task_id = run_task_id(one.run_id, 0)
    await site.ledger.has(task_id, "began")
    site.deployment["worker"].freeze()
    await site.deployment["worker"].frozen()
    site.ledger.blows += 1
    await gate.open()
    await site.ledger.has(task_id, "ended")
    return task_id


async def _becomes(site: TwoDispatchers, task_id: UUID, status: TaskStatus) -> list[tuple[int, Outcome | None]]:
    """Waits until the task has the status and returns its attempts."""
    await site.deployment.until(
        "select exists (select from interlock.tasks where task_id = $1 and status = $2::text::interlock.task_status)",
        task_id,
        status.value,
    )
    async with site.deployment.client() as client:
        page = await client.attempts(task_id)
    return [(attempt.attempt, attempt.outcome) for attempt in page.attempts]


async def _run_completes(site: TwoDispatchers, task_id: UUID) -> None:
    """Waits for the task's run.

    It had ended with the dead letter; the counters include the late report a pass later.
    """
    await site.deployment.until(
        "select exists (select from interlock.runs r join interlock.tasks t on t.run_id = r.run_id"
        " where t.task_id = $1 and r.state = 'Completed')",
        task_id,
    )


async def test_late_report_of_thawed_worker_is_fenced_after_a_newer_attempt_has_run(site: TwoDispatchers) -> None:
    load = site.load("a late report that is fenced off")
    task_id = await _frozen_with_a_finished_task(site, load)
    await site.deployment.start("worker-2")
    attempts = [(1, Outcome.LEASE_EXPIRED), (2, Outcome.COMPLETED)]
    assert await _becomes(site, task_id, TaskStatus.COMPLETED) == attempts
    worker = site.deployment["worker"]
    worker.thaw()

    def refused() -> bool:
        lines = worker.errors.read_text().splitlines()
        return any("worker.report_fenced" in line and str(task_id) in line for line in lines)

    await eventually(refused)
    assert await _becomes(site, task_id, TaskStatus.COMPLETED) == attempts
    await site.settle(load)


@pytest.mark.parametrize("policy", [{"backoff_seconds": 600}, {"max_attempts": 1}], ids=["waiting", "dead letter"])
async def test_late_report_of_thawed_worker_is_accepted_before_a_newer_attempt_starts(
    site: TwoDispatchers, policy: dict[str, int]
) -> None:
    load = site.load(f"a late report that counts with {policy}")
    task_id = await _frozen_with_a_finished_task(site, load, **policy)
    assert await _becomes(site, task_id, TaskStatus.FAILED) == [(1, Outcome.LEASE_EXPIRED)]
    site.deployment["worker"].thaw()
    assert await _becomes(site, task_id, TaskStatus.COMPLETED) == [(1, Outcome.COMPLETED)]
    await _run_completes(site, task_id)
    await site.deployment.start("worker-2")
    await site.settle(load)


@pytest.mark.parametrize("failpoint", ["complete.before_commit", "complete.committed"])
async def test_late_report_of_a_dead_letter_survives_the_death_of_its_dispatcher(
    site: TwoDispatchers, failpoint: str
) -> None:
    load = site.load(f"a late report whose dispatcher dies at {failpoint}")
    task_id = await _frozen_with_a_finished_task(site, load, max_attempts=1)
    assert await _becomes(site, task_id, TaskStatus.FAILED) == [(1, Outcome.LEASE_EXPIRED)]
    dispatcher = site.deployment["dispatcher"]
    await dispatcher.kill()
    await dispatcher.start(f"{failpoint}=kill")
    site.deployment["worker"].thaw()
    await dispatcher.killed_itself()
    site.ledger.blows += 2
    await dispatcher.start()
    assert await _becomes(site, task_id, TaskStatus.COMPLETED) == [(1, Outcome.COMPLETED)]
    await _run_completes(site, task_id)
    await site.deployment.start("worker-2")
    await site.settle(load)


async def test_tasks_claimed_during_a_drain_are_released(site: TwoDispatchers) -> None:
    """The dispatcher freezes between the claim and its reply, and the worker is told to drain in the meantime."""
    load = site.load("a drain during a claim")
    dispatcher, worker = site.deployment["dispatcher"], site.deployment["worker"]
    await site.deployment["worker-2"].kill()
    await dispatcher.kill()
    await dispatcher.start("claim.committed=stop")
    one = await load.submit(Kind(1), lease_seconds=600)
    await dispatcher.frozen()
    worker.drain()
    dispatcher.thaw()
    assert await worker.ended() == 0, worker.last_words()
    await site.deployment.start()
    attempts = await _becomes(site, run_task_id(one.run_id, 0), TaskStatus.COMPLETED)
    assert attempts == [(1, Outcome.RELEASED), (1, Outcome.COMPLETED)]
    await site.settle(load)
