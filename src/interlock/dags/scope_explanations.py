"""Explains the state of a scope of a DAG job: why it has no task, or how its task ended, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from interlock.datasets.registry import display_name
from interlock.errors import BadRequest, NotFound
from interlock.stores.postgres import Connection, Database, Row, queries
from interlock.tasks.dataset_changes import CURSOR
from interlock.wire.datasets import ScopeExplanation

_sql = queries(__name__, "scopes")
_invalidations_sql = queries(__name__, "invalidations")
_MAX_SCOPES = 100
"""Maximum number of scopes inspected in a range; the first unfinished one determines the answer."""


@dataclass(frozen=True)
class _Answer:
    reason: str
    detail: str
    task_id: UUID | None = None
    facts: dict[str, Any] | None = None


class ScopeExplanations:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def explain(self, dag: str, job: str, org_id: UUID, start: int, end: int) -> ScopeExplanation:
        if start > end:
            raise BadRequest(f"`start` must be at most `end`, got {start}-{end}.", code="bad_partition")
        async with self._database.connection() as connection:
            found: Row | None = None
            if "\x00" not in dag + job:
                found = await _sql.job_of_dag(connection, org_id=org_id, dag=dag, name=job)
            if found is None:
                raise NotFound(f"DAG {dag!r} has no job {job!r} in this org; `interlock dag show` lists its jobs.")
            answer = await self._answer(connection, found, start, end)
        return ScopeExplanation(
            job_id=found["job_id"],
            start=start,
            end=end,
            reason=answer.reason,
            detail=answer.detail,
            task_id=answer.task_id,
            facts=answer.facts or {},
        )

    async def _answer(self, connection: Connection, job: Row, start: int, end: int) -> _Answer:
        if job["is_source"]:
            return _Answer("source", "The job is a source, which receives no scopes; see its tasks.")
        scope = {"job_id": job["job_id"], "start": start, "end": end}
        given = await _sql.scope_given(connection, inputs=job["inputs"], limit=_MAX_SCOPES, **scope)
        if given is not None:
            task = await _sql.task_given(connection, shard=given["task_shard"], task_id=given["task_id"])
            return _given(given, task)
        inputs = await _sql.inputs_in_range(connection, **scope)
        streams = bool(inputs) and all(row["progress"] == CURSOR for row in inputs)
        committed = (await _sql.streams_read(connection, job_id=job["job_id"]))["committed"] if streams else None
        if committed is not None and committed >= end:
            facts = {"committed": committed}
            return _Answer("done", f"The job has read its streams up to {committed}.", facts=facts)
        held = await _invalidations_sql.holding_back(connection, job_ids=[job["job_id"]])
        return _missing(job, inputs, start, end) or (_paused(held) if held else _not_given(committed))


def _given(row: Row, task: Row | None) -> _Answer:
    scope, task_id = f"{row['range_start']}-{row['range_end']}", row["task_id"]
    status = None if task is None else task["status"]
    facts = {"scope": scope, "status": status}
    if row["done"]:
        return _Answer("done", f"Task {task_id} has completed {scope}.", task_id, facts)
    if task is not None and task["dead"]:
        what = f"Task {task_id} for {scope} failed permanently. Run it again with: interlock task retry {task_id}."
        return _Answer("dead_letter", what, task_id, facts)
    if status in (None, "Canceled"):
        became = "was canceled" if status else "no longer exists"
        what = f"Task {task_id} for {scope} {became}; invalidate this scope of the job's output to recompute it."
        return _Answer("canceled", what, task_id, facts)
    what = f"Task {task_id} for {scope} is {status}; for details run: interlock task explain {task_id}."
    return _Answer("in_progress", what, task_id, facts)


def _missing(job: Row, inputs: Sequence[Row], start: int, end: int) -> _Answer | None:
    """Returns an answer if an input of the job is missing or has different partition bounds."""
    absent = [row for row in inputs if not _there(row, end)]
    if absent and (job["wait_for_all"] or len(absent) == len(inputs)):
        names = ", ".join(display_name(row) for row in absent)
        facts = {"missing": [_input_facts(row) for row in absent]}
        return _Answer("input_missing", f"{start}-{end} is not in {names} yet.", facts=facts)
    several = job["wait_for_all"] and len(inputs) > 1
    others = [row for row in inputs if row["progress"] != CURSOR and not row["exact"]]
    if several and others:
        bounds = ", ".join(f"{display_name(row)} has {row['nearest']}" for row in others)
        what = f"Not all inputs have a partition with exactly the bounds {start}-{end}: {bounds}."
        return _Answer("bounds_differ", what, facts={"inputs": [_input_facts(row) for row in others]})
    return None


def _there(row: Row, end: int) -> bool:
    if row["progress"] == CURSOR:
        return bool(row["cursor"] >= end)
    return bool(row["overlapping"])


def _input_facts(row: Row) -> dict[str, Any]:
    return {
        "input_index": row["input_index"],
        "dataset": display_name(row),
        "cursor": row["cursor"],
        "nearest": row["nearest"],
    }


def _paused(row: Row) -> _Answer:
    path = " <- ".join(row["path"])
    what = f"The job has been paused since {row['since']:%Y-%m-%d %H:%M:%SZ}: {row['reason']} ({path})."
    return _Answer("paused", what, facts={"since": row["since"], "path": row["path"], "cause": row["reason"]})


def _not_given(committed: int | None) -> _Answer:
    what = "All inputs are present; the router, or one of the reconciler's next passes, will create the task."
    return _Answer("not_given_yet", what, facts={} if committed is None else {"committed": committed})
