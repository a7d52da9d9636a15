"""Checks of the tables after every call: against the model, against the state before, and for consistency."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tests.model.dispatchers import World
from tests.model.model import Model
from tests.model.model_types import Run, Task


class TaskRow(msgspec.Struct):
    """A task with all rows that belong to it. Fields have the names of the model."""

    task_id: UUID
    status: str
    attempt: int
    max_attempts: int
    parked: bool
    late_reply: bool
    dead: bool
    cancel_requested: bool
    lease_token: UUID | None
    lease_expires_at: datetime | None
    timeout_at: datetime | None
    retry_at: datetime | None
    queued_at: datetime
    ended_at: datetime | None
    worker: str | None
    progress: float | None
    slot_key: str | None
    dedupe_key: str | None
    result: str | None
    print: str
    """The whole row as text, to detect changes of columns that the model does not know."""
    slot: bool
    outputs: int
    events: list[str]
    batches: list[tuple[int, str]]
    history: list[tuple[int, UUID, str, str | None, datetime]]


class RunRow(msgspec.Struct):
    run_id: UUID
    state: str
    total: int | None
    last_index: int
    ended_at: datetime | None
    cancel_requested: bool
    counters: dict[str, int]


class Broken(msgspec.Struct):
    promise: str
    who: str


class Rows(msgspec.Struct):
    tasks: list[TaskRow]
    runs: list[RunRow]
    broken: list[Broken]


_TASKS = """
    select t.task_id, t.status, t.attempt, t.max_attempts, t.parked, t.late_reply, t.dead, t.cancel_requested,
           t.lease_token, t.lease_expires_at, t.timeout_at, t.retry_at, t.queued_at, t.ended_at, t.worker_id as worker,
           t.progress, t.slot_key, t.dedupe_key, t.result::text as result, md5(t::text) as print,
           exists (select 1 from interlock.slots s where s.task_id = t.task_id and s.job_id = t.job_id
                   and s.slot_key is not distinct from t.slot_key) as slot,
           (select count(*) from interlock.output_commits o where o.task_id = t.task_id) as outputs,
           array(select scope from interlock.dataset_events e where e.task_id = t.task_id) as events,
           array(select json_build_array(attempt, reverse(split_part(reverse(batch_uri), '/', 1)))
                 from interlock.buffer_publishes p where p.task_id = t.task_id) as batches,
           array(select json_build_array(attempt, lease_token, outcome, error_class, ended_at)
                 from interlock.attempts a where a.task_id = t.task_id) as history
    from interlock.tasks t"""

_RUNS = """
    select run_id, state, total, last_index, ended_at, cancel_requested,
           json_build_object('Queued', queued, 'Running', running, 'Completed', completed, 'Failed', failed,
                             'dead', dead, 'Canceled', canceled) as counters
    from interlock.runs"""

_NAMES_IT = """((w.body ->> 'task_id')::uuid = t.task_id or (w.body ->> 'run_id')::uuid = t.run_id
                   and t.task_index between (w.body ->> 'start')::bigint and (w.body ->> 'end')::bigint)"""

_OWED = f"exists (select 1 from interlock.outbox w where w.target = coalesce(j.queue, j.runtime) and {_NAMES_IT})"

UNTOLD = f"""
    select t.task_id from interlock.tasks t join interlock.jobs j on j.job_id = t.job_id
    where t.task_id = any($1::uuid[]) and not {_OWED}
      and not exists (select 1 from interlock.queue_messages w where w.queue = j.queue and {_NAMES_IT})"""
"""Tasks without any message, even a dead one."""

# Each part selects the rows that violate one guarantee.
_BROKEN = f"""
with counted as (
    select run_id, count(*) filter (where status = 'Queued') as queued,
           count(*) filter (where status = 'Running') as running,
           count(*) filter (where status = 'Completed') as completed,
           count(*) filter (where status = 'Failed') as failed, count(*) filter (where dead) as dead,
           count(*) filter (where status = 'Canceled') as canceled
    from interlock.tasks where run_id is not null group by run_id
), owed as (
    select run_id, sum(queued) as queued, sum(running) as running, sum(completed) as completed, sum(failed) as failed,
           sum(dead) as dead, sum(canceled) as canceled
    from interlock.run_deltas group by run_id
), past as (
    select task_id, count(distinct attempt) as attempts, max(attempt) as last, min(attempt) as first
    from interlock.attempt_history where outcome is distinct from 'Released' group by task_id
)
select 'one holder per attempt' as promise, task_id::text as who from interlock.attempt_history
where outcome is distinct from 'Released' group by task_id, attempt having count(*) > 1
union all
select 'every attempt has a lease of its own', task_id::text from interlock.attempt_history
group by task_id, lease_token having count(*) > 1
union all
select 'exactly a running task has a lease, and within its hard timeout', task_id::text from interlock.tasks
where (status = 'Running') <> (lease_expires_at is not null) or (status = 'Running' and lease_token is null)
   or lease_expires_at > timeout_at
