"""Explains why a task is not running, or why it ended as it did; records which workers ask for work."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any
from uuid import UUID

from interlock.errors import NotFound
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.stores.valkey import Coordination
from interlock.tasks.shards import find_task
from interlock.wire.base import TaskStatus
from interlock.wire.tasks import Explanation

_sql = queries(__name__, "reads")
_queue_sql = queries(__name__, "queue")
_MAX_SHARES = 1000
_MAX_HOLDERS = 5
_FIRST = UUID(int=0)


class Explanations:
    def __init__(self, database: Database, coordination: Coordination | None) -> None:
        self._database = database
        self._coordination = coordination

    async def explain(self, task_id: UUID, org_id: UUID) -> Explanation:
        async with self._database.connection() as connection:
            shard = await find_task(connection, task_id, org_id)
            row = await _sql.explain_facts(connection, shard=shard, org_id=org_id, task_id=task_id)
            if row is None:
                raise NotFound(f"There is no task {task_id} in this org.")
            reason, detail = _BY_STATUS[row["status"]](row)
            if reason == "waiting_for_worker" and row["lane"] is not None:
                reason, detail = await _fair_share(connection, row) or (reason, detail)
            if reason in ("waiting_for_worker", "waiting_for_turn"):
                detail = f"{detail}{await _busy(connection, row)}"
            elif reason == "limit_reached":
                detail = f"{detail}{await _holders(connection, row)}"
        if row["status"] == TaskStatus.QUEUED and row["run_limited"] and not await self._limits_known():
            reason, detail = _LIMIT_UNAVAILABLE
        detail = f"{detail}{_held_back(row)}"
        return Explanation(
            task_id=task_id, status=TaskStatus(row["status"]), reason=reason, detail=detail, facts=_facts(row)
        )

    async def _limits_known(self) -> bool:
        return self._coordination is not None and await self._coordination.answers()


_LIMIT_UNAVAILABLE = (
    "limit_unavailable",
    "Its run has limits that are kept in Valkey, which does not answer; it starts when Valkey is back.",
)


def _held_back(row: Row) -> str:
    """Describes a pause of the task's job. Backpressure stops new tasks, not existing ones, so both are explained."""
    if row["paused_since"] is None or row["status"] in ("Completed", "Canceled"):
        return ""
    path = " <- ".join(row["pause_path"])
    return f" Its job has received no new tasks since {_at(row['paused_since'])}: {row['pause_reason']} ({path})."


def _queued(row: Row) -> tuple[str, str]:
    for rule in (_paused, _limited, _held, _without_worker, _message_dead, _message_lost, _message_later):
        answer = rule(row)
        if answer is not None:
            return answer
    again = f", for attempt {row['attempt']} of {row['max_attempts']}" if row["attempt"] > 1 else ""
    return (
        "waiting_for_worker",
        f"Queued since {_at(row['queued_at'])}{again}; the next free worker takes it.",
    )


async def _fair_share(connection: Connection, row: Row) -> tuple[str, str] | None:
    """Explains a wait for fairness: tasks in the same lane share workers, and the share with least running is next."""
    where = {"queue": row["queue"], "lane": row["lane"], "after_org": _FIRST, "after_share": _FIRST}
    found = await _queue_sql.waiting_shares(connection, limit=_MAX_SHARES, **where)
    waiting = [share for share in found if share["waits"]]
    others = [share for share in waiting if share["share_id"] != row["share_id"]]
    if not others:
        return None
    own = "run" if row["of_run"] else "job"
    running = next((share["running"] for share in waiting if share["share_id"] == row["share_id"]), 0)
    # Numbers of other orgs are confidential; the answer only says that there are others.
    here = sum(share["org_id"] == row["org_id"] for share in others)
    who = [f"{here} more runs or jobs"] * (here > 0) + ["other orgs"] * (here < len(others))
    rule = "the org with the fewest running tasks is served next, and within it the run with the fewest"
    shares = (
        f"its {own} has {running} tasks running and shares the workers of {row['queue']!r} with {' and '.join(who)}"
    )
    return "waiting_for_turn", f"Queued since {_at(row['queued_at'])}; {shares}: {rule}."


async def _busy(connection: Connection, row: Row) -> str:
    """Names the org's jobs that occupy the workers. Those of other orgs are confidential."""
    rows = await _sql.busy_jobs(connection, org_id=row["org_id"], queue=row["queue"], limit=_MAX_SHARES)
    if not rows:
        return ""
    listed = ", ".join(f"{_job_name(one)} ({one['running']})" for one in rows)
    return f" Running on these workers now: {listed}."


async def _holders(connection: Connection, row: Row) -> str:
    at_job = row["max_concurrency"] is not None and row["in_flight"] >= row["max_concurrency"]
    slot_key = None if at_job else row["slot_key"]
    rows = await _sql.slot_holders(connection, job_id=row["job_id"], slot_key=slot_key, limit=_MAX_HOLDERS)
    listed = ", ".join(str(one["task_id"]) for one in rows)
    return f" Held by: {listed}." if rows else ""


def _job_name(row: Row) -> str:
    name = row["name"] or str(row["job_id"])
    return f"{row['dag_name']}/{name}" if row["dag_name"] else name


def _paused(row: Row) -> tuple[str, str] | None:
    """Explains a pause that was requested, in contrast to backpressure."""
    if row["dag_paused_at"] is not None:
        why = f" ({row['dag_pause_reason']})" if row["dag_pause_reason"] else ""
        who = f"{row['dag_paused_by']} at {_at(row['dag_paused_at'])}{why}"
        dag = row["dag_name"]
        return "dag_paused", f"DAG {dag!r} was paused by {who}; continue with: interlock dag resume {dag}."
    if row["run_paused"] and not row["backfill_paused"]:
        return "run_paused", f"Its run is paused; continue with: interlock job resume {_job_name(row)}."
    return None


