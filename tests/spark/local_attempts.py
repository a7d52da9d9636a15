"""Builds tasks like the dispatcher, over files in a folder, and runs attempts at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from interlock.schemas import MARKER, Column, DatasetSchema, Marker
from interlock.spark.attempt import run_operator
from interlock.spark.context import TaskContext
from interlock.spark.operators import declared
from interlock.wire.access import TaskSecret
from interlock.wire.attempts import Event, InputData, Output, OutputData, TaskData, TaskFile
from interlock.workers.protocol import Assignment, Outbound, Work


def schema(text: str, range_column: str | None = "block_number") -> DatasetSchema:
    """Parses `block_number bigint not null, name string`. Supports simple types only."""
    columns = []
    for part in text.split(", "):
        name, kind, *rest = part.split(" ")
        columns.append(Column(name, kind, nullable=rest != ["not", "null"]))
    return DatasetSchema(columns, range_column)


@dataclass
class Store:
    """A folder of objects with committed partitions."""

    folder: Path
    commits: int = 0

    def file(self, rows: pa.Table, start: int, end: int) -> TaskFile:
        """Writes a partition as if an attempt had committed it, under its own prefix."""
        self.commits += 1
        path = self.folder / str(self.commits) / f"rows_{start}_{end}.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(rows, path, row_group_size=100)
        return TaskFile(start=start, end=end, location=f"file://{path}", commit=self.commits)

    def prefix(self) -> str:
        return f"file://{self.folder}/_attempts/{uuid4()}/1/"


def parquet_input(
    name: str, files: Sequence[TaskFile], scope: tuple[int, int] | None, known: DatasetSchema | None, **more: Any
) -> InputData:
    start, end = scope or (None, None)
    return InputData(
        input_index=0,
        name=name,
        dataset_uuid=uuid4(),
        dataset_version=uuid4(),
        storage="parquet",
        start=start,
        end=end,
        schema=known,
        files=list(files),
        **more,
    )


def output(store: Store, name: str, index: int = 0, **more: Any) -> OutputData:
    return OutputData(
        output_index=index,
        name=name,
        dataset_uuid=uuid4(),
        dataset_version=uuid4(),
        storage="parquet",
        write_prefix=store.prefix(),
        **more,
    )


@dataclass
class Link:
    progressed: list[float] = field(default_factory=list)

    def progress(self, slot: int, fraction: float, text: str | None) -> None:
        self.progressed.append(fraction)

    def emit(self, slot: int, events: list[Event]) -> int:
        return len(events)

    def canceled(self, slot: int) -> bool:
        return False

    def paused(self, slot: int) -> bool:
        return False


def context(
    spark: SparkSession,
    data: TaskData,
    *,
    operator: str = "test",
    config: Mapping[str, Any] | None = None,
    payload: object = None,
    data_url: str | None = None,
    outbound: Outbound | None = None,
    secrets: Sequence[TaskSecret] = (),
) -> TaskContext:
    encode = msgspec.json.encode
    work = Work(
        operator=operator,
        job=("dag", "job"),
        run_id=None,
        attempt=1,
        config=encode(config or {}),
        inputs=[],
        outputs=[],
        data_url=data_url,
        outbound=Outbound(["127.0.0.1"]) if outbound is None else outbound,
        secrets=list(secrets),
    )
    return TaskContext(work, Assignment(1, data.task_id, None, encode(payload)), Link(), spark, data)


def task(inputs: Sequence[InputData], outputs: Sequence[OutputData]) -> TaskData:
    return TaskData(task_id=uuid4(), inputs=list(inputs), outputs=list(outputs))


def attempt(
    spark: SparkSession,
    function: Callable[..., Any],
    inputs: Sequence[InputData],
    outputs: Sequence[OutputData],
    **more: Any,
) -> tuple[Any, list[Output], list[Event]]:
    data = task(inputs, outputs)
    return run_operator(declared(function), spark, context(spark, data, **more), data)


def path_of(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def rows_of(location: str) -> list[dict[str, Any]]:
    with path_of(location).open("rb") as file:
        rows: list[dict[str, Any]] = pq.read_table(pa.BufferReader(file.read())).to_pylist()
    return rows


def marker_of(output: OutputData) -> Marker:
    return msgspec.json.decode(path_of(output.write_prefix + MARKER).read_bytes(), type=Marker)


def files_under(prefix: str) -> list[str]:
    return sorted(path.name for path in path_of(prefix).glob("*")) if path_of(prefix).exists() else []


@contextmanager
def nothing_left(outputs: Sequence[OutputData]) -> Iterator[None]:
    """Checks that a failed attempt leaves no files."""
    yield
    assert [files_under(one.write_prefix) for one in outputs] == [[] for _ in outputs]