union all
select 'attempts never skip', t.task_id::text from interlock.tasks t left join past p using (task_id)
where coalesce(p.attempts, 0) <> coalesce(p.last, 0) or coalesce(p.first, 1) <> 1
   or coalesce(p.attempts, 0) not between t.attempt - 1 and t.attempt
   or (t.status = 'Queued' and coalesce(p.attempts, 0) <> t.attempt - 1)
   or (t.status not in ('Queued', 'Canceled') and coalesce(p.attempts, 0) <> t.attempt)
union all
select 'a failed task waits for a retry or is a dead letter', task_id::text from interlock.tasks
where (retry_at is not null) <> (status = 'Failed' and not dead) or (dead and status <> 'Failed')
   or (ended_at is null) <> (status in ('Queued', 'Running')) or (parked and status <> 'Queued')
union all
select 'every slot is of a running task', s.task_id::text from interlock.slots s
left join interlock.tasks t on t.task_id = s.task_id where t.status is distinct from 'Running'
union all
select 'no more slots than the cap', j.job_id::text from interlock.jobs j
where j.job_id <> all($2::uuid[])
  and (select count(*) from interlock.slots s where s.job_id = j.job_id) > j.max_concurrency
union all
select 'no more slots than the cap per key', s.job_id::text from interlock.slots s
join interlock.jobs j on j.job_id = s.job_id and j.job_id <> all($2::uuid[])
where s.slot_key is not null
group by s.job_id, s.slot_key, j.max_concurrency_per_key having count(*) > j.max_concurrency_per_key
union all
select 'counters and deltas add up to the rows', r.run_id::text
from interlock.runs r left join counted c using (run_id) left join owed o using (run_id)
where (r.queued + coalesce(o.queued, 0), r.running + coalesce(o.running, 0), r.completed + coalesce(o.completed, 0),
       r.failed + coalesce(o.failed, 0), r.dead + coalesce(o.dead, 0), r.canceled + coalesce(o.canceled, 0))
   <> (coalesce(c.queued, 0), coalesce(c.running, 0), coalesce(c.completed, 0), coalesce(c.failed, 0),
       coalesce(c.dead, 0), coalesce(c.canceled, 0))
union all
select 'deltas belong to a run', o.run_id::text from owed o left join interlock.runs r using (run_id)
where r.run_id is null
union all
select 'an ended run has nothing left to do', r.run_id::text from interlock.runs r join counted c using (run_id)
where r.ended_at is not null and c.queued + c.running + c.failed - c.dead > 0
union all
select 'every batch has its message', b.publish_id::text from interlock.buffer_publishes b
where not exists (select 1 from interlock.queue_messages m
                  where m.queue = 'buffer' and m.dedupe_key = b.publish_id::text)
  and not exists (select 1 from interlock.outbox o where o.target = 'buffer' and o.dedupe_key = b.publish_id::text)
