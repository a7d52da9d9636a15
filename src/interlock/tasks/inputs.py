"""Resolves the inputs of jobs to the datasets that hold the rows.

A dataset of ranges has no rows of its own. It resolves to the dataset that the ranges were cut from, with that
dataset's storage and the conditions of every edge on the way. Task payloads, tokens and reads all use the resolved
dataset.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from uuid import UUID

from interlock.access.tokens import read_prefix
from interlock.stores.postgres import Connection, Row, queries
from interlock.wire import TaskInput

_sql = queries("tasks", "files")


class Inputs:
    def __init__(self, root: str, range_operators: Iterable[str]) -> None:
        self._root = root
        self._range_operators = sorted(range_operators)

    async def edges(self, connection: Connection, jobs: Iterable[UUID]) -> defaultdict[UUID, list[Row]]:
        """Returns the resolved edges by job, in input order."""
        found: defaultdict[UUID, list[Row]] = defaultdict(list)
        wanted = sorted(set(jobs))
        for row in await _sql.data_of_inputs(connection, job_ids=wanted, range_operators=self._range_operators):
            found[row["job_id"]].append(row)
        return found

    async def of(self, connection: Connection, jobs: Sequence[UUID]) -> dict[UUID, list[TaskInput]]:
        """Returns the task inputs by job, still without a scope."""
        if not jobs:
            return {}
        edges = await self.edges(connection, jobs)
        return {job: [self._input(edge) for edge in found] for job, found in edges.items()}

    def _input(self, edge: Row) -> TaskInput:
        return TaskInput(
            input_index=edge["input_index"],
            dataset_uuid=edge["dataset_uuid"],
            dataset_version=edge["dataset_version"],
            storage=edge["storage"],
            read_prefix=read_prefix(self._root, edge["dataset_uuid"], edge["dataset_version"]),
            where=_where(edge["conditions"]),
        )


def _where(conditions: Sequence[str]) -> str | None:
    if len(conditions) < 2:
        return conditions[0] if conditions else None
    return " AND ".join(f"({condition})" for condition in conditions)
