"""`sql`: runs one SELECT over the job's inputs.

The gate checks the plan that Spark's parser returns, and that same plan runs, wrapped in CTEs for the inputs. The text
is not parsed twice, and no input is registered in a catalog where other tasks could see it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from interlock.spark.built_in.config import read_config, require_distinct
from interlock.spark.built_in.sql_gate import checked, first_sentence
from interlock.spark.context import TaskContext
from interlock.spark.operators import operator
from interlock.workers.failures import BadConfig


class SqlConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    query: Annotated[str, Meta(min_length=1)]
    """A SELECT that refers to the inputs by their names."""


@operator()
def sql(inputs: Mapping[str, DataFrame], ctx: TaskContext) -> DataFrame:
    """Returns the rows of the query. Spark pushes filters and columns down to the files."""
    return selected(ctx.spark, read_config(ctx, SqlConfig).query, inputs)


def selected(spark: SparkSession, text: str, inputs: Mapping[str, DataFrame]) -> DataFrame:
    """Returns the rows that a statement selects from these relations. Raises UnsafeQuery or BadConfig."""
    if type(spark).__module__.startswith("pyspark.sql.connect."):
        raise BadConfig(
            "A query cannot run with Spark Connect, because its plan cannot be checked before the server analyses it: "
            "run this job on a Spark worker that has spark_master set instead of spark_remote."
        )
    require_distinct(list(inputs), "The query")
    plan = checked(spark, text, {name: frame.schema for name, frame in inputs.items()})
    try:
        return _frame(spark, plan, inputs)
    except AnalysisException as error:
        raise BadConfig(f"The query cannot be run: {first_sentence(error)}") from None
    except Py4JJavaError as error:
        # An overflowing stack, too many passes, or an internal error of Spark's analyser: all follow from the query.
        raise BadConfig(f"The query cannot be run: {first_sentence(error.java_exception)}") from None


def _frame(spark: SparkSession, plan: Any, inputs: Mapping[str, DataFrame]) -> DataFrame:
    """Wraps the plan in CTEs for the inputs. Typed Any because the JVM's classes have no Python types."""
    jvm: Any = spark._jvm
    logical = jvm.org.apache.spark.sql.catalyst.plans.logical
    none = jvm.scala.Option.empty()
    definitions = jvm.java.util.ArrayList()
    for name, frame in inputs.items():
        alias = logical.SubqueryAlias(jvm.org.apache.spark.sql.catalyst.AliasIdentifier(name), frame._jdf.logicalPlan())
        definitions.add(jvm.scala.Tuple3(name, alias, none))
    named = jvm.scala.jdk.javaapi.CollectionConverters.asScala(definitions).toSeq()
    wrapped = logical.UnresolvedWith(plan, named, False)
    classic: Any = spark
    return DataFrame(jvm.org.apache.spark.sql.classic.Dataset.ofRows(classic._jsparkSession, wrapped), spark)