union all
select 'every queued task has a wake-up', t.task_id::text from interlock.tasks t
join interlock.jobs j on j.job_id = t.job_id
where t.status = 'Queued' and not t.parked and t.task_id <> all($1::uuid[])
  and not exists (select 1 from interlock.queue_messages w
                  where w.queue = j.queue and w.dead_at is null and {_NAMES_IT})
  and not {_OWED}"""

# A single statement for everything: each step of an example runs it at least once.
_LOOK = f"""
select json_build_object('tasks', (select coalesce(json_agg(x), '[]') from ({_TASKS}) x),
                         'runs', (select coalesce(json_agg(x), '[]') from ({_RUNS}) x),
                         'broken', (select coalesce(json_agg(x), '[]') from ({_BROKEN}) x))::text as rows"""


@dataclass
class Watch:
    """Checks the tables after every call, and remembers the tasks that had ended by then."""

    world: World
    model: Model
    ended: dict[UUID, str]

    def look(self, *, lost: set[UUID]) -> None:
        """`lost` has the queued tasks whose message this example discarded; the reconciler must send another."""
        replaced = [job.job_id for job in self.model.jobs if job.replaced]
        (found,) = self.world.select(_LOOK, list(lost), replaced)
        rows = msgspec.json.decode(found["rows"], type=Rows)
        tasks = {row.task_id: row for row in rows.tasks}
        complaints = self.model.adopt(tasks)
        complaints += [line for task in self.model.tasks for line in _task_lines(task, tasks.get(task.task_id))]
        strange = tasks.keys() - {task.task_id for task in self.model.tasks}
        complaints += [f"a task that nobody made: {task_id}" for task_id in strange]
        complaints += self._runs(rows.runs) + self._changed_after_the_end(tasks)
        complaints += [f"{broken.promise}: {self._name(broken.who)}" for broken in rows.broken]
        assert not complaints, "\n".join(complaints)

    def _name(self, who: str) -> str:
        return next((f"{task}, {who}" for task in self.model.tasks if str(task.task_id) == who), who)

    def _runs(self, found: list[RunRow]) -> list[str]:
        rows = {row.run_id: row for row in found}
        lines = [line for run in self.model.runs for line in _run_lines(run, rows.get(run.run_id), self.model)]
        strange = rows.keys() - {run.run_id for run in self.model.runs}
        return lines + [f"a run that nobody made: {run_id}" for run_id in strange]

    def _changed_after_the_end(self, rows: dict[UUID, TaskRow]) -> list[str]:
        revived = {task.task_id for task in self.model.tasks if not task.over}
        changed = [
            f"ended, and then changed: {self._name(str(task_id))}"
            for task_id, was in self.ended.items()
            if task_id in rows and rows[task_id].print != was and task_id not in revived
        ]
        self.ended = {t.task_id: rows[t.task_id].print for t in self.model.tasks if t.final and t.task_id in rows}
        return changed


_STATE = ("status", "attempt", "max_attempts", "parked", "late_reply", "dead", "cancel_requested", "slot")
_TIMES = ("lease_token", "lease_expires_at", "retry_at", "queued_at", "ended_at")
_REST = ("slot_key", "dedupe_key", "result", "outputs")


def _task_lines(task: Task, row: TaskRow | None) -> Iterator[str]:
    if row is None:
        yield f"{task} is gone"
        return
    names: tuple[str, ...] = _STATE + _TIMES + _REST
    names += ("timeout_at", "progress") if task.status == "Running" else ()
    names += ("worker",) if task.worker else ()
    for name in names:
        if getattr(task, name) != getattr(row, name):
            yield f"{task}: {name} is {getattr(row, name)!r}, not {getattr(task, name)!r}"
    history = {(*key, past.outcome, past.error_class, past.ended_at) for key, past in task.history.items()}
    sets: dict[str, tuple[list[Any], set[Any]]] = {
        "history": (row.history, history),
        "events": (row.events, task.events),
        "batches": (row.batches, task.batches),
    }
    for name, (found, expected) in sets.items():
        if set(found) != expected or len(found) != len(expected):
            yield f"{task}: {name} are {found}, not {expected}"


def _run_lines(run: Run, row: RunRow | None, model: Model) -> Iterator[str]:
    if row is None:
        yield f"run of {run.job} is gone"
        return
    for name in ("state", "total", "last_index", "ended_at", "cancel_requested"):
        if getattr(run, name) != getattr(row, name):
            yield f"run of {run.job}: {name} is {getattr(row, name)!r}, not {getattr(run, name)!r}"
    counters = run.counters(model.tasks)
    if not run.changed and counters != row.counters:
        yield f"run of {run.job}: counters are {row.counters}, not {counters}"
