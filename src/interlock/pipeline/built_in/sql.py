"""`sql`: one SELECT over the job's inputs.

The gate checks the plan as Spark's parser gives it. That very plan is run, with the inputs as CTEs around it: the text
is not parsed twice, and nothing is registered in a catalog, where other tasks could see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from interlock.pipeline.built_in.configuring import read_config, require_distinct
from interlock.pipeline.built_in.sql_gate import checked, first_sentence
from interlock.pipeline.context import TaskContext
from interlock.pipeline.failures import BadConfig
from interlock.pipeline.operators import operator


class SqlConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    query: Annotated[str, Meta(min_length=1)]
    """A SELECT over the inputs, by their names."""


@operator()
def sql(inputs: Mapping[str, DataFrame], ctx: TaskContext) -> DataFrame:
    """What the query selects. Filters and columns go down to the files, as if the operator had been written by hand."""
    return selected(ctx.spark, read_config(ctx, SqlConfig).query, inputs)


def selected(spark: SparkSession, text: str, inputs: Mapping[str, DataFrame]) -> DataFrame:
    """Returns what a statement selects of these relations. Raises UnsafeQuery and BadConfig."""
    if type(spark).__module__.startswith("pyspark.sql.connect."):
        raise BadConfig(
            "A query cannot run with Spark Connect: its plan cannot be checked before the server has analysed it. "
            "Run this job on a Spark worker that has spark_master set instead of spark_remote."
        )
    require_distinct(list(inputs), "The query")
    plan = checked(spark, text, inputs)
    try:
        return _frame(spark, plan, inputs)
    except AnalysisException as error:
        raise BadConfig(f"The query cannot be run: {first_sentence(error)}") from None


def _frame(spark: SparkSession, plan: Any, inputs: Mapping[str, DataFrame]) -> DataFrame:
    """The plan with the inputs around it. The classes of the JVM have no types here."""
    jvm: Any = spark._jvm
    logical = jvm.org.apache.spark.sql.catalyst.plans.logical
    none = jvm.scala.Option.empty()
    definitions = jvm.java.util.ArrayList()
    for name, frame in inputs.items():
        alias = logical.SubqueryAlias(jvm.org.apache.spark.sql.catalyst.AliasIdentifier(name), frame._jdf.logicalPlan())
        definitions.add(jvm.scala.Tuple3(name, alias, none))
    named = jvm.scala.jdk.javaapi.CollectionConverters.asScala(definitions).toSeq()
    whole = logical.UnresolvedWith(plan, named, False)
    classic: Any = spark
    return DataFrame(jvm.org.apache.spark.sql.classic.Dataset.ofRows(classic._jsparkSession, whole), spark)
