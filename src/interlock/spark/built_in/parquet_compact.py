"""`parquet_compact`: merges the files of a range into one sorted file."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from pyspark.sql import DataFrame

from interlock.schemas import HOT_RANGE_COLUMN
from interlock.spark.built_in.config import column, only_input, read_config, require_columns
from interlock.spark.context import TaskContext
from interlock.spark.operators import operator


class CompactConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sort_by: list[str] | None = None
    """Columns to sort by. Unset: the dataset's range column. Empty: no sort."""


@operator()
def parquet_compact(inputs: Mapping[str, DataFrame], ctx: TaskContext) -> DataFrame:
    """Returns the same rows, sorted so that readers can skip most of a file."""
    config = read_config(ctx, CompactConfig)
    frame = only_input(inputs, ctx)
    sort_by = _range_columns(frame, ctx) if config.sort_by is None else config.sort_by
    require_columns(frame, sort_by, "sort_by")
    if not sort_by:
        return frame
    # One task writes the output as one file. Sorting in that task, and not before it, keeps the order that merging
    # sorted parts could lose. Spark spills rows that do not fit into memory.
    return frame.coalesce(1).sortWithinPartitions(*map(column, sort_by))


def _range_columns(frame: DataFrame, ctx: TaskContext) -> list[str]:
    registered = ctx.data.inputs[0].schema if ctx.data.inputs else None
    name = registered.range_column if registered is not None else HOT_RANGE_COLUMN
    return [name] if name is not None and name in frame.columns else []
