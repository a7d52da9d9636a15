"""`rollup`: aggregates rows by time bucket and key.

Each task aggregates its own range, so a bucket that spans several ranges has a row in each. Readers merge the rows of a
bucket with `sum`, `min`, `max` or `hll_union_agg`; every measure allows that. An average does not, so there is none:
use a sum and a count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct, field
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - PySpark's usual alias
from pyspark.sql.types import BinaryType, DecimalType, IntegralType, NumericType, StringType, TimestampType

from interlock.spark.built_in.config import column, only_input, read_config, require_columns, require_distinct
from interlock.spark.context import TaskContext
from interlock.spark.operators import operator
from interlock.workers.failures import BadConfig

BUCKET: Final = "bucket"
_SECONDS: Final = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400, "week": 7 * 86_400}
_MICROSECONDS: Final = 1_000_000
_MONDAY: Final = 4 * 86_400 * _MICROSECONDS
"""The first Monday after the epoch, which was a Thursday."""
_LONGEST: Final = 366 * 86_400

_bucket = re.compile(r"(?:([1-9][0-9]{0,8}) )?(second|minute|hour|day|week)s?")
_measure = re.compile(r"(count|sum|min|max|distinct_sketch)(?:\((.+)\))?", re.DOTALL)


class RollupConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    bucket: str
    """`hour`, `day`, `week`, `15 minutes`. In UTC; weeks start on Monday."""
    time_column: str = "block_timestamp"
    """A timestamp, or a whole number of seconds since 1970."""
    keys: list[str] = []
    measures: Annotated[dict[str, str], Meta(min_length=1)] = field(default_factory=lambda: {"rows": "count"})
    """Column name to `count`, `count(x)`, `sum(x)`, `min(x)`, `max(x)` or `distinct_sketch(x)`."""
    range_column: str | None = None
    """Adds `first_…` and `last_…` of this column, so that the rows of a bucket can be located in the range."""


@operator()
def rollup(inputs: Mapping[str, DataFrame], ctx: TaskContext) -> DataFrame:
    """Returns one row per time bucket and combination of keys."""
    config = read_config(ctx, RollupConfig)
    size, offset = _size(config.bucket)
    frame = only_input(inputs, ctx)
    require_columns(frame, [config.time_column], "time_column")
    require_columns(frame, config.keys, "keys")
    measures = [_measured(frame, name, text).alias(name) for name, text in config.measures.items()]
    measures += _reach(frame, config.range_column)
    reach = [] if config.range_column is None else [f"first_{config.range_column}", f"last_{config.range_column}"]
    require_distinct([BUCKET, *config.keys, *config.measures, *reach], "The rollup")
    # Arithmetic on microseconds, because `date_trunc` depends on the session's time zone.
    moment = _microseconds(frame, config.time_column)
    start = F.timestamp_micros(moment - F.pmod(moment - F.lit(offset), F.lit(size)))
    return frame.groupBy(start.alias(BUCKET), *map(column, config.keys)).agg(*measures)


def _reach(frame: DataFrame, range_column: str | None) -> list[Column]:
    if range_column is None:
        return []
    require_columns(frame, [range_column], "range_column")
    value = column(range_column)
    return [F.min(value).alias(f"first_{range_column}"), F.max(value).alias(f"last_{range_column}")]


# Buckets


def _size(text: str) -> tuple[int, int]:
    """Returns the length of a bucket and the start of the first one, both in microseconds."""
    found = _bucket.fullmatch(text)
    seconds = int(found[1] or 1) * _SECONDS[found[2]] if found else 0
    if found is None or seconds > _LONGEST:
        raise BadConfig(
            f"bucket must be a duration of at most 366 days, such as hour, day, week or 15 minutes, got {text!r}."
        )
    return seconds * _MICROSECONDS, _MONDAY if found[2] == "week" else 0


def _microseconds(frame: DataFrame, name: str) -> Column:
    kind = frame.schema[name].dataType
    if isinstance(kind, TimestampType):
        return F.unix_micros(column(name))
    if isinstance(kind, IntegralType) or (isinstance(kind, DecimalType) and kind.scale == 0):
        return column(name).cast("bigint") * F.lit(_MICROSECONDS)
    raise BadConfig(
        f"time_column {name!r} has type {kind.simpleString()}: it must be a timestamp, or an integer number of seconds "
        "since 1970."
    )


# Measures


def _measured(frame: DataFrame, name: str, text: str) -> Column:
    found = _measure.fullmatch(text.strip())
    if found is None or (found[2] is None and found[1] != "count"):
        raise BadConfig(
            f"measure {name!r} must be count, count(column), sum(column), min(column), max(column) or "
            f"distinct_sketch(column), got {text!r}."
        )
    if found[2] is None:
        return F.count(F.lit(1))
    require_columns(frame, [found[2]], f"measure {name!r}")
    return _aggregate(frame, found[1], found[2], name)


def _aggregate(frame: DataFrame, function: str, source: str, name: str) -> Column:
    kind, value = frame.schema[source].dataType, column(source)
    match function:
        case "count":
            return F.count(value)
        case "sum":
            if not isinstance(kind, NumericType):
                raise BadConfig(
                    f"measure {name!r} sums {source!r}, which has type {kind.simpleString()}: sum needs a numeric "
                    "column."
                )
            # An overflowing sum becomes null: one absurd token must not fail the rollup of all others.
            return F.try_sum(value)
        case "distinct_sketch":
            counted = isinstance(kind, IntegralType | StringType | BinaryType)
            return F.hll_sketch_agg(value if counted else value.cast("string"))
        case _:
            return F.min(value) if function == "min" else F.max(value)
