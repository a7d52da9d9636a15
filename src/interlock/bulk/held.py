"""Tasks that are there and have no message yet: handed out as their job's queue has room for them.

A run that is held back, as a backfill is, fills no more than a share of the queue. The rest is for what happens now: so
nobody upstream is held back for it. Nor is anything handed out while backpressure, or a user, holds it back: what waits
here is not lost, and is found by whichever ingest process looks next.
"""

from __future__ import annotations

import functools
from typing import Final
from uuid import UUID

import structlog

from interlock.adapters.postgres import Connection, Database, Row, queries
from interlock.failpoints import failpoint
from interlock.kernel.loop import Periodic
from interlock.kernel.tasks import enqueue
from interlock.settings import Settings

log = structlog.get_logger()
_sql = queries("backfills")
_runs_sql = queries("runs")

_PAGE: Final = 100
_MOST: Final = 5_000
"""Tasks that are handed out in one transaction."""
_MOST_WAITING: Final = 10_000
"""Of a job without max_queue_depth."""
_SHARE: Final = 0.5
_RANGES: Final = 4
"""At least so many make up the share: it is filled up long before it is empty."""
_ZERO: Final = UUID(int=0)


def range_size_of(max_queue_depth: int | None, settings: Settings) -> int:
    """Of a run that is held back: messages are of whole ranges, and these must fit into its share of the queue."""
    return max(1, min(settings.range_size, _share(max_queue_depth) // _RANGES))


class HeldRuns(Periodic):
    name = "held_runs"

    def __init__(self, database: Database, settings: Settings) -> None:
        self.seconds = settings.backfill_seconds
        self._database = database
        self._direct = settings.queue_direct

    async def run_once(self) -> int:
        """Tasks that were handed out."""
        done, after = 0, {"after_job": _ZERO, "after_run": _ZERO}
        while True:
            async with self._database.connection() as connection:
                page = await _sql.held_runs(connection, most=_PAGE, **after)
            for row in page:
                done += await self.hand_out(row["run_id"])
            if len(page) < _PAGE:
                return done
            after = {"after_job": page[-1]["job_id"], "after_run": page[-1]["run_id"]}

    async def hand_out(self, run_id: UUID) -> int:
        """The next tasks of one run. A crash before the commit leaves them where they were."""
        return await self._database.run(functools.partial(self._hand_out, run_id=run_id))

    async def _hand_out(self, connection: Connection, *, run_id: UUID) -> int:
        run: Row | None = await _sql.take_held(connection, run_id=run_id, most_waiting=_MOST_WAITING)
        if run is None:
            return 0
        if not run["active"]:
            # Another version of the DAG has taken over, and what this one makes nobody reads.
            await _runs_sql.request_run_cancel(connection, run_id=run_id, org_id=run["org_id"])
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
        rows = await _runs_sql.queued_of_range(
            connection, shard=run["shard"], run_id=run["run_id"], first=first, last=last
        )
        if rows:
            await enqueue(connection, [row["task_id"] for row in rows], shard=run["shard"], direct=self._direct)


async def _take_over(connection: Connection, run: Row, first: int, last: int) -> None:
    """A scope whose own task will never end it, because that is dead, canceled or gone, is ended by the one that is
    handed out now; every other scope keeps the task that it has."""
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
    return _MOST_WAITING if max_queue_depth is None else max(1, int(max_queue_depth * _SHARE))


def _last(run: Row) -> int:
    """Of those that there is room for: whole ranges, or the rest."""
    size, left, share = run["range_size"], run["last_index"] + 1 - run["held_from"], _share(run["max_queue_depth"])
    room = max(0, min(_MOST, share - run["waiting"]))
    fitting = left if left <= room else room // size * size
    if room and size > share:  # the limit was lowered since: no range would ever fit
        fitting = size
    return int(run["held_from"] + min(fitting, left) - 1)
