"""One attempt on Spark: read what is granted, call the operator, check what it gives, write it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from interlock.pipeline import objects
from interlock.pipeline.columns import parsed
from interlock.pipeline.context import TaskContext
from interlock.pipeline.failures import BadOperator, WrongInputs, WrongOutputs
from interlock.pipeline.operators import Declaration, Operator, Schema, resolve
from interlock.pipeline.reading import Reader
from interlock.pipeline.spark_errors import explained
from interlock.pipeline.writing import write
from interlock.schemas import HOT_RANGE_COLUMN
from interlock.wire import Event, InputData, Output, OutputData, TaskData

T = TypeVar("T")


def run_attempt(
    spark: SparkSession, ctx: TaskContext, data: TaskData, payload: object
) -> tuple[Any, list[Output], list[Event]]:
    """The task's result, with the outputs and events that become visible with its completion.

    Whatever fails comes out as a TaskFailed that says what to do, or as what the operator raised. Files of an attempt
    that has failed are removed at once, as far as that can be done.
    """
    del payload  # the context has it
    return run_operator(resolve(ctx.operator), spark, ctx, data)


def run_operator(
    operator: Operator, spark: SparkSession, ctx: TaskContext, data: TaskData
) -> tuple[Any, list[Output], list[Event]]:
    with _clean(data), explained(data), closing_with(ctx):
        return finish(operator, call(operator, spark, ctx, data), ctx, data)


def call(operator: Operator, spark: SparkSession, ctx: TaskContext, data: TaskData) -> object:
    """What the function returns. DataFrames are lazy: most of the work is still to come."""
    return operator.function(*_arguments(operator, spark, ctx, data), ctx)


def finish(
    operator: Operator, returned: object, ctx: TaskContext, data: TaskData
) -> tuple[Any, list[Output], list[Event]]:
    """Checks and writes what the function returned."""
    events, outputs = ctx.committed
    if not data.outputs:
        return _result(returned, operator), outputs, events
    written = _write(operator, returned, ctx, data)
    told = {
        one.name: {"rows": done.row_count, "bytes": done.bytes}
        for one, (done, _) in zip(data.outputs, written, strict=True)
    }
    return (
        {"outputs": told},
        [*outputs, *(output for output, _ in written)],
        [*events, *(event for _, event in written)],
    )


@contextmanager
def closing_with(ctx: TaskContext) -> Iterator[None]:
    """Release what the operator persisted. Where Spark is gone, its memory is too, and why it went is what counts."""
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
            f"Operator {operator.name} returns a DataFrame, and its job has no output to keep it in: give the job one."
        )
    return returned


# Inputs


class Inputs(Mapping[str, DataFrame]):
    """All inputs of a task by name. Each is looked at when it is asked for: an operator may need only their range."""

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
            f"Operator {operator.name} takes {_listed(declared)}, and its job has "
            f"{_listed([one.name for one in data.inputs])} as inputs: give the job as many inputs, in this order."
        )
    return [
        reader.frame(one, parsed(declared[name], f"input {name} of operator {operator.name}"))
        for name, one in by_name.items()
    ]


def _matched(declared: Mapping[str, Any], given: Mapping[str, T]) -> dict[str, T] | None:
    """By name when the names are the same, else by order."""
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
            f"No output of operator {operator.name} has its range column {column}: name one that is there."
        )
    return [
        write(frame, output, schema, ctx.scope, column)
        for frame, output, schema in zip(frames, data.outputs, schemas, strict=True)
    ]


def _frames(operator: Operator, returned: object, outputs: Sequence[OutputData]) -> list[DataFrame]:
    """One for each output, in their order."""
    if isinstance(returned, DataFrame) and len(outputs) == 1:
        return [returned]
    names = [output.name for output in outputs]
    if isinstance(returned, Mapping):
        by_name = _matched(dict.fromkeys(names), _in_declared_order(operator.declaration, returned))
        if by_name is not None and all(isinstance(frame, DataFrame) for frame in by_name.values()):
            return list(by_name.values())
    given = _listed([str(name) for name in returned]) if isinstance(returned, Mapping) else type(returned).__name__
    raise WrongOutputs(
        f"Operator {operator.name} gives {given}, and its job has {_listed(names)} as outputs: return a DataFrame for "
        "a single output, and a dict with one for each name for several."
    )


def _in_declared_order(declaration: Declaration, returned: Mapping[str, Any]) -> dict[str, Any]:
    """A dict may be filled in any order: when names do not decide, that of the declaration does."""
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
            f"Operator {operator.name} declares {_listed(declared) if isinstance(declared, Mapping) else 'one'}, "
            f"and its job has {_listed(names)}: give the job as many outputs, in this order."
        )
    return [parsed(schema, f"output {name} of operator {operator.name}") for name, schema in by_name.items()]


def _the_only(schema: Schema, names: Sequence[str]) -> dict[str, Schema]:
    return {names[0]: schema}
