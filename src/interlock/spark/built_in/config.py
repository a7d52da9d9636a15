"""Reads and checks the config of built-in operators, before any data is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from interlock.spark.context import TaskContext
from interlock.workers.failures import BadConfig, WrongInputs

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

T = TypeVar("T", bound=msgspec.Struct)


def read_config(ctx: TaskContext, kind: type[T]) -> T:
    """Returns the config of the job. Raises BadConfig, also for fields that the operator does not have."""
    try:
        return msgspec.convert(ctx.config, kind)
    except msgspec.ValidationError as error:
        raise BadConfig(f"The config of {ctx.operator} is invalid: {error}. See docs/built-in-operators.md.") from None


def only_input(inputs: Mapping[str, DataFrame], ctx: TaskContext) -> DataFrame:
    """Returns the only input, whatever its name. Raises WrongInputs if the job has none or several."""
    if len(inputs) != 1:
        raise WrongInputs(
            f"{ctx.operator} takes exactly one input, but this job has {len(inputs)} ({', '.join(inputs) or 'none'}): "
            "use one job per input, or combine the inputs with the operator sql first."
        )
    return next(iter(inputs.values()))


def require_columns(frame: DataFrame, names: Iterable[str], setting: str) -> None:
    """Raises BadConfig if a column is missing. Names are case-sensitive, as in `where`."""
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise BadConfig(
            f"{setting} names {', '.join(map(repr, missing))}, but the input has no such column. "
            f"Columns of the input: {', '.join(frame.columns) or 'none'}."
        )


def require_distinct(names: Sequence[str], what: str) -> None:
    """Raises BadConfig if a name occurs twice. Case is ignored, as Spark does."""
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise BadConfig(f"{what} would have the column {name!r} twice: give one of them another name.")
        seen.add(name.lower())


def column(name: str) -> Column:
    """Returns the column with exactly this name: a dot in it is not a path."""
    from pyspark.sql import functions as F  # noqa: PLC0415, N812 - loads Spark only when it is needed

    return F.col("`" + name.replace("`", "``") + "`")
