"""`dedupe`: one row for each key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, VariantType

from interlock.pipeline.built_in.configuring import column, only_input, read_config, require_columns
from interlock.pipeline.context import TaskContext
from interlock.pipeline.operators import operator

_PLACE: Final = "__interlock_place"


class DedupeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: Annotated[list[str], Meta(min_length=1)]
    """Columns that tell rows apart. Two nulls are the same."""
    order_by: list[str] = []
    """By which rows of one key are put in order; a row without a value is never preferred to one that has it."""
    keep: Literal["first", "last"] = "last"


@operator()
def dedupe(inputs: Mapping[str, DataFrame], ctx: TaskContext) -> DataFrame:
    """Of rows with one key, the one that is last by `order_by`, or first."""
    config = read_config(ctx, DedupeConfig)
    frame = only_input(inputs, ctx)
    require_columns(frame, config.key, "key")
    require_columns(frame, config.order_by, "order_by")
    place = F.row_number().over(Window.partitionBy(*map(column, config.key)).orderBy(*_order(frame, config)))
    return frame.withColumn(_PLACE, place).where(column(_PLACE) == 1).drop(_PLACE)


def _order(frame: DataFrame, config: DedupeConfig) -> list[Column]:
    """What `order_by` leaves open, the other columns decide: two runs over the same rows must keep the same ones."""
    types = {field.name: field.dataType for field in frame.schema.fields}
    others = [name for name in frame.columns if name not in {*config.key, *config.order_by}]
    columns = [_orderable(name, types[name]) for name in [*config.order_by, *others]]
    if config.keep == "last":
        return [one.desc_nulls_last() for one in columns] or [F.lit(0).asc()]
    return [one.asc_nulls_last() for one in columns] or [F.lit(0).asc()]


def _orderable(name: str, kind: DataType) -> Column:
    """Spark has no order for maps and variants: their text has one."""
    return F.to_json(F.struct(column(name))) if _has_no_order(kind) else column(name)


def _has_no_order(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        return _has_no_order(kind.elementType)
    if isinstance(kind, StructType):
        return any(_has_no_order(field.dataType) for field in kind.fields)
    return isinstance(kind, MapType | VariantType)
