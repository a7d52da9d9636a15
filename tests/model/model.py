"""The documented behaviour of tasks as a small program in memory: no SQL, no rows, no concurrency.

It predicts the reply of every call and the content of every row afterwards. Where the kernel may choose, for example
among equal tasks, the model states what is allowed and adopts the choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from interlock.clock import ManualClock
from tests.model.model_types import Definition, Hold, Job, Past, Report, Run, Task, Verdict


@dataclass
class Model:
    clock: ManualClock
    jobs: list[Job] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    gone: list[Task] = field(default_factory=list)
    """Deleted by retention."""
    woken: dict[UUID, Counter[tuple[int, datetime]] | None] = field(default_factory=dict)
    """By job: how many parked tasks of which rank the last call had to wake. The kernel chooses among equals.

    None if it woke tasks several times, so that some of them may have ended since.
    """

    @property
    def now(self) -> datetime:
        return self.clock.now()

    def find(self, task_id: UUID) -> Task | None:
        return next((task for task in self.tasks if task.task_id == task_id), None)

    def job_named(self, name: str | None) -> Job | None:
        return next((job for job in self.jobs if name is not None and job.name == name), None)

    def of_job(self, job: Job) -> list[Task]:
        return [task for task in self.tasks if task.job is job]

    # Create

    def define(self, job_id: UUID, name: str | None, definition: Definition) -> Job:
        """Creates a job, or replaces the definition of the job with this name."""
        job = self.job_named(name)
        if job is None:
            job = Job(job_id, name, definition)
            self.jobs.append(job)
        elif job.definition != definition:
            job.definition = definition
            job.replaced = True
            for task in self.of_job(job):
                task.slot = task.slot and job.capped
        return job

    def fresh_items(self, job: Job | None, keys: Sequence[str | None]) -> list[int]:
        """Returns the indexes of a list that make a task: those whose dedupe key the job has not seen."""
        seen = {task.dedupe_key for task in self.tasks if task.job is job and task.dedupe_key is not None}
        fresh = []
        for index, key in enumerate(keys):
            if key is None or key not in seen:
                fresh.append(index)
            if key is not None:
                seen.add(key)
        return fresh

    def start_run(self, run_id: UUID, job: Job, fresh: Sequence[Task], length: int) -> Run:
        run = Run(run_id, job, total=len(fresh), last_index=length - 1)
        if not fresh:
            run.state, run.ended_at = "Completed", self.now
        for task in fresh:
            task.run = run
        self.runs.append(run)
        self.tasks += fresh
        return run

    # Claim

    def claim(
        self, wanted: Sequence[UUID], worker: str, *, reach: Sequence[str] | None = None, limit: int | None = None
    ) -> tuple[list[Task], dict[UUID, str]]:
        """Claims tasks. Returns the claimed ones, and the reasons for the others."""
        known = [task for task_id in wanted if (task := self.find(task_id)) is not None]
        mine = [task for task in known if reach is None or task.job.definition.runtime in reach]
        queued = [task for task in mine if task.status == "Queued"]
        free = [task for task in queued if not task.job.capped]
        taken = sorted(free, key=Task.place)[:limit] + self._admitted([t for t in queued if t.job.capped], limit)
        for task in taken:
            self._start(task, worker)
        reasons = dict.fromkeys(wanted, "NotFound")
        reasons |= {task.task_id: task.reason_not_to_claim() for task in mine if task not in taken}
        return taken, {task_id: why for task_id, why in reasons.items() if task_id not in {t.task_id for t in taken}}

    def _admitted(self, queued: list[Task], limit: int | None) -> list[Task]:
        """Admits as many as there are slots, oldest first, and parks the rest."""
        admitted: list[Task] = []
        for job in self.jobs:
            rivals = sorted((t for t in queued if t.job is job), key=lambda t: (t.queued_at, t.place()))
            winners = self._within_caps(job, rivals)
            for task in rivals:
                task.parked = task.parked if task in winners else True
            admitted += winners
        return sorted(admitted, key=Task.place)[:limit]

    def _within_caps(self, job: Job, rivals: list[Task]) -> list[Task]:
        held = [task for task in self.tasks if task.job is job and task.slot]
        by_key = Counter(task.slot_key for task in held)
        per_key, limit = job.definition.per_key, job.definition.max_concurrency
        within = []
        for task in rivals:
            by_key[task.slot_key] += 1
            if per_key is None or task.slot_key is None or by_key[task.slot_key] <= per_key:
                within.append(task)
        return within if limit is None else within[: max(0, limit - len(held))]

    def _start(self, task: Task, worker: str) -> None:
        policy = task.job.definition
        task.status, task.worker, task.lease_token = "Running", worker, None
        task.parked = task.late_reply = False
        task.ended_at = task.progress = None
        task.slot = task.job.capped
        task.timeout_at = self.now + timedelta(seconds=policy.timeout)
        task.lease_expires_at = self.now + policy.lease_for
        task.changed()

    # Operations of holders

    def heartbeat(self, hold: Hold, progress: float | None) -> Verdict:
        task = self.find(hold.task_id)
        if task is None or not task.held_by(hold) or task.deadline <= self.now:
            return Verdict.fenced(task, hold)
        task.lease_expires_at = min(task.deadline, self.now + task.job.definition.lease_for)
        task.progress = task.progress if progress is None else progress
        return Verdict(task, "Running")

    def report(self, report: Report) -> Verdict:
        hold, task = report.hold, self.find(report.hold.task_id)
        counts = task is not None and (task.held_by(hold) or task.awaits_late_reply_of(hold))
        repeated = None if counts else self._repeated(task, report)
        if repeated is not None:
            return repeated
        if task is not None and report.effects and not task.job.definition.outputs:
            return Verdict(task, refused="dataset_not_granted")
        if task is None or not counts:
            return Verdict.fenced(task, hold)
        if task.dead and report.status == "Failed":
            return self._explained(task, report)
        late = task.status != "Running"
        canceled = report.status == "Failed" and task.cancel_requested
        task.attempt, task.dead = hold.attempt, False
        task.late_reply = task.parked = False
        task.result = report.result
        if report.status == "Completed":
            self._completed(task, report, late=late)
        elif canceled or report.status == "Canceled":
            self._end(task, "Canceled", "Canceled", report.error_class)
        else:
            self._fail(task, "Failed", report.error_class, fatal=report.error_class in task.job.definition.fatal)
        return Verdict(task, task.status)

    def _explained(self, task: Task, report: Report) -> Verdict:
        """Records the error of a task that stays a dead letter. No counter of its run changes."""
        task.late_reply, task.ended_at = False, self.now
        task.history[task.attempt, task.lease_token] = Past("Failed", report.error_class, self.now)
        return Verdict(task, "Failed")

    def _repeated(self, task: Task | None, report: Report) -> Verdict | None:
        if task is None or task.late_reply:
            return None
        expected = "Canceled" if report.status == "Failed" and task.cancel_requested else report.status
        same = task.status == expected and task.attempt == report.hold.attempt
        same = same and task.lease_token == report.hold.lease_token
        return Verdict(task, task.status, repeated=True) if same else None

    def _completed(self, task: Task, report: Report, *, late: bool) -> None:
        if late:
            del task.history[task.attempt, task.lease_token]
        task.retry_at = None
        self._close(task, "Completed")
        task.outputs += report.outputs
        task.events |= set(report.events)

    def release(self, hold: Hold) -> bool:
        task = self.find(hold.task_id)
        if task is None or not task.held_by(hold):
            return False
        if task.cancel_requested:
            self._end(task, "Canceled", "Canceled", None)
            task.queued_at = self.now
        else:
            self._end(task, "Queued", "Released", None)
            task.ended_at, task.queued_at = None, self.now
        return True

    def emit(self, hold: Hold, events: Iterable[str]) -> int | None:
        """Returns how many of the events are new; None if the attempt does not hold the task."""
        task = self.find(hold.task_id)
        if task is None or not task.held_by(hold):
            return None
        fresh = set(events) - task.events
        task.events |= fresh
        return len(fresh)

    def publish(self, hold: Hold, batch: str) -> bool | None:
        """Returns True if the batch is new; None if the attempt does not hold the task."""
        task = self.find(hold.task_id)
        if task is None or not task.held_by(hold):
            return None
        fresh = (hold.attempt, batch) not in task.batches
        task.batches.add((hold.attempt, batch))
        return fresh

    # Ends of attempts

    def _fail(self, task: Task, outcome: str, error_class: str | None, *, fatal: bool = False) -> None:
        self._end(task, "Failed", outcome, error_class)
        task.dead = fatal or task.attempt >= task.max_attempts
        if not task.dead:
            task.retry_at = self.now + task.job.definition.wait_after(task.attempt)

    def _end(self, task: Task, status: str, outcome: str, error_class: str | None) -> None:
        task.history[task.attempt, task.lease_token] = Past(outcome, error_class, self.now)
        task.retry_at = None
        self._close(task, status)

    def _close(self, task: Task, status: str) -> None:
        task.status, task.ended_at, task.lease_expires_at = status, self.now, None
        task.slot = False
        task.changed()

    def wake(self, jobs: Iterable[Job]) -> None:
        """Gives freed slots to parked tasks, oldest first, normal before bulk."""
        for job in jobs:
            waiting = sorted((task for task in self.of_job(job) if task.parked), key=Task.rank)
            chosen = self._within_caps(job, waiting)
            self.woken[job.job_id] = Counter(task.rank() for task in chosen)

    def with_slots(self) -> list[tuple[Task, bool]]:
        """Returns tasks with a slot, and capped queued tasks, which may have been woken for one."""
        return [(task, task.slot) for task in self.tasks if task.slot or (task.job.capped and task.status == "Queued")]

    def wake_after(self, before: Iterable[tuple[Task, bool]]) -> None:
        """Wakes tasks for the slots that were freed since `before`."""
        freed = [task.job for task, slot in before if (not task.slot if slot else task.status != "Queued")]
        self.wake(job for job in self.jobs if job in freed)

    # Operations of users

    def cancel(self, tasks: Iterable[Task], *, at_once: bool = True) -> int:
        """Cancels tasks. `at_once` is False for a cancel run by run: wake-ups of one run meet cancels of the next."""
        hit = [task for task in tasks if task.cancelable]
        for task in hit:
            task.cancel_requested = True
            task.parked = task.late_reply = False
            task.retry_at = None
            if task.status != "Running":
                task.status, task.ended_at = "Canceled", self.now
                task.changed()
        # A freed slot may have woken one of these: the task behind it is woken instead.
        ended = [task.job for task in hit if task.status == "Canceled" and task.job.capped]
        self.wake(job for job in self.jobs if job in ended)
        if not at_once:
            self.woken = dict.fromkeys(self.woken)
        return len(hit)

    def cancel_run(self, run: Run) -> int:
        if run.ended_at is not None:
            return 0
        run.cancel_requested = run.cancel_walked = True
        return self.cancel(run.tasks_in(self.tasks))

    def request_run_cancel(self, run: Run) -> None:
        """Records the request of a caller that died before the first task: the loop does all of it."""
        run.cancel_requested, run.cancel_walked = True, False

    def redrive(self, tasks: Iterable[Task]) -> int:
        """Queues failed tasks: a waiting one immediately, a dead letter with a fresh set of attempts."""
        hit = [task for task in tasks if task.status == "Failed"]
        for task in hit:
            if task.dead:
                task.max_attempts = task.attempt + task.job.definition.max_attempts
            task.dead = task.late_reply = False
            self._requeue(task)
            if task.run is not None and task.run.ended_at is not None:
                task.run.ended_at, task.run.state, task.run.cancel_requested = None, "Running", False
        return len(hit)

    def _requeue(self, task: Task) -> None:
        task.status, task.attempt = "Queued", task.attempt + 1
        task.retry_at = task.ended_at = None
        task.queued_at = self.now
        task.changed()

    # Loops

    def reap(self) -> int:
        expired = [t for t in self.tasks if t.lease_expires_at is not None and t.lease_expires_at <= self.now]
        before = self.with_slots()
        for task in expired:
            timed_out = task.deadline <= self.now
            error = "HardTimeout" if timed_out else "LeaseExpired"
            if task.cancel_requested:
                self._end(task, "Canceled", "Canceled", error)
            else:
                self._fail(task, "TimedOut" if timed_out else "LeaseExpired", error)
                task.late_reply = True
        self.wake_after(before)
        return len(expired)

    def requeue_due(self) -> int:
        due = [task for task in self.tasks if task.retry_at is not None and task.retry_at <= self.now]
        for task in due:
            self._requeue(task)
        return len(due)

    def cancel_runs(self) -> int:
        canceling = [r for r in self.runs if r.cancel_requested and not r.cancel_walked and r.ended_at is None]
        for run in canceling:
            run.cancel_walked = True
        self.cancel([task for run in canceling for task in run.tasks_in(self.tasks)], at_once=len(canceling) < 2)
        return len(canceling)

    def fold(self) -> int:
        changed = [run for run in self.runs if run.changed]
        for run in changed:
            run.changed = False
            run.settle(self.tasks, self.now)
        return len(changed)

    def run_inline(self, task: Task) -> None:
        """Runs a task inside the dispatcher: claims, runs and reports it."""
        if task.status == "Queued":
            self._start(task, "")
            task.inline = True

    def end_inline(self, task: Task, lease_token: UUID) -> None:
        task.inline, task.lease_token = False, lease_token
        hold = Hold(task.task_id, task.attempt, lease_token)
        if task.job.definition.operator == "fail":
            self.report(Report(hold, "Failed", error_class="Failed"))
        else:
            self.report(Report(hold, "Completed", result=task.payload))

    def expired_runs(self, age: timedelta) -> list[Run]:
        """Returns the runs that ended first among those older than `age`; several if they ended at the same time."""
        past = [run for run in self.runs if run.ended_at is not None and run.ended_at < self.now - age]
        oldest = min((run.ended_at for run in past if run.ended_at is not None), default=None)
        return [run for run in past if run.ended_at == oldest]

    def forget(self, run: Run) -> None:
        self.runs.remove(run)
        self.gone += run.tasks_in(self.tasks)
        self.tasks = [task for task in self.tasks if task.run is not run]
        if run.job.name is None:
            self.jobs.remove(run.job)

    # Adopting choices of the kernel

    def adopt(self, rows: Mapping[UUID, Any]) -> list[str]:
        """Returns complaints about choices that the kernel may not make. Any: rows are read by attribute."""
        for task in self.tasks:
            row = rows.get(task.task_id)
            if row is None:
                continue
            if task.inline:
                self.end_inline(task, row.lease_token)
            if task.status == "Running" and task.lease_token is None:
                task.lease_token = row.lease_token
        return self._adopt_woken(rows)

    def _adopt_woken(self, rows: Mapping[UUID, Any]) -> list[str]:
        complaints = []
        for job in self.jobs:
            due: Counter[tuple[int, datetime]] | None = self.woken.get(job.job_id, Counter())
            woken = [t for t in self.of_job(job) if t.parked and t.task_id in rows and not rows[t.task_id].parked]
            if due is not None and Counter(task.rank() for task in woken) != due:
                complaints.append(f"{job}: woke {woken}; it owed a slot to {due}")
            for task in woken:
                task.parked = False
        self.woken.clear()
        return complaints
