"""Spark operators of a daily pipeline, examples/dags/daily.yaml: each task stands for one day."""

from __future__ import annotations

from pyspark.sql import DataFrame, functions

from interlock.spark import TaskContext, operator

SALES = "sold_at timestamp not null, product string not null, gross decimal(12,2) not null, net decimal(12,2) not null"


@operator(inputs={}, output=SALES)
def enrich(ctx: TaskContext) -> DataFrame:
    """Returns the orders of the task's day with their net amounts.

    A real job would read them here, for example with `ctx.spark.read.jdbc(...)`, and keep those of the day with
    `ctx.in_interval(orders, "sold_at")`. The shop of this example sells the same number of orders in each hour.
    """
    orders = ctx.in_interval(_shop(ctx), "sold_at")
    return orders.withColumn("net", (functions.col("gross") / 1.19).cast("decimal(12,2)"))


def _shop(ctx: TaskContext) -> DataFrame:
    """Returns the orders around the task's day."""
    seconds = 3600 // int(ctx.config.get("orders_per_hour", 20))
    start, end = (int(moment.timestamp()) for moment in (ctx.interval.start, ctx.interval.end))
    order = ctx.spark.range(start - 86_400, end + 86_400, seconds)
    number = (functions.col("id") / seconds).cast("long")
    return order.select(
        functions.timestamp_seconds("id").alias("sold_at"),
        functions.concat(functions.lit("product-"), number % 7).alias("product"),
        ((number % 100) + 1).cast("decimal(12,2)").alias("gross"),
    )


@operator(inputs={"sales": SALES}, output="product string not null, orders bigint not null, revenue decimal(18,2)")
def by_product(sales: DataFrame, ctx: TaskContext) -> DataFrame:
    """Returns the orders and the revenue of each product in the task's day or month."""
    ctx.progress(0.1, f"adding up {ctx.interval}")
    return sales.groupBy("product").agg(
        functions.count(functions.lit(1)).alias("orders"),
        functions.sum("net").cast("decimal(18,2)").alias("revenue"),
    )
