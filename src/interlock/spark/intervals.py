"""Filters the rows of a DataFrame by the time that a task stands for."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from pyspark.sql import functions
from pyspark.sql.types import DateType, TimestampNTZType, TimestampType

from interlock.spark.columns import quoted
from interlock.workers.context import TaskFailed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from interlock.calendars import Interval


def in_interval(frame: DataFrame, column: str, interval: Interval) -> DataFrame:
    """Returns the rows whose time lies in the interval. The filter is pushed down to Parquet files.

    Dates, and timestamps without a time zone, are taken as local to the time zone of the interval.
    """
    kind, start, end = frame.schema[column].dataType, interval.start, interval.end
    value = functions.col(quoted(column))
    if isinstance(kind, TimestampType):
        return frame.filter((value >= functions.lit(start)) & (value < functions.lit(end)))
    if isinstance(kind, TimestampNTZType):
        first, last = (functions.lit(f"{one:%Y-%m-%d %H:%M:%S}").cast(kind) for one in (start, end))
        return frame.filter((value >= first) & (value < last))
    if isinstance(kind, DateType):
        last_day = (end - timedelta(seconds=1)).date()
        return frame.filter(value.between(functions.lit(start.date()), functions.lit(last_day)))
    raise TaskFailed(
        f"Column {column} has type {kind.simpleString()}, which is neither a date nor a timestamp: cast it first, for "
        "example with to_timestamp.",
        "WrongColumns",
    )
