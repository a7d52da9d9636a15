"""The demo of single tasks: each act submits a job, acts on it, and states how its tasks must end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from uuid import UUID

import msgspec

from interlock.apps.up.supervisor import Supervisor
from interlock.cli.output import console, table
from interlock.cli.progress import watch_run
from interlock.cli.task import attempt_table
from interlock.client import Client
from interlock.errors import InterlockError
from interlock.jobs.receipt_verification import verify
from interlock.wire.base import Priority, TaskStatus
from interlock.wire.jobs import JobAccepted, Policy, RunView
from interlock.wire.tasks import RedriveRequest, TaskView

T = TypeVar("T")

MANY: Final = 300
BULK: Final = 20_000
FEW: Final = 5
_LOOK_SECONDS: Final = 0.05
_PATIENCE_SECONDS: Final = 45.0
_QUICK: Final = Policy(max_attempts=2, backoff_seconds=0.2, jitter=0)
_SHORT_LEASE: Final = Policy(max_attempts=3, backoff_seconds=0, lease_seconds=2)


class DemoFailed(InterlockError):
    """Something took longer than it should on any machine."""


@dataclass
class Act:
    title: str
    run_id: UUID
    expected: dict[str, int]


@dataclass
class Stage:
    client: Client
    supervisor: Supervisor
    acts: list[Act] = field(default_factory=list)

    def heading(self, title: str) -> None:
        console().print(f"\n[bold cyan]{len(self.acts) + 1}. {title}[/]")

    async def submit(self, title: str, tasks: list[Any], expected: dict[str, int], **options: Any) -> JobAccepted:
        self.heading(title)
        accepted = await self.client.submit(tasks, **options)
        self.acts.append(Act(title, accepted.run_id, expected))
        return accepted

    async def ended(self, accepted: JobAccepted, label: str) -> RunView:
        return await _soon(watch_run(self.client, accepted.run_id, label=label), label)

    async def first_task(self, accepted: JobAccepted, until: Callable[[TaskView], bool]) -> TaskView:
        """Returns the run's first task once it satisfies `until`."""
        page = await self.client.task_page(run=str(accepted.run_id), limit=1)
        task_id = page.tasks[0].task_id

        async def look() -> TaskView:
            while True:
                task = await self.client.task(task_id)
                if until(task):
                    return task
                await asyncio.sleep(_LOOK_SECONDS)

        return await _soon(look(), f"task {task_id}")


async def _soon(work: Awaitable[T], what: str) -> T:
    try:
        return await asyncio.wait_for(work, _PATIENCE_SECONDS)
    except TimeoutError:
        raise DemoFailed(
            f"Timeout after {_PATIENCE_SECONDS:.0f} s while waiting for {what}; run the demo with --keep."
        ) from None


async def play(stage: Stage) -> bool:
    begun = time.monotonic()
    for act in (many_tasks, bulk, retries, dead_letters, cancel, killed_worker):
        await act(stage)
    passed = await check(stage)
    if passed:
        console().print(f"\n[bold green]All counts are right.[/] The demo took {time.monotonic() - begun:.0f} s.")
    else:
        console().print("\n[bold red]Some counts are wrong:[/] run it again with --keep and look at the logs.")
    return passed


async def many_tasks(stage: Stage) -> None:
    tasks = [{"n": number} for number in range(MANY)]
    title = f"{MANY} tasks in one request"
    accepted = await stage.submit(title, tasks, {"Completed": MANY}, operator="echo")
    console().print("They are inserted and queued in one transaction. The worker claims them in batches.")
    await stage.ended(accepted, "echo")


async def bulk(stage: Stage) -> None:
    """Submits a list that is too long to be inserted synchronously."""
    begun = time.monotonic()
    title = f"A list of {BULK:,} tasks, with a signed receipt"
    tasks = [{"n": number} for number in range(BULK)]
    accepted = await stage.submit(title, tasks, {"Completed": BULK}, operator="echo", priority=Priority.BULK)
    console().print(
        f"Accepted after {time.monotonic() - begun:.2f} s, {accepted.state}: the list is staged, and its tasks get "
        "their own shard."
    )
    await stage.ended(accepted, "bulk")
    reply = await stage.client.results.receipt(accepted.job_id)
    keys = (await stage.client.results.receipt_keys()).keys
    verdict = verify(msgspec.json.encode(reply), keys=keys)
    console().print(f"The receipt is signed by key {verdict.kid[:12]}… and proves: {', '.join(verdict.proven)}.")


