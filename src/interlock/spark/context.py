"""The context object that a Spark operator receives next to its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from interlock.calendars import calendar_of
from interlock.spark.operators import BUILT_IN
from interlock.wire.attempts import TaskData
from interlock.workers import context
from interlock.workers.context import TaskFailed
from interlock.workers.protocol import Assignment, Work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_json = msgspec.json.Decoder()


@dataclass(frozen=True, order=True)
class Scope:
    """An inclusive range."""

    start: int
    end: int

    def __contains__(self, position: int) -> bool:
        return self.start <= position <= self.end

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"


class TaskContext(context.TaskContext):
    """One attempt of one task, for its operator."""

    def __init__(
        self, work: Work, assignment: Assignment, link: context.Link, spark: SparkSession, data: TaskData
    ) -> None:
        super().__init__(work, assignment, link)
        self._spark = spark
        self._data = data
        self._persisted: list[DataFrame] = []

    @property
    def spark(self) -> SparkSession:
        """The session. Other tasks use the same Spark, so do not change its settings and do not stop it."""
        return self._spark

    @property
    def data(self) -> TaskData:
        """The files and tables that the task reads, and the locations that it writes to."""
        return self._data

    @cached_property
    def payload(self) -> Any:
        """The JSON value with which the task was submitted or triggered."""
        return _json.decode(self._assignment.payload)

    @cached_property
    def scope(self) -> Scope | None:
        """The range of this task: that of its inputs, or `start` and `end` of its payload."""
        for one in self._data.inputs:
            if one.start is not None and one.end is not None:
                return Scope(one.start, one.end)
        return _given_scope(self.payload)

    def _span(self) -> tuple[int, int] | None:
        return None if self.scope is None else (self.scope.start, self.scope.end)

    def file_suffix(self, scope: Scope) -> str:
        """Returns the range in the name of a file: dates, or integers."""
        if self._work.partition is None:
            return f"{scope.start}_{scope.end}"
        return calendar_of(self._work.partition).file_suffix(scope.start, scope.end)

    def in_interval(self, frame: DataFrame, column: str) -> DataFrame:
        """Returns the rows whose time lies in the task's interval. The column is a date or a timestamp.

        A date, and a timestamp without a time zone, are taken as local to the time zone of the partition.
        """
        filtered: DataFrame = import_module("interlock.spark.intervals").in_interval(frame, column, self.interval)
        return filtered

    def persist(self, frame: DataFrame) -> DataFrame:
        """Caches a DataFrame until the attempt ends. Use it for one from which several outputs are computed."""
        self._persisted.append(frame.persist())
        return frame

    def release(self) -> None:
        """Drops everything that the attempt cached from Spark's memory."""
        while self._persisted:
            self._persisted.pop().unpersist()

    @property
    def data_url(self) -> str:
        """URL of the data database. Only for built-in operators: others get its rows as their inputs."""
        if self.operator not in BUILT_IN:
            raise TaskFailed(
                f"Operator {self.operator!r} is not built in, so it does not get the URL of the data database: "
                "declare the tables that it needs as inputs of the job.",
                "DataDatabaseRefused",
            )
        return super().data_url

    @property
    def table_url(self) -> str:
        """URL of the data database, for reading inputs that are its tables."""
        if self._work.data_url is None:
            raise TaskFailed(
                "An input of this task is a table of the data database, whose URL this worker does not have: "
                "set INTERLOCK_DATA_URL for the worker of the spark runtime.",
                "DataDatabaseRefused",
            )
        return self._work.data_url

    @property
    def state_url(self) -> str:
        """URL of the state database, for loading staged lists."""
        if self._work.state_url is None:
            raise TaskFailed(
                "This worker does not have the URL of the state database, so the ingest process reads the list "
                "instead. To load lists on Spark, set INTERLOCK_STATE_URL for the worker of the spark runtime.",
                "StateDatabaseRefused",
            )
        return self._work.state_url


def _given_scope(payload: object) -> Scope | None:
    if not isinstance(payload, dict):
        return None
    start, end = payload.get("start"), payload.get("end")
    return Scope(start, end) if type(start) is int and type(end) is int and start <= end else None