def _limited(row: Row) -> tuple[str, str] | None:
    if not row["parked"]:
        return None
    if row["max_concurrency"] is not None and row["in_flight"] >= row["max_concurrency"]:
        cap = f"scaling.max_concurrency = {row['max_concurrency']}"
    else:
        cap = f"scaling.max_concurrency_per_key = {row['max_concurrency_per_key']} for key {row['slot_key']!r}"
    return (
        "limit_reached",
        f"The job is at {cap}, {row['in_flight']} in flight; this task starts when a slot is freed.",
    )


def _held(row: Row) -> tuple[str, str] | None:
    """Explains a backfill task that has not been released to the queue."""
    if not row["held"]:
        return None
    if row["backfill_paused"]:
        return "held_back", f"Its backfill is paused; resume it with: interlock backfill resume {row['run_id']}."
    if row["paused_since"] is not None:
        return "held_back", "Its backfill waits for downstream jobs to catch up."
    return "held_back", "Its backfill has filled its job's queue; this task is queued when there is room."


def _without_worker(row: Row) -> tuple[str, str] | None:
    if row["queue"] is None or row["workers"]:
        return None
    runtime = row["runtime"]
    advice = f"start one: interlock serve worker --runtime {runtime}"
    return "no_worker", f"No worker for runtime {runtime!r} has polled in the last minute; {advice}."


def _message_dead(row: Row) -> tuple[str, str] | None:
    if not row["message_dead"]:
        return None
    what = f"Its wake-up was received {row['receives']} times without being settled and is a dead letter"
    return (
        "message_dead",
        f"{what}; the reconciler sends a new one in one of its next passes. See the workers' logs for the cause.",
    )


def _message_lost(row: Row) -> tuple[str, str] | None:
    if row["queue"] is None or row["has_message"]:
        return None
    return (
        "message_missing",
        "It has no wake-up in the queue; the reconciler sends a new one in one of its next passes.",
    )


def _message_later(row: Row) -> tuple[str, str] | None:
    if not row["has_message"] or row["visible_at"] <= row["now"]:
        return None
    return (
        "message_in_flight",
        f"A worker has received its wake-up and has not claimed it; it is delivered again at {_at(row['visible_at'])}.",
    )


def _running(row: Row) -> tuple[str, str]:
    who = f"Attempt {row['attempt']} is held by {row['worker_id']} until {_at(row['lease_expires_at'])}"
    if row["cancel_requested"]:
        return "cancel_requested", f"{who}; cancel was requested and reaches it with its next heartbeat."
    if row["lease_expires_at"] <= row["now"]:
        return "lease_expired", f"{who}; the lease has expired and the reaper is about to end the attempt."
    return "running", f"{who}; its hard timeout is {_at(row['timeout_at'])}."


def _failed(row: Row) -> tuple[str, str]:
    error = f"{row['error_class'] or 'no error class'}: {row['error_message'] or 'no message'}"
    cause = f"{row['outcome'] or 'Failed'}: {error}"
    if not row["dead"]:
        ended = f"Attempt {row['attempt']} of {row['max_attempts']} ended with {cause}"
        return "waiting_for_retry", f"{ended}. The next starts at {_at(row['retry_at'])}."
    if row["attempt"] >= row["max_attempts"]:
        used = f"All {row['max_attempts']} attempts are used up"
    else:
        used = "The error is not retryable by the job's policy"
    return "dead_letter", f"{used}; the last ended with {cause}. Run it again with: interlock task retry."


def _completed(row: Row) -> tuple[str, str]:
    return "completed", f"Attempt {row['attempt']} completed at {_at(row['ended_at'])} on {row['worker_id']}."


def _canceled(row: Row) -> tuple[str, str]:
    return "canceled", f"Canceled at {_at(row['ended_at'])}, by request."


_BY_STATUS = {
    "Queued": _queued,
    "Running": _running,
    "Failed": _failed,
    "Completed": _completed,
    "Canceled": _canceled,
}

_FACTS = (
    "attempt",
    "max_attempts",
    "runtime",
    "queue",
    "workers",
    "in_flight",
    "max_concurrency",
    "max_concurrency_per_key",
    "slot_key",
    "worker_id",
    "queued_at",
    "started_at",
    "ended_at",
    "retry_at",
    "lease_expires_at",
    "timeout_at",
    "cancel_requested",
    "progress",
    "progress_text",
    "paused_since",
    "pause_reason",
    "pause_path",
    "error_class",
    "error_message",
)


def _facts(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in _FACTS if row[name] is not None}


def _at(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")


_EVERY_SECONDS = 10.0
_MOST = 10_000


class Presence:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._written: dict[tuple[str, str], float] = {}

    async def seen(self, worker_id: str, queue: str) -> None:
        """Records a poll, at most once in ten seconds: a busy worker polls a hundred times a second."""
        key, now = (worker_id.replace("\x00", ""), queue), time.monotonic()
        if now - self._written.get(key, float("-inf")) < _EVERY_SECONDS:
            return
        if len(self._written) > _MOST:
            self._written.clear()
        self._written[key] = now
        async with self._database.connection() as connection:
            await _queue_sql.worker_seen(connection, worker_id=key[0], queue=queue)

    async def workers(self) -> list[Row]:
        async with self._database.connection() as connection:
            rows: list[Row] = await _queue_sql.live_workers(connection)
        return rows
