"""What a job's config says to a built-in operator, checked before anything is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from interlock.pipeline.context import TaskContext
from interlock.pipeline.failures import BadConfig, WrongInputs

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

T = TypeVar("T", bound=msgspec.Struct)


def read_config(ctx: TaskContext, kind: type[T]) -> T:
    """Raises BadConfig, also for settings that the operator does not have."""
    try:
        return msgspec.convert(ctx.config, kind)
    except msgspec.ValidationError as error:
        raise BadConfig(f"The config of {ctx.operator} is wrong: {error}. See docs/built-in-operators.md.") from None


def only_input(inputs: Mapping[str, DataFrame], ctx: TaskContext) -> DataFrame:
    """For operators that take one input, whatever its name."""
    if len(inputs) != 1:
        raise WrongInputs(
            f"{ctx.operator} takes one input, and this job has {len(inputs)} ({', '.join(inputs) or 'none'}): "
            "give each a job of its own, or bring them together with the operator sql first."
        )
    return next(iter(inputs.values()))


def require_columns(frame: DataFrame, names: Iterable[str], setting: str) -> None:
    """Capitals count, as in `where`."""
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise BadConfig(
            f"{setting} names {', '.join(map(repr, missing))}, and the input has no such column. "
            f"It has {', '.join(frame.columns) or 'none'}."
        )


def require_distinct(names: Sequence[str], what: str) -> None:
    """As Spark sees it, to which capitals are the same letters."""
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            raise BadConfig(f"{what} would have the column {name!r} twice: give one of them another name.")
        seen.add(name.lower())


def column(name: str) -> Column:
    """By its exact name: a dot in it is no path."""
    from pyspark.sql import functions as F  # noqa: PLC0415, N812 - Spark is loaded when it is needed

    return F.col("`" + name.replace("`", "``") + "`")
