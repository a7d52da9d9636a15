"""Active contracts in a range of blocks, on Spark. See README.md in this folder for how to run it."""

from __future__ import annotations

from pyspark.sql import DataFrame, functions

from interlock.spark import TaskContext, TaskFailed, operator

LOGS = "block_number bigint not null, address string not null, topic0 string"
ACTIVITY = """
    address string not null, logs bigint not null, kinds bigint not null,
    first_block bigint not null, last_block bigint not null
"""


@operator(inputs={"logs": LOGS}, output=ACTIVITY)
def contract_activity(logs: DataFrame, ctx: TaskContext) -> DataFrame:
    """Returns a row for each contract with at least `min_logs` logs. `min_logs` is set in the job's config."""
    least = ctx.config.get("min_logs", 1)
    if not isinstance(least, int):
        raise TaskFailed(f"min_logs is {least!r}: write an integer", "BadConfig")
    active = logs.groupBy("address").agg(
        functions.count(functions.lit(1)).alias("logs"),
        functions.countDistinct("topic0").alias("kinds"),
        functions.min("block_number").alias("first_block"),
        functions.max("block_number").alias("last_block"),
    )
    return active.filter(functions.col("logs") >= least).orderBy(functions.desc("logs"), "address")
