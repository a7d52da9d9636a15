"""What the inputs of jobs lead to: the datasets with the rows.

A dataset of ranges has none of its own. Behind it stands the dataset that the ranges were cut from, with its storage
and under the conditions of every edge on the way: that is what tasks are told, what tokens grant, and what is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from uuid import UUID

from interlock.access.tokens import read_prefix
from interlock.adapters.postgres import Connection, Row, queries
from interlock.wire import TaskInput

_sql = queries("files")


class Inputs:
    def __init__(self, root: str, range_operators: Iterable[str]) -> None:
        self._root = root
        self._range_operators = sorted(range_operators)

    async def edges(self, connection: Connection, jobs: Iterable[UUID]) -> defaultdict[UUID, list[Row]]:
        """By job, in the order of its inputs."""
        found: defaultdict[UUID, list[Row]] = defaultdict(list)
        wanted = sorted(set(jobs))
        for row in await _sql.data_of_inputs(connection, job_ids=wanted, range_operators=self._range_operators):
            found[row["job_id"]].append(row)
        return found

    async def of(self, connection: Connection, jobs: Sequence[UUID]) -> dict[UUID, list[TaskInput]]:
        """By job: what its tasks read, each input without a scope yet."""
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
