"""`spark_map`: runs an operator on all tasks of a claim together, as rows of one DataFrame.

    {"operator": "spark_map", "runtime": "spark", "config": {"operator": "my_module:score"}, "tasks": [...]}

    @operator(inputs={"tasks": "index bigint, payload string"}, output="index bigint, result string")
    def score(tasks: DataFrame, ctx: TaskContext) -> DataFrame: ...

Each row that the operator returns ends the task with that index. `result`, of any type, is the task's result. If the
row has a column `error` that is not null, only that task fails, with this message. An exception fails all tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession

from interlock.spark.attempt import closing_with
from interlock.spark.context import TaskContext
from interlock.spark.errors import explained
from interlock.spark.operators import Operator, resolve_declared
from interlock.workers.context import TaskFailed
from interlock.workers.failures import BadConfig, WrongOutputs
from interlock.workers.protocol import Assignment

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
