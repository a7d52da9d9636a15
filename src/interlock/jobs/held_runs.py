"""Held runs: tasks that exist but have no queue message yet. They are handed out as their job's queue has room.

A held run, such as a backfill, fills at most a share of the queue. The rest is for current work, so that a held run
never causes backpressure upstream. Nothing is handed out while backpressure or a user pauses the run. Waiting tasks are
not lost: any ingest process finds them on its next pass.
"""

from __future__ import annotations

import functools
from typing import Final
from uuid import UUID

import structlog

from interlock.failpoints import failpoint
from interlock.processes.loop import Periodic
from interlock.settings import Settings
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.actions import request_run_cancel
from interlock.tasks.completion import enqueue

log = structlog.get_logger()
_sql = queries(__name__, "backfills")
_control_sql = queries(__name__, "run_control")

_PAGE: Final = 100
_MAX_TASKS: Final = 5_000
"""Tasks handed out in one transaction."""
_MAX_WAITING: Final = 10_000
"""Limit for a job without max_queue_depth."""
_SHARE: Final = 0.5
_RANGES: Final = 4
"""The share holds at least this many ranges, so that it is refilled long before it is empty."""
_ZERO: Final = UUID(int=0)


def range_size_of(max_queue_depth: int | None, settings: Settings) -> int:
    """Returns the range size of a held run. Messages cover whole ranges, which must fit into its queue share."""
    return max(1, min(settings.range_size, _share(max_queue_depth) // _RANGES))


class HeldRuns(Periodic):
    name = "held_runs"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.backfill_seconds
        self._database = database
        self._direct = settings.queue_direct

    async def run_once(self) -> int:
        """Returns the number of tasks handed out."""
        done, after = 0, {"after_job": _ZERO, "after_run": _ZERO}
        while True:
            async with self._database.connection() as connection:
                page = await _sql.held_runs(connection, limit=_PAGE, **after)
            for row in page:
                done += await self.hand_out(row["run_id"])
            if len(page) < _PAGE:
                return done
            after = {"after_job": page[-1]["job_id"], "after_run": page[-1]["run_id"]}

    async def hand_out(self, run_id: UUID) -> int:
        """Hands out the next tasks of one run. A crash before the commit changes nothing."""
        return await self._database.run(functools.partial(self._hand_out, run_id=run_id))

    async def _hand_out(self, connection: Connection, *, run_id: UUID) -> int:
        run: Row | None = await _sql.take_held(connection, run_id=run_id, most_waiting=_MAX_WAITING)
        if run is None:
            return 0
        if not run["active"]:
            # Another version of the DAG has taken over; nothing reads the output of this one.
            await request_run_cancel(connection, run_id, run["org_id"])
            log.info("run.superseded", run_id=str(run_id), effect="its tasks are canceled")
            return 0
        first, last = run["held_from"], _last(run)
        if last < first:
            return 0
        await _take_over(connection, run, first, last)
        await self._send(connection, run, first, last)
        await _sql.hold_from(connection, run_id=run_id, held_from=last + 1)
        await failpoint("ingest.before_hand_out_commit")
        return int(last - first + 1)

    async def _send(self, connection: Connection, run: Row, first: int, last: int) -> None:
        if run["queue"] is not None:
            named = {name: run[name] for name in ("org_id", "run_id", "job_id", "range_size", "queue", "lane")}
            await _sql.send_ranges(connection, first=first, last=last, direct=self._direct, **named)
            return
        rows = await _control_sql.queued_of_range(
            connection, shard=run["shard"], run_id=run["run_id"], first=first, last=last
        )
        if rows:
            await enqueue(connection, [row["task_id"] for row in rows], shard=run["shard"], direct=self._direct)


async def _take_over(connection: Connection, run: Row, first: int, last: int) -> None:
    """Reassigns abandoned scopes to the tasks handed out now. A scope is abandoned if its own task is dead, canceled or
    deleted and so will never complete it. Every other scope keeps its task."""
    span = {"shard": run["shard"], "run_id": run["run_id"], "first": first, "last": last}
    undone = await _sql.undone_scopes(connection, job_id=run["job_id"], **span)
    alive = set[UUID]()
    for shard in {scope["task_shard"] for scope in undone}:
        waited_for = [scope["waits_for"] for scope in undone if scope["task_shard"] == shard]
        rows = await _sql.may_end(connection, shard=shard, task_ids=waited_for)
        alive |= {row["task_id"] for row in rows}
    abandoned = [scope for scope in undone if scope["waits_for"] not in alive]
    if abandoned:
        await _sql.take_over_scopes(
            connection,
            job_id=run["job_id"],
            task_shard=run["shard"],
            inputs=[scope["input_index"] for scope in abandoned],
            starts=[scope["range_start"] for scope in abandoned],
            ends=[scope["range_end"] for scope in abandoned],
            left_by=[scope["waits_for"] for scope in abandoned],
            task_ids=[scope["task_id"] for scope in abandoned],
        )


def _share(max_queue_depth: int | None) -> int:
    return _MAX_WAITING if max_queue_depth is None else max(1, int(max_queue_depth * _SHARE))


def _last(run: Row) -> int:
    """Returns the last index to hand out: whole ranges that fit, or the rest of the run."""
    size, left, share = run["range_size"], run["last_index"] + 1 - run["held_from"], _share(run["max_queue_depth"])
    room = max(0, min(_MAX_TASKS, share - run["waiting"]))
    fitting = left if left <= room else room // size * size
    if room and size > share:  # the limit was lowered since, and no range would ever fit
        fitting = size
    return int(run["held_from"] + min(fitting, left) - 1)
