"""Rules for users: cancel, retry and redrive in every form, and read-only requests."""

from __future__ import annotations

from collections import Counter
from typing import Any
from uuid import UUID

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import rule

from interlock.apps.app import App
from interlock.stores.postgres import queries
from interlock.wire.base import TaskStatus
from interlock.wire.tasks import CancelRequest, Changed, RedriveRequest, TaskView
from tests.model.dispatchers import ANY_WORKER, Crashed
from tests.model.model_types import UNKNOWN, Run, Task
from tests.model.rule_base import Driven, Refused, dispatchers, picks, seldom

_REASONS = {
    "Completed": {"completed"},
    "Canceled": {"canceled"},
    "Queued": {
        "no_worker",
        "message_dead",
        "message_missing",
        "message_in_flight",
        "waiting_for_turn",
        "waiting_for_worker",
    },
}


class Users(Driven):
    @rule(
        at=dispatchers,
        pick=picks,
        what=st.sampled_from(["task", "task", "task", "run", "filter"]),
        status=st.sampled_from([None, TaskStatus.QUEUED, TaskStatus.RUNNING, TaskStatus.FAILED, TaskStatus.COMPLETED]),
        again=seldom,
        dry=st.booleans(),
        crash=st.sampled_from([None, None, None, "cancel.before_commit", "wake.before_commit"]),
    )
    def cancel(
        self, at: int, pick: int, what: str, status: TaskStatus | None, again: bool, dry: bool, crash: str | None
    ) -> None:
        for dispatcher in (at, 1 - at) if again else (at,):
            if what == "task":
                self._cancel(dispatcher, self.some_task(pick), crash=crash)
            elif what == "run":
                self._cancel_run(dispatcher, self.some_run(pick), dies=crash == "cancel.before_commit")
            else:
                self._cancel_by_filter(dispatcher, pick, status, dry=dry)

    def _cancel(self, at: int, task: Task, *, crash: str | None) -> None:
        try:
            view = self.call(
                at, lambda kernel: kernel.tasks.actions.cancel(task.task_id, self.world.org_id), crash=crash
            )
        except Crashed:
            if crash == "wake.before_commit":
                self.model.cancel([task])
                self.model.woken.clear()
            return self.look(f"cancel {task}, crashed at {crash}")
        self.model.cancel([task])
        assert (view.status, view.cancel_requested) == (task.status, task.cancel_requested)
        return self.look(f"cancel {task}: {task.status}")

    def _cancel_run(self, at: int, run: Run, *, dies: bool) -> None:
        crash = "cancel.before_commit" if dies else None
        try:
            changed = self.call(
                at, lambda kernel: kernel.tasks.actions.cancel_run(run.run_id, self.world.org_id), crash=crash
            )
        except Crashed:
            self.model.request_run_cancel(run)
            return self.look(f"cancel a run of {run.job}, crashed at {crash}")
        assert changed == Changed(matched=self.model.cancel_run(run))
        return self.look(f"cancel a run of {run.job}: {changed.matched}")

    def _cancel_by_filter(self, at: int, pick: int, status: TaskStatus | None, *, dry: bool) -> None:
        where, tasks = self._filtered(pick, by_run=pick % 2 == 0)
        request = CancelRequest(status=status, dry_run=dry, **where)
        answer = self.ask(at, lambda kernel: kernel.tasks.actions.cancel_matching(request, self.world.org_id))
        if status is TaskStatus.COMPLETED:
            assert answer == Refused("bad_request")
        else:
            hit = [task for task in tasks if task.cancelable and status in (None, task.status)]
            assert answer == Changed(matched=len(hit), dry_run=dry)
            if not dry:
                self.model.cancel(hit, at_once="run" in where)
        self.look(f"cancel {status or 'all'} of {where}: {answer}")

    def _filtered(self, pick: int, *, by_run: bool) -> tuple[dict[str, Any], list[Task]]:
        if by_run:
            run = self.some_run(pick)
            return {"run": str(run.run_id)}, run.tasks_in(self.model.tasks)
        job = self.some_job(pick)
        return {"job": job.name or str(job.job_id)}, self.model.of_job(job)

    @rule(
        at=dispatchers,
        pick=picks,
        what=st.sampled_from(["task", "task", "unknown", "run", "job"]),
        error=st.sampled_from([None, None, "Fatal", "LeaseExpired"]),
        limit=st.integers(1, 4),
        dry=seldom,
        crash=seldom,
    )
    def run_again(self, at: int, pick: int, what: str, error: str | None, limit: int, dry: bool, crash: bool) -> None:
        if what == "unknown":
            assert self._retry(at, UNKNOWN) == Refused("not_found")
        elif what == "task":
            task = self.some_task(pick, status="Failed")
            self._retry_task(at, task, crash="redrive.before_commit" if crash else None)
        else:
            self._redrive(at, pick, RedriveRequest(error_class=error, limit=limit, dry_run=dry), by_run=what == "run")

    def _retry_task(self, at: int, task: Task, *, crash: str | None) -> None:
        try:
            answer = self._retry(at, task.task_id, crash=crash)
        except Crashed:
            return self.look(f"retry {task}, lost")
        if self.model.redrive([task]):
            assert isinstance(answer, TaskView), f"refused: {answer}"
            assert (answer.status, answer.attempt) == ("Queued", task.attempt)
        else:
            assert answer == Refused("not_failed")
        return self.look(f"retry {task}")

    def _retry(self, at: int, task_id: UUID, *, crash: str | None = None) -> TaskView | Refused:
        return self.ask(at, lambda kernel: kernel.tasks.actions.retry(task_id, self.world.org_id), crash=crash)

    def _redrive(self, at: int, pick: int, wanted: RedriveRequest, *, by_run: bool) -> None:
        where, tasks = self._filtered(pick, by_run=by_run)
        error = wanted.error_class
        dead = [task for task in tasks if task.dead and (error is None or task.last_error == error)]
        request = msgspec.structs.replace(wanted, **where)
        changed = self.call(at, lambda kernel: kernel.tasks.actions.redrive(request, self.world.org_id))
        assert (changed.matched, changed.dry_run) == (min(wanted.limit, len(dead)), wanted.dry_run)
        # It is not specified which tasks are chosen if there are more than `limit`, only that the chosen ones run
        # again.
        revived = self._queued_now(dead)
        assert len(revived) == (0 if wanted.dry_run else changed.matched)
        self.model.redrive(revived)
        self.look(f"redrive {error or 'all'} of {where}, {wanted.limit} at most: {revived}")

    def _queued_now(self, tasks: list[Task]) -> list[Task]:
        rows = self.world.select(
            "select task_id from interlock.tasks where task_id = any($1::uuid[]) and status = 'Queued'",
            [task.task_id for task in tasks],
        )
        queued = {row["task_id"] for row in rows}
        return [task for task in tasks if task.task_id in queued]

    # Reads

    @rule(at=dispatchers, pick=picks, manned=st.booleans())
    def ask_about_a_task(self, at: int, pick: int, manned: bool) -> None:
        task = self.some_task(pick)
        if manned:
            self.call(at, _worker_seen)
        self.explain(at, task)
        self._read(at, task)
        self.look(f"ask about {task}")

    def explain(self, at: int, task: Task) -> None:
        explained = self.call(at, lambda kernel: kernel.tasks.explanations.explain(task.task_id, self.world.org_id))
        assert explained.status == task.status
        assert explained.reason in self._reasons(task), f"{task}: {explained.reason}, not one of {self._reasons(task)}"
        assert explained.detail

    def _reasons(self, task: Task) -> set[str]:
        if task.status == "Running":
            if task.cancel_requested:
                return {"cancel_requested"}
            expired = task.lease_expires_at is not None and task.lease_expires_at <= self.model.now
            return {"lease_expired"} if expired else {"running"}
        if task.status == "Failed":
            return {"dead_letter"} if task.dead else {"waiting_for_retry"}
        if task.parked:
            return {"limit_reached"}
        return _REASONS[task.status]

    def _read(self, at: int, task: Task) -> None:
        org_id = self.world.org_id
        attempts, view, fetched = self.call(at, lambda kernel: _views(kernel, task.task_id, org_id))
        now_running = task.status in ("Running", "Completed")
        ended = Counter(past.outcome for past in task.history.values())
        shown = Counter(str(a.outcome) for a in attempts if a.outcome)
        assert shown == ended + Counter(["Completed"] if task.status == "Completed" else [])
        assert len(attempts) == len(task.history) + now_running
        assert (view.status, view.attempt, view.dead) == (task.status, task.attempt, task.dead)
        assert fetched == ("Canceled" if task.cancel_requested else task.status)


async def _views(kernel: App, task_id: UUID, org_id: UUID) -> tuple[list[Any], TaskView, str]:
    attempts = (await kernel.tasks.reads.attempts(task_id, org_id)).attempts
    fetched = await kernel.tasks.claims.fetch(task_id, ANY_WORKER)
    return attempts, await kernel.tasks.reads.task(task_id, org_id), fetched.status


async def _worker_seen(kernel: App) -> None:
    async with kernel.stores.database.connection() as connection:
        await queries("interlock.tasks", "queue").worker_seen(connection, worker_id="somebody", queue="platform")
