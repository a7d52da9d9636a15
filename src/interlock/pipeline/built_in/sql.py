"""`sql`: one SELECT over the job's inputs.

The text passes the gate first; then Spark's own analysis must have found nothing but the inputs. They are relations of
this query alone, under names that nobody else has: other tasks of the session neither see them nor are seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Final
from uuid import uuid4

from msgspec import Meta, Struct
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession

from interlock.pipeline.built_in.configuring import read_config, require_distinct
from interlock.pipeline.built_in.sql_gate import UnsafeQuery, checked
from interlock.pipeline.context import TaskContext
from interlock.pipeline.failures import BadConfig
from interlock.pipeline.operators import operator

_LEAVES: Final = frozenset({"OneRowRelation", "LocalRelation", "Range", "CTERelationRef"})
"""Of an analysed plan, beside the inputs."""
_REACHING: Final = frozenset({"View", "ScriptTransformation"})
"""Other views may lead to anything."""
_AROUND: Final = re.compile(r"^\[[A-Z0-9_.]+\] |\s*SQLSTATE: .*|; line \d+ pos \d+.*")


class SqlConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    query: Annotated[str, Meta(min_length=1)]
    """A SELECT over the inputs, by their names."""


@operator()
def sql(inputs: Mapping[str, DataFrame], ctx: TaskContext) -> DataFrame:
    """What the query selects. Filters and columns go down to the files, as if the operator had been written by hand."""
    return selected(ctx.spark, read_config(ctx, SqlConfig).query, inputs)


def selected(spark: SparkSession, text: str, inputs: Mapping[str, DataFrame]) -> DataFrame:
    """What a statement selects of these relations, after both checks. Raises UnsafeQuery and BadConfig."""
    require_distinct(list(inputs), "The query")
    query = checked(text, inputs)
    try:
        return _connected(spark, query, inputs) if _is_remote(spark) else _local(spark, query, inputs)
    except (AnalysisException, ParseException) as error:
        raise BadConfig(f"The query cannot be run: {_sentence(error)}") from None


def _is_remote(spark: SparkSession) -> bool:
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def _connected(spark: SparkSession, query: str, inputs: Mapping[str, DataFrame]) -> DataFrame:
    """The DataFrames travel with the query, and no view is made. There, the gate alone decides."""
    names = {name: f"input_{index}" for index, name in enumerate(inputs)}
    text = _over(query.replace("{", "{{").replace("}", "}}"), {name: f"{{{names[name]}}}" for name in inputs})
    frames: dict[str, Any] = {names[name]: inputs[name] for name in inputs}
    frame = spark.sql(text, **frames)
    _ = frame.schema  # what is wrong shows here
    return frame


def _local(spark: SparkSession, query: str, inputs: Mapping[str, DataFrame]) -> DataFrame:
    with _views(spark, inputs) as views:
        frame = spark.sql(_over(query, {name: f"`{view}`" for name, view in views.items()}))
        _check_plan(_plan(frame), frozenset(views.values()))
    return frame


@contextmanager
def _views(spark: SparkSession, inputs: Mapping[str, DataFrame]) -> Iterator[dict[str, str]]:
    """Names by input. A query is analysed when it is given, so its views need not stay."""
    views = {name: f"interlock_{uuid4().hex}" for name in inputs}
    try:
        for name, view in views.items():
            inputs[name].createTempView(view)
        yield views
    finally:
        for view in views.values():
            spark.catalog.dropTempView(view)


def _over(query: str, sources: Mapping[str, str]) -> str:
    if not sources:
        return query
    named = ", ".join(f"`{name}` AS (TABLE {source})" for name, source in sources.items())
    return f"WITH {named} SELECT * FROM ({query})"  # noqa: S608 - it has passed the gate


# What Spark made of it


def _plan(frame: DataFrame) -> Any:
    """Of the JVM; it has no types here."""
    return frame._jdf.queryExecution().analyzed()


def _check_plan(plan: Any, views: frozenset[str]) -> None:
    """Nothing but the inputs is read, whatever the text looked like."""
    kind = plan.getClass().getSimpleName()
    if kind == "View" and plan.desc().identifier().table() in views:
        return
    below = [*_each(plan.children()), *_each(plan.subqueries())]
    if (not below and kind not in _LEAVES) or kind in _REACHING or kind.endswith("Command"):
        raise UnsafeQuery(f"The query reads something else than its inputs ({kind}): name the job's inputs only.")
    for one in below:
        _check_plan(one, views)


def _each(sequence: Any) -> list[Any]:
    return [sequence.apply(index) for index in range(sequence.size())]


def _sentence(error: AnalysisException | ParseException) -> str:
    """Without Spark's plan and numbers, and without places in a text that the user has not written."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return _AROUND.sub("", line)
