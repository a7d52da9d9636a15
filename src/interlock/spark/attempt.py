"""One attempt on Spark: read the granted inputs, call the operator, check its outputs, write them.

`spark_map` runs an operator on all tasks of a claim together, as rows of one DataFrame:

    {"operator": "spark_map", "runtime": "spark", "config": {"operator": "my_module:score"}, "tasks": [...]}

    @operator(inputs={"tasks": "index bigint, payload string"}, output="index bigint, result string")
    def score(tasks: DataFrame, ctx: TaskContext) -> DataFrame: ...

Each row that the operator returns ends the task with that index. `result`, of any type, is the task's result. If the
row has a column `error` that is not null, only that task fails, with this message. An exception fails all tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import StructType

from interlock.schemas import HOT_RANGE_COLUMN
from interlock.spark import objects
from interlock.spark.columns import parsed
from interlock.spark.context import TaskContext
from interlock.spark.errors import explained
from interlock.spark.operators import Declaration, Operator, Schema, resolve, resolve_declared
from interlock.spark.reader import Reader
from interlock.spark.writer import write
from interlock.wire.attempts import Event, InputData, Output, OutputData, TaskData
from interlock.workers.context import TaskFailed
from interlock.workers.failures import BadConfig, BadOperator, WrongInputs, WrongOutputs
from interlock.workers.protocol import Assignment

T = TypeVar("T")


def run_attempt(
    spark: SparkSession, ctx: TaskContext, data: TaskData, payload: object
) -> tuple[Any, list[Output], list[Event]]:
    """Runs the operator. Returns the task's result, and the outputs and events that become visible on completion.

    Failures are raised as TaskFailed with a message on what to do, or as the operator's own exception. The files of a
    failed attempt are deleted immediately, best effort.
    """
    del payload  # the context has it
    return run_operator(resolve(ctx.operator), spark, ctx, data)


def run_operator(
    operator: Operator, spark: SparkSession, ctx: TaskContext, data: TaskData
) -> tuple[Any, list[Output], list[Event]]:
    with _clean(data), explained(data), closing_with(ctx):
        return finish(operator, call(operator, spark, ctx, data), ctx, data)


def call(operator: Operator, spark: SparkSession, ctx: TaskContext, data: TaskData) -> object:
    """Calls the function and returns its value. DataFrames are lazy, so most of the work happens in `finish`."""
    return operator.function(*_arguments(operator, spark, ctx, data), ctx)


def finish(
    operator: Operator, returned: object, ctx: TaskContext, data: TaskData
) -> tuple[Any, list[Output], list[Event]]:
    """Checks and writes the DataFrames that the function returned."""
    events, outputs = ctx.committed
    if not data.outputs:
        return _result(returned, operator), outputs, events
    written = _write(operator, returned, ctx, data)
    counts = {
        one.name: {"rows": done.row_count, "bytes": done.bytes}
        for one, (done, _) in zip(data.outputs, written, strict=True)
    }
    return (
        {"outputs": counts},
        [*outputs, *(output for output, _ in written)],
        [*events, *(event for _, event in written)],
    )


@contextmanager
def closing_with(ctx: TaskContext) -> Iterator[None]:
    """Releases the DataFrames that the operator persisted.

    After a failure, errors of the release are ignored. If Spark is gone, so is its memory, and the first error matters.
    """
    try:
        yield
    except BaseException:
        with suppress(Exception):
            ctx.release()
        raise
    ctx.release()


@contextmanager
def _clean(data: TaskData) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for output in data.outputs:
            objects.remove_prefix(output.write_prefix)
        raise


def _result(returned: object, operator: Operator) -> object:
    if isinstance(returned, DataFrame):
        raise WrongOutputs(
            f"Operator {operator.name} returns a DataFrame, but its job has no output: add an output to the job."
        )
    return returned


# Inputs


class Inputs(Mapping[str, DataFrame]):
    """All inputs of a task by name. Each is opened on first access, since an operator may need only their range."""

    def __init__(self, reader: Reader, inputs: Sequence[InputData]) -> None:
        self._reader = reader
        self._inputs = {one.name: one for one in inputs}
        self._frames: dict[str, DataFrame] = {}

    def __getitem__(self, name: str) -> DataFrame:
        if name not in self._frames:
            self._frames[name] = self._reader.frame(self._inputs[name], None)
        return self._frames[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)


def _arguments(operator: Operator, spark: SparkSession, ctx: TaskContext, data: TaskData) -> list[Any]:
    reader = Reader(spark, lambda: ctx.table_url)
    declared = operator.declaration.inputs
    if declared is None:
        return [Inputs(reader, data.inputs)]
    if not declared:
        return []
    by_name = _matched(declared, {one.name: one for one in data.inputs})
    if by_name is None:
        raise WrongInputs(
            f"Operator {operator.name} takes the inputs {_listed(declared)}, but its job has "
            f"{_listed([one.name for one in data.inputs])}: give the job the same number of inputs, in this order."
        )
    return [
        reader.frame(one, parsed(declared[name], f"input {name} of operator {operator.name}"))
        for name, one in by_name.items()
    ]


def _matched(declared: Mapping[str, Any], given: Mapping[str, T]) -> dict[str, T] | None:
    """Matches by name if the names are equal, else by order. Returns None if the counts differ."""
    if declared.keys() == given.keys():
        return {name: given[name] for name in declared}
    if len(declared) != len(given):
        return None
    return dict(zip(declared, given.values(), strict=True))


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(names) or "none"


# Outputs


def _write(operator: Operator, returned: object, ctx: TaskContext, data: TaskData) -> list[tuple[Output, Event]]:
    schemas = _schemas(operator, data.outputs)
    frames = _frames(operator, returned, data.outputs)
    column = operator.declaration.range_column
    if column not in (None, HOT_RANGE_COLUMN) and not any(column in frame.columns for frame in frames):
        raise BadOperator(
            f"No output of operator {operator.name} has the range column {column}: set range_column= to a column that "
            "an output has, or to None."
        )
    return [
        write(frame, output, schema, ctx.scope, column, ctx.file_suffix)
        for frame, output, schema in zip(frames, data.outputs, schemas, strict=True)
    ]


def _frames(operator: Operator, returned: object, outputs: Sequence[OutputData]) -> list[DataFrame]:
    """Returns one DataFrame per output, in the order of the outputs."""
    if isinstance(returned, DataFrame) and len(outputs) == 1:
        return [returned]
    names = [output.name for output in outputs]
    if isinstance(returned, Mapping):
        by_name = _matched(dict.fromkeys(names), _in_declared_order(operator.declaration, returned))
        if by_name is not None and all(isinstance(frame, DataFrame) for frame in by_name.values()):
            return list(by_name.values())
    given = _listed([str(name) for name in returned]) if isinstance(returned, Mapping) else type(returned).__name__
    raise WrongOutputs(
        f"Operator {operator.name} returns {given}, but its job has the outputs {_listed(names)}: return a DataFrame "
        "for a single output, or a dict with a DataFrame for each name."
    )


def _in_declared_order(declaration: Declaration, returned: Mapping[str, Any]) -> dict[str, Any]:
    """Puts the returned dict in the order of the declaration, which counts if outputs are not matched by name."""
    declared = declaration.outputs
    if isinstance(declared, Mapping) and declared.keys() == returned.keys():
        return {name: returned[name] for name in declared}
    return dict(returned)


def _schemas(operator: Operator, outputs: Sequence[OutputData]) -> list[StructType | None]:
    declared = operator.declaration.outputs
    if declared is None:
        return [None] * len(outputs)
    names = [output.name for output in outputs]
    by_name = _matched(dict.fromkeys(names), declared if isinstance(declared, Mapping) else _the_only(declared, names))
    if by_name is None:
        raise WrongOutputs(
            f"Operator {operator.name} declares "
            f"{f'the outputs {_listed(declared)}' if isinstance(declared, Mapping) else 'one output'}, but its job has "
            f"{_listed(names)}: give the job the same number of outputs, in this order."
        )
    return [parsed(schema, f"output {name} of operator {operator.name}") for name, schema in by_name.items()]


def _the_only(schema: Schema, names: Sequence[str]) -> dict[str, Schema]:
    return {names[0]: schema}


_TASKS: Final = pa.schema([("index", pa.int64()), ("payload", pa.string())])
_RESULT, _ERROR = "result", "error"


def run_together(spark: SparkSession, ctx: TaskContext, tasks: Sequence[Assignment]) -> dict[int, object]:
    """Returns by slot the result of each task, or the TaskFailed that it ends with."""
    operator = _operator(ctx.config)
    with explained(ctx.data), closing_with(ctx):
        slots = {_index(task): task.slot for task in tasks}
        returned = operator.function(_frame(spark, tasks), ctx)
        outcomes = _outcomes(_rows(operator, returned), slots)
    missing = TaskFailed(
        f"Operator {operator.name} returned no row with the index of this task: return one row per task.", "NoResult"
    )
    return {slot: outcomes.get(slot, missing) for slot in slots.values()}


def _operator(config: object) -> Operator:
    name = config.get("operator") if isinstance(config, Mapping) else None
    if not isinstance(name, str) or ":" not in name:
        raise BadConfig('spark_map needs a config such as {"operator": "my_module:my_function"}.')
    operator = resolve_declared(name)
    if operator.declaration.inputs is None or len(operator.declaration.inputs) != 1:
        raise BadConfig(
            f"Operator {name} must declare exactly one input, the tasks: "
            '@operator(inputs={"tasks": "index bigint, payload string"}).'
        )
    return operator


def _index(task: Assignment) -> int:
    """Returns the index of a task. A task without a run has none and gets a unique negative number."""
    return -task.slot if task.index is None else task.index


def _frame(spark: SparkSession, tasks: Sequence[Assignment]) -> DataFrame:
    columns = {"index": [_index(task) for task in tasks], "payload": [task.payload.decode() for task in tasks]}
    return spark.createDataFrame(pa.table(columns, schema=_TASKS))


def _rows(operator: Operator, returned: object) -> list[Row]:
    if not isinstance(returned, DataFrame) or not {"index", _RESULT} <= set(returned.columns):
        raise WrongOutputs(
            f"Operator {operator.name} must return a DataFrame with the columns `index` and `result`, and optionally "
            "`error` to fail single tasks."
        )
    wanted = [name for name in ("index", _RESULT, _ERROR) if name in returned.columns]
    rows: list[Row] = returned.select(*wanted).collect()
    return rows


def _outcomes(rows: Iterable[Row], slots: Mapping[int, int]) -> dict[int, object]:
    outcomes: dict[int, object] = {}
    for row in rows:
        slot = slots.get(row["index"])
        if slot is None:
            continue
        if slot in outcomes:
            outcomes[slot] = TaskFailed(
                "The operator returned several rows with the index of this task: return one row per task.", "TwoResults"
            )
        elif _ERROR in row and row[_ERROR] is not None:
            outcomes[slot] = TaskFailed(str(row[_ERROR]), "MapFailed")
        else:
            outcomes[slot] = _plain(row[_RESULT])
    return outcomes


def _plain(value: Any) -> object:
    return value.asDict(recursive=True) if isinstance(value, Row) else value
