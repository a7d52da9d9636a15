"""`dedupe`: keeps one row per key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - PySpark's usual alias
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, VariantType

from interlock.spark.built_in.config import column, only_input, read_config, require_columns
from interlock.spark.context import TaskContext
from interlock.spark.operators import operator

_PLACE: Final = "__interlock_place"


class DedupeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: Annotated[list[str], Meta(min_length=1)]
    """Columns that identify a row. Two nulls are equal."""
    order_by: list[str] = []
    """Columns that order the rows of one key. Nulls always come last, whichever row is kept."""
    keep: Literal["first", "last"] = "last"


@operator()
def dedupe(inputs: Mapping[str, DataFrame], ctx: TaskContext) -> DataFrame:
    """Returns the last or first row of each key, by `order_by`."""
    config = read_config(ctx, DedupeConfig)
    frame = only_input(inputs, ctx)
    require_columns(frame, config.key, "key")
    require_columns(frame, config.order_by, "order_by")
    place = F.row_number().over(Window.partitionBy(*map(column, config.key)).orderBy(*_order(frame, config)))
    return frame.withColumn(_PLACE, place).where(column(_PLACE) == 1).drop(_PLACE)


def _order(frame: DataFrame, config: DedupeConfig) -> list[Column]:
    """Breaks ties of `order_by` by the other columns: two runs over the same rows must keep the same rows."""
    types = {field.name: field.dataType for field in frame.schema.fields}
    others = [name for name in frame.columns if name not in {*config.key, *config.order_by}]
    columns = [_orderable(name, types[name]) for name in [*config.order_by, *others]]
    if config.keep == "last":
        return [one.desc_nulls_last() for one in columns] or [F.lit(0).asc()]
    return [one.asc_nulls_last() for one in columns] or [F.lit(0).asc()]


def _orderable(name: str, kind: DataType) -> Column:
    """Returns an expression to sort by. Spark cannot order maps and variants, so these are sorted as JSON."""
    return F.to_json(F.struct(column(name))) if _has_no_order(kind) else column(name)


def _has_no_order(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        return _has_no_order(kind.elementType)
    if isinstance(kind, StructType):
        return any(_has_no_order(field.dataType) for field in kind.fields)
    return isinstance(kind, MapType | VariantType)
