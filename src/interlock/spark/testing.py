"""Runs an operator in a test: rows in, rows out, on a small Spark in the same process.

    from interlock.spark.testing import run

    def test_transfers():
        result = run(erc20_transfers, logs=[{"block_number": 7, "topic0": "0x…", …}], scope=(0, 99))
        assert result.rows == [{"block_number": 7, …}]

The operator runs through the same code as on the platform: inputs are files that are filtered to the scope, and outputs
are checked and written as files. No platform process is needed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from interlock.calendars import calendar_of, split_dates
from interlock.schemas import HOT_RANGE_COLUMN
from interlock.spark import java
from interlock.spark.attempt import call, closing_with, finish
from interlock.spark.columns import parsed, schema_of
from interlock.spark.context import Scope, TaskContext
from interlock.spark.errors import explained
from interlock.spark.operators import Operator, declared
from interlock.spark.reader import inferred
from interlock.spark.session import DEFAULTS
from interlock.wire.attempts import Event, InputData, OutputData, TaskData, TaskFile
from interlock.workers.protocol import Assignment, Work

if TYPE_CHECKING:
    import pandas as pd

Rows: TypeAlias = "Sequence[Mapping[str, Any]] | pa.Table | pd.DataFrame | DataFrame"
"""Rows of an input. Columns that a dict omits are null."""

EVERYTHING: Final = (0, 2**62)
_SMALL: Final[dict[str, Any]] = {
    "spark.app.name": "interlock-test",
    "spark.log.level": "OFF",
    "spark.master": "local[2]",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.python.daemon.module": "interlock.spark.python_workers",
    # Faster start and less memory than the options for a long-lived process.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


@dataclass
class Result:
    """The outcome of a run."""

    value: Any
    """The task's result, before it is encoded as JSON."""
    tables: dict[str, pa.Table] = field(default_factory=dict)
    """The outputs by name."""
    progress: list[tuple[float, str | None]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    """Events that the operator emitted with `ctx.emit`."""

    @property
    def table(self) -> pa.Table:
        """The only output."""
        if len(self.tables) != 1:
            raise LookupError(f"there are {len(self.tables)} outputs: use `tables` or `output_rows`")
        return next(iter(self.tables.values()))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of the only output. Spark guarantees no order unless the operator sorts."""
        rows: list[dict[str, Any]] = self.table.to_pylist()
        return rows

    @property
    def output_rows(self) -> dict[str, list[dict[str, Any]]]:
        return {name: table.to_pylist() for name, table in self.tables.items()}


def session() -> SparkSession:
    """Returns the active session of this process, or starts a small one for tests."""
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    with _environment():
        return SparkSession.builder.config(map={**DEFAULTS, **_SMALL, **_elsewhere()}).getOrCreate()


def _elsewhere() -> dict[str, str]:
    """Moves the warehouse folder, which Spark would otherwise create in the current directory."""
    return {"spark.sql.warehouse.dir": Path(tempfile.gettempdir(), "interlock-test-warehouse").as_uri()}


@contextmanager
def _environment() -> Iterator[None]:
    """Sets the environment of Spark's processes: a Java, this Python, and its import path."""
    before = dict(os.environ)
    given = {"PYSPARK_PYTHON": sys.executable} | java.find(before).environment(before)
    paths = [Path(path).absolute() for path in sys.path]
    foreign = [
        str(path) for path in paths if not path.is_relative_to(sys.prefix) and not path.is_relative_to(sys.base_prefix)
    ]
    os.environ.clear()
    os.environ.update(given | {"PYTHONPATH": os.pathsep.join(foreign)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run(
    function: Callable[..., Any],
    inputs: Mapping[str, Rows] | None = None,
    /,
    *,
    config: Mapping[str, Any] | None = None,
    scope: tuple[int, int] = EVERYTHING,
    partition: str | None = None,
    dates: str | None = None,
    payload: object = None,
    attempt: int = 1,
    **rows: Rows,
) -> Result:
    """Calls an operator with rows for each of its inputs, by keyword or as a mapping.

    For a job with time partitions, pass `partition="daily Europe/Berlin"` and `dates="2026-11-18"`, also as
    `2026-11-01..2026-11-18`, instead of `scope`.

    Raises the same errors as an attempt, such as WrongColumns, NullInColumn or RowOutsideScope, and the operator's own.
    """
    operator, spark = declared(function), session()
    if partition is not None:
        scope = _scope_of(partition, dates)
    given = {**(inputs or {}), **rows}
    with tempfile.TemporaryDirectory(prefix="interlock-test-") as folder:
        data = TaskData(task_id=uuid4(), inputs=_inputs(operator, given, Path(folder), Scope(*scope)), outputs=[])
        link = _Recorded()
        ctx = _context(operator, config or {}, payload, attempt, link, spark, data, partition)
        ctx.given_scope = Scope(*scope)
        with explained(data), closing_with(ctx):
            returned = call(operator, spark, ctx, data)
            data = msgspec.structs.replace(data, outputs=_outputs(operator, returned, Path(folder)))
            value, outputs, _ = finish(operator, returned, ctx, data)
        ours = {one.output_index: one.name for one in data.outputs}
        tables = {ours[one.output_index]: _read(one.location) for one in outputs if one.output_index in ours}
    return Result(value, tables, link.progressed, link.emitted)


def _scope_of(partition: str, dates: str | None) -> tuple[int, int]:
    found = split_dates(dates or "")
    if found is None:
        raise ValueError(f"pass the dates of the task next to partition, such as '2026-11-18', got {dates!r}")
    return calendar_of(partition).range_of(*found)


# Inputs


def _inputs(operator: Operator, given: Mapping[str, Rows], folder: Path, scope: Scope) -> list[InputData]:
    wanted = operator.declaration.inputs
    if wanted and wanted.keys() != given.keys():
        raise TypeError(
            f"{operator.name} takes the inputs {', '.join(wanted)}, but the test gives {', '.join(given) or 'none'}: "
            "pass rows for each input by keyword"
        )
    schemas = {name: parsed(schema, f"input {name}") for name, schema in (wanted or {}).items()}
    return [
        _input(index, name, _arrow(name, rows, schemas.get(name)), schemas.get(name), folder, scope)
        for index, (name, rows) in enumerate(given.items())
    ]


def _arrow(name: str, rows: Rows, schema: StructType | None) -> pa.Table:
    target = None if schema is None else to_arrow_schema(schema, timezone="UTC")
    if isinstance(rows, DataFrame):
        rows = rows.toArrow()
    if isinstance(rows, pa.Table):
        return rows if target is None else rows.select(target.names).cast(target)
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        return pa.Table.from_pandas(rows, schema=target, preserve_index=False)
    dicts = [dict(row) for row in rows]
    if target is not None:
        _check_names(name, dicts, target)
    table = pa.Table.from_pylist(dicts, schema=target)
    for column in table.schema:
        if not column.nullable and table[column.name].null_count:
            raise ValueError(f"a row of {name} has no value for {column.name}, which is declared as not null")
    return table


def _check_names(name: str, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    for row in rows:
        if unknown := [column for column in row if column not in schema.names]:
            raise ValueError(f"{name} has no column {unknown[0]!r}; its columns are {', '.join(schema.names)}")


def _input(index: int, name: str, table: pa.Table, schema: StructType | None, folder: Path, scope: Scope) -> InputData:
    location = f"file://{folder}/inputs/{name}.parquet"
    path = folder / "inputs" / f"{name}.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path)
    columns = schema if schema is not None else inferred([location], name)
    placed_by = HOT_RANGE_COLUMN if HOT_RANGE_COLUMN in columns.names else None
    start, end = _bounds(table, placed_by) or (scope.start, scope.end)
    return InputData(
        input_index=index,
        name=name,
        dataset_uuid=uuid4(),
        dataset_version=uuid4(),
        storage="parquet",
        start=scope.start,
        end=scope.end,
        schema=schema_of(columns, placed_by),
        files=[TaskFile(start=start, end=end, location=location, commit=1)],
    )


def _bounds(table: pa.Table, column: str | None) -> tuple[int, int] | None:
    if column is None or not table.num_rows:
        return None
    found = pc.min_max(table[column]).as_py()
    return None if found["min"] is None else (int(found["min"]), int(found["max"]))


# Around the operator


class _Recorded:
    """Records the calls that the operator makes to the process around it."""

    def __init__(self) -> None:
        self.progressed: list[tuple[float, str | None]] = []
        self.emitted: list[Event] = []

    def progress(self, slot: int, fraction: float, text: str | None) -> None:  # noqa: ARG002 - tests have one slot
        self.progressed.append((fraction, text))

    def emit(self, slot: int, events: list[Event]) -> int:  # noqa: ARG002
        self.emitted += events
        return len(events)

    def canceled(self, slot: int) -> bool:  # noqa: ARG002
        return False

    def paused(self, slot: int) -> bool:  # noqa: ARG002
        return False


class _Context(TaskContext):
    """A context with the scope of the test, even without an input that has one."""

    given_scope: Scope

    @property
    def scope(self) -> Scope:
        return self.given_scope


def _context(
    operator: Operator,
    config: Mapping[str, Any],
    payload: object,
    attempt: int,
    link: _Recorded,
    spark: SparkSession,
    data: TaskData,
    partition: str | None,
) -> _Context:
    encode = msgspec.json.encode
    work = Work(
        operator=operator.name,
        job=("test", operator.name),
        run_id=None,
        attempt=attempt,
        config=encode(dict(config)),
        inputs=[encode(one) for one in data.inputs],
        outputs=[],
        partition=partition,
    )
    return _Context(work, Assignment(1, data.task_id, None, encode(payload)), link, spark, data)


# Outputs


def _outputs(operator: Operator, returned: object, folder: Path) -> list[OutputData]:
    return [
        OutputData(
            output_index=index,
            name=name,
            dataset_uuid=uuid4(),
            dataset_version=uuid4(),
            storage="parquet",
            write_prefix=f"file://{folder}/outputs/{index}/",
        )
        for index, name in enumerate(_output_names(operator, returned))
    ]


def _output_names(operator: Operator, returned: object) -> list[str]:
    """Returns the names of outputs that a job for this operator would have."""
    wanted = operator.declaration.outputs
    if isinstance(wanted, Mapping):
        return list(wanted)
    if wanted is not None or isinstance(returned, DataFrame):
        return ["output"]
    frames = isinstance(returned, Mapping) and any(isinstance(one, DataFrame) for one in returned.values())
    return list(returned) if frames and isinstance(returned, Mapping) else []


def _read(location: str) -> pa.Table:
    with Path(location.removeprefix("file://")).open("rb") as file:
        return pq.read_table(pa.BufferReader(file.read()))
