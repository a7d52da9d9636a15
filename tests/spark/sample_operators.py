"""Operators that tests use as `tests.spark.sample_operators:…`."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, functions

from interlock.spark import TaskContext, TaskFailed, operator

LOGS = "block_number bigint not null, address string, data string"
COUNTS = "block_number bigint not null, logs bigint not null"


@operator(inputs={"logs": LOGS}, output=COUNTS)
def counts(logs: DataFrame, ctx: TaskContext) -> DataFrame:
    return logs.groupBy("block_number").agg(functions.count(functions.lit(1)).alias("logs"))


@operator(inputs={"logs": LOGS}, outputs={"even": LOGS, "odd": LOGS})
def parted(logs: DataFrame, ctx: TaskContext) -> dict[str, DataFrame]:
    return {"odd": logs.filter("block_number % 2 = 1"), "even": logs.filter("block_number % 2 = 0")}


@operator()
def total(inputs: dict[str, DataFrame], ctx: TaskContext) -> Any:
    ctx.progress(0.5)
    return {name: frame.count() for name, frame in inputs.items()} | {"factor": ctx.config.get("factor")}


@operator(inputs={"logs": LOGS}, output=COUNTS)
def wrong_columns(logs: DataFrame, ctx: TaskContext) -> DataFrame:
    return logs.select("block_number", "address", functions.lit("1").alias("logs"))


@operator(inputs={"logs": LOGS}, output=LOGS)
def raising(logs: DataFrame, ctx: TaskContext) -> DataFrame:
    raise TaskFailed("not today", "NotToday")


@operator(inputs={"logs": LOGS}, output=COUNTS)
def raising_inside(logs: DataFrame, ctx: TaskContext) -> DataFrame:
    parse = functions.udf(lambda text: int(text), "bigint")  # noqa: PLW0108 - Spark needs the code of a Python function
    return logs.select("block_number", parse("data").alias("logs"))


def undecorated(logs: DataFrame, ctx: TaskContext) -> DataFrame:
    return logs
