"""`parquet_compact`: the files of a range as one, in order."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from pyspark.sql import DataFrame

from interlock.pipeline.built_in.configuring import column, only_input, read_config, require_columns
from interlock.pipeline.context import TaskContext
from interlock.pipeline.operators import operator
from interlock.schemas import HOT_RANGE_COLUMN


class CompactConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sort_by: list[str] | None = None
    """Unset: by the column that says where in a range a row belongs. Empty: in no order."""


@operator()
def parquet_compact(inputs: Mapping[str, DataFrame], ctx: TaskContext) -> DataFrame:
    """The same rows, in the order that lets readers skip most of a file."""
    config = read_config(ctx, CompactConfig)
    frame = only_input(inputs, ctx)
    sort_by = _range_columns(frame, ctx) if config.sort_by is None else config.sort_by
    require_columns(frame, sort_by, "sort_by")
    if not sort_by:
        return frame
    # The output is one file, written by one task. Sorted there and not before, no merge of sorted parts can lose the
    # order, and what does not fit into memory is spilled.
    return frame.coalesce(1).sortWithinPartitions(*map(column, sort_by))


def _range_columns(frame: DataFrame, ctx: TaskContext) -> list[str]:
    registered = ctx.data.inputs[0].schema if ctx.data.inputs else None
    name = registered.range_column if registered is not None else HOT_RANGE_COLUMN
    return [name] if name is not None and name in frame.columns else []
