"""Which contracts were active in a range of blocks, on Spark. README.md beside this file says how to run it."""

from __future__ import annotations

from pyspark.sql import DataFrame, functions

from interlock.pipeline import TaskContext, TaskFailed, operator

LOGS = "block_number bigint not null, address string not null, topic0 string"
ACTIVITY = """
    address string not null, logs bigint not null, kinds bigint not null,
    first_block bigint not null, last_block bigint not null
"""


@operator(inputs={"logs": LOGS}, output=ACTIVITY)
def contract_activity(logs: DataFrame, ctx: TaskContext) -> DataFrame:
    """A row for each contract with at least `min_logs` logs, as the job's config says."""
    least = ctx.config.get("min_logs", 1)
    if not isinstance(least, int):
        raise TaskFailed(f"min_logs is {least!r}: write a whole number", "BadConfig")
    active = logs.groupBy("address").agg(
        functions.count(functions.lit(1)).alias("logs"),
        functions.countDistinct("topic0").alias("kinds"),
        functions.min("block_number").alias("first_block"),
        functions.max("block_number").alias("last_block"),
    )
    return active.filter(functions.col("logs") >= least).orderBy(functions.desc("logs"), "address")