async def retries(stage: Stage) -> None:
    tasks = [{"times": 1, "message": "the first attempt always fails"}] * FEW
    accepted = await stage.submit("Tasks that fail once", tasks, {"Completed": FEW}, operator="fail", policy=_QUICK)
    await stage.ended(accepted, "flaky")
    task = await stage.first_task(accepted, _is_completed)
    console().print("Each was retried once, after a backoff. One of them:")
    await _show_attempts(stage, task)


async def dead_letters(stage: Stage) -> None:
    """The operator succeeds at the third attempt. The policy allows two, and a redrive two more."""
    tasks = [{"times": 2, "message": "the remote disk is full", "error_class": "DiskFull"}] * FEW
    accepted = await stage.submit(
        "Tasks that fail permanently and are redriven", tasks, {"Completed": FEW}, operator="fail", policy=_QUICK
    )
    await stage.ended(accepted, "hopeless")
    task = await stage.first_task(accepted, lambda task: task.dead)
    explanation = await stage.client.explain(task.task_id)
    console().print(f"`interlock task explain`: {explanation.detail}", markup=False)
    changed = await stage.client.redrive_tasks(RedriveRequest(run=str(accepted.run_id)))
    console().print(f"Once the cause is fixed, {changed.matched} dead letters are redriven.")
    await stage.first_task(accepted, _is_completed)
    console().print("Now they complete.")
    await stage.ended(accepted, "redriven")


async def cancel(stage: Stage) -> None:
    accepted = await stage.submit(
        "A task canceled while it is running",
        [{"seconds": 60}],
        {"Canceled": 1},
        operator="sleep",
        policy=_SHORT_LEASE,
    )
    task = await stage.first_task(accepted, _is_running)
    console().print(f"It runs on {task.worker_id} and would take a minute. Now it is canceled.")
    await stage.client.cancel_task(task.task_id)
    begun = time.monotonic()
    await stage.first_task(accepted, lambda task: task.status is TaskStatus.CANCELED)
    console().print(
        f"Its worker learned of it from a heartbeat reply: canceled {time.monotonic() - begun:.1f} s later."
    )
    await stage.ended(accepted, "canceled")


async def killed_worker(stage: Stage) -> None:
    accepted = await stage.submit(
        "A worker killed during a task",
        [{"seconds": 1.5}],
        {"Completed": 1},
        operator="sleep",
        policy=_SHORT_LEASE,
    )
    await stage.first_task(accepted, _is_running)
    victim = stage.supervisor.workers[0].pid
    if victim is not None:
        os.kill(victim, signal.SIGKILL)
    console().print(f"Worker process {victim} got SIGKILL. Its lease expires, and a new worker retries the task:")
    await stage.ended(accepted, "survivor")
    await _show_attempts(stage, await stage.first_task(accepted, _is_completed))


def _is_running(task: TaskView) -> bool:
    return task.status is TaskStatus.RUNNING


def _is_completed(task: TaskView) -> bool:
    return task.status is TaskStatus.COMPLETED


async def _show_attempts(stage: Stage, task: TaskView) -> None:
    console().print(attempt_table(await stage.client.attempts(task.task_id)))


async def check(stage: Stage) -> bool:
    """Checks that every submitted task has the expected status, and that there are no others."""
    console().print("\n[bold cyan]Result[/]")
    rows, passed = [], True
    for act in stage.acts:
        counts = (await stage.client.run(act.run_id)).counts
        found = {status.value: number for status in TaskStatus if (number := getattr(counts, status))}
        right = found == act.expected
        passed = passed and right
        rows.append((act.title, _words(act.expected), _words(found), "ok" if right else "fail"))
    console().print(table(("act", "expected", "found", ""), rows, empty="No act was run."))
    return passed


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())
