"""A ledger of promises outside of the system, and the audit that compares it with the system's state.

It has two parts: replies of the gateway, in this process; and steps of operators, in a file to which each step is
appended before it is reported to the system.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import UUID

import asyncpg

from interlock.wire.base import RunState
from interlock.wire.jobs import RunView
from tests.support.polls import PATIENCE, answered, eventually

_ENDED: Final = (RunState.COMPLETED, RunState.CANCELED)


@dataclass
class Accepted:
    """An accepted submission, and its possible outcomes."""

    run_id: UUID
    total: int
    failures: int = 0
    """Attempts that each task fails on purpose."""
    canceled: bool = False
    """A cancellation was requested: each task is canceled or has completed."""
    blows_before: int = 0
    blows_after: int | None = None
    """Number of blows when it was accepted, and when it was seen to have ended."""


class Step(NamedTuple):
    """A line of the operators' journal."""

    task_id: UUID
    attempt: int
    what: str
    pid: int


@dataclass
class Ledger:
    journal: Path
    accepted: dict[str, Accepted] = field(default_factory=dict)
    blows: int = 0
    """Kills and freezes so far. Each costs a task at most one attempt."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def note(self, key: str, run_id: UUID, total: int, *, blows: int, failures: int = 0) -> Accepted:
        async with self.changed:
            known = self.accepted.setdefault(key, Accepted(run_id, total, failures, blows_before=blows))
            assert (known.run_id, known.total) == (run_id, total), "one Idempotency-Key, two replies"
            self.changed.notify_all()
            return known

    async def reaches(self, count: int) -> None:
        async with asyncio.timeout(2 * PATIENCE), self.changed:
            await self.changed.wait_for(lambda: len(self.accepted) >= count)

    def steps(self) -> Iterator[Step]:
        if self.journal.exists():
            for line in self.journal.read_text().splitlines():
                task_id, attempt, what, pid = line.split()
                yield Step(UUID(task_id), int(attempt), what, int(pid))

    async def has(self, task_id: UUID, what: str) -> None:
        """Waits until an operator has recorded that step of the task."""
        await eventually(lambda: any((step.task_id, step.what) == (task_id, what) for step in self.steps()))


# Each query returns violations of an invariant.
_VIOLATIONS: Final = {
    "a task that has not ended": """
        select task_id, status, attempt, parked, retry_at from interlock.tasks
        where status not in ('Completed', 'Canceled') or lease_expires_at is not null""",
    "a slot without a holder": "select * from interlock.slots",
    "a pending side effect": "select kind, target, due_at, tries from interlock.outbox",
    "a count that was not folded": "select * from interlock.run_deltas",
    "a dead message": "select * from interlock.queue_messages where dead_at is not null",
    "a task without exactly one history of attempts": """
        select t.task_id, t.status, t.attempt, u.used from interlock.tasks t
        cross join lateral (
            select coalesce(array_agg(h.attempt order by h.attempt), '{}') as used from interlock.attempt_history h
            where h.task_id = t.task_id and h.outcome is distinct from 'Released'
        ) u
        where u.used <> array(select generate_series(1, cardinality(u.used)))
           or cardinality(u.used) not between t.attempt - (t.status = 'Canceled')::int and t.attempt""",
    "a task that completed twice": """
        select task_id, count(*) from interlock.attempt_history where outcome = 'Completed'
        group by task_id having count(*) > 1""",
    "a result of another attempt": """
        select task_id, attempt, result from interlock.tasks
        where status = 'Completed' and (result ->> 'attempt')::int <> attempt""",
    "outputs that were not committed once, by the last attempt": """
        select t.task_id, t.status, t.attempt, o.attempts from interlock.tasks t
        join interlock.jobs j on j.job_id = t.job_id
        cross join lateral (
            select coalesce(array_agg(c.attempt), '{}') as attempts from interlock.output_commits c
            where c.task_id = t.task_id
        ) o
        where o.attempts <> case t.status when 'Completed'
                                 then array_fill(t.attempt, array[jsonb_array_length(j.outputs)]) else '{}' end""",
    "final events that were not committed once, by the last attempt": """
        select t.task_id, t.status, t.attempt, e.attempts from interlock.tasks t
        join interlock.jobs j on j.job_id = t.job_id
        cross join lateral (
            select coalesce(array_agg(d.attempt), '{}') as attempts from interlock.dataset_events d
            where d.task_id = t.task_id and d.cursor = 2 * t.task_index + 1
        ) e
        where e.attempts <> case t.status when 'Completed'
                                 then array_fill(t.attempt, array[jsonb_array_length(j.outputs)]) else '{}' end""",
    "a batch that was published without exactly one message": """
        select p.publish_id, count(m.message_id) from interlock.buffer_publishes p
        left join interlock.queue_messages m on m.queue = 'buffer' and m.dedupe_key = p.publish_id::text
        group by p.publish_id having count(m.message_id) <> 1""",
    "a run whose counters do not match its tasks": """
        select r.run_id, r.state, r.total, r.completed, r.canceled, r.queued, r.running, r.failed
        from interlock.runs r
        join lateral (
            select count(*) filter (where status = 'Completed') as completed,
                   count(*) filter (where status = 'Canceled') as canceled, count(*) as total
            from interlock.tasks t where t.run_id = r.run_id
        ) t on true
        where (r.total, r.completed, r.canceled, r.queued, r.running, r.failed, r.dead)
              is distinct from (t.total, t.completed, t.canceled, 0, 0, 0, 0)""",
    "not exactly one active signing key": """
        select count(*) from interlock.signing_keys where retired_at is null having count(*) <> 1""",
}

_SETTLED: Final = """
    select not exists (select from interlock.outbox) and not exists (select from interlock.run_deltas)
       and not exists (select from interlock.tasks where status not in ('Completed', 'Canceled'))"""


async def audit(state_url: str, ledger: Ledger, runs: list[RunView]) -> list[str]:
    """Returns all violations, once every accepted run has ended. Empty if every promise was kept."""
    connection = await asyncpg.connect(state_url)
    try:
        with suppress(TimeoutError):  # the checks below find a side effect that stays pending
            await answered(lambda: connection.fetchval(_SETTLED))
        found = [
            f"{what}: {[tuple(row) for row in rows[:5]]}"
            for what, sql in _VIOLATIONS.items()
            if (rows := await connection.fetch(sql))
        ]
        tasks = await connection.fetch("select task_id, run_id, status::text, attempt, job_id from interlock.tasks")
        known = await connection.fetch(
            # Batch queries have their own record.
            "select run_id from interlock.runs join interlock.jobs using (job_id)"
            " where dag_name is null and operator <> 'batch_query'"
        )
        history = await connection.fetch("select task_id, attempt, outcome::text from interlock.attempts")
        events = await connection.fetch("select task_id, cursor from interlock.dataset_events")
        worked = await connection.fetch("select job_id from interlock.jobs where operator like 'crash.%'")
    finally:
        await connection.close()
    found += _accepted_and_ended(ledger, runs, {row["run_id"] for row in known})
    found += _paid_for(ledger, tasks)
    by_operators = {row["task_id"]: row for row in tasks if row["job_id"] in {job["job_id"] for job in worked}}
    found += _journal(ledger, by_operators, history, {(row["task_id"], row["cursor"]) for row in events})
    return found


def _accepted_and_ended(ledger: Ledger, runs: list[RunView], known: set[UUID]) -> Iterator[str]:
    """Checks that exactly the accepted runs exist and have ended: a submission counts once, even if sent often."""
    promised = {one.run_id: one for one in ledger.accepted.values()}
    if known != set(promised):
        yield f"unknown runs: {known - set(promised)}; missing runs: {set(promised) - known}"
    if unended := set(promised) - {run.run_id for run in runs}:
        yield f"runs that have not ended: {unended}"
    for run in runs:
        one = promised[run.run_id]
        ended = run.counts.Completed + (run.counts.Canceled if one.canceled else 0)
        if run.state not in _ENDED or (run.total, ended) != (one.total, one.total):
            yield f"run {run.run_id}: accepted {one}, became {run.state} {run.counts}"


def _paid_for(ledger: Ledger, tasks: list[Any]) -> Iterator[str]:
    """Checks that a blow costs a task at most one attempt."""
    by_run = {one.run_id: one for one in ledger.accepted.values()}
    for task in tasks:
        one = by_run.get(task["run_id"])
        if one is not None:
            after = ledger.blows if one.blows_after is None else one.blows_after
            limit = 1 + one.failures + after - one.blows_before
            if task["attempt"] > limit:
                yield f"task {task['task_id']} took {task['attempt']} attempts, at most {limit} were expected"


def _journal(
    ledger: Ledger, tasks: dict[UUID, Any], history: list[Any], events: set[tuple[UUID, int]]
) -> Iterator[str]:
    """Compares the steps of operators with the system's record of them."""
    steps = list(ledger.steps())
    done = {(step.task_id, step.attempt, step.what) for step in steps}
    for task_id, task in tasks.items():
        if task["status"] == "Completed" and (task_id, task["attempt"], "ended") not in done:
            yield f"task {task_id} completed by attempt {task['attempt']}, which no operator finished"
    given_back = Counter((row["task_id"], row["attempt"]) for row in history if row["outcome"] == "Released")
    for (task_id, attempt), times in Counter((s.task_id, s.attempt) for s in steps if s.what == "began").items():
        if times > 1 + given_back[task_id, attempt]:
            yield f"attempt {attempt} of task {task_id} ran {times} times"
        if task_id in tasks and attempt > tasks[task_id]["attempt"]:
            yield f"attempt {attempt} of task {task_id} ran, but the task has {tasks[task_id]['attempt']}"
    emitted = {step.task_id for step in steps if step.what == "emitted"}
    announced = {task_id for task_id, cursor in events if cursor % 2 == 0}
    if emitted - announced:
        yield f"accepted events that are missing: {emitted - announced}"
