"""`block_ingest`: reads a range of a chain over JSON-RPC on Spark's executors.

The rows have the same form as those that `block_follower` writes. All outputs come from one read, so that they belong
to one branch of the chain.
"""

from __future__ import annotations

from typing import cast

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - PySpark's usual alias

from interlock.spark.built_in.chain_rows import ChainMoved, EndpointConfig, Source, answered, source_of, whole_blocks
from interlock.spark.built_in.config import read_config
from interlock.spark.context import Scope, TaskContext
from interlock.spark.operators import operator
from interlock.workers.block_follower.config import KINDS, Kind
from interlock.workers.failures import BadConfig, NoScope


class IngestConfig(EndpointConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    outputs: list[Kind] | None = None
    """Kind of rows of each output of the job, in order. Unset: each output is named after its kind."""


@operator(inputs={})
def block_ingest(ctx: TaskContext) -> dict[str, DataFrame]:
    """Reads blocks, transactions and logs of the task's range, which its input or its payload gives."""
    config = read_config(ctx, IngestConfig)
    kinds = _kinds(config, [output.name for output in ctx.data.outputs])
    if config.rpc_url is None:
        raise BadConfig("block_ingest needs rpc_url in its config, such as http://127.0.0.1:8545.")
    if ctx.scope is None:
        raise NoScope(
            "block_ingest has no range of blocks: give the job an input with ranges, or trigger it with a payload such "
            'as {"start": 0, "end": 99}.'
        )
    source = source_of(config, config.rpc_url, ctx)
    read = answered(ctx.spark, source, ctx.scope, whole_blocks(list(kinds.values())))
    _check_links(read, source, ctx.scope)
    return {name: read.select(F.inline(kind)) for name, kind in kinds.items()}


def _kinds(config: IngestConfig, names: list[str]) -> dict[str, Kind]:
    """Returns the kind of rows of each output."""
    if config.outputs is None:
        kinds = {name: cast("Kind", name) for name in names or KINDS}
        if unknown := [name for name in kinds if name not in KINDS]:
            raise BadConfig(
                f"Output {unknown[0]!r} is not named blocks, transactions or logs: rename it, or list the kind of each "
                "output in the config, such as `outputs: [blocks, logs]`."
            )
        return kinds
    if len(set(config.outputs)) != len(config.outputs) or len(config.outputs) != len(names or config.outputs):
        raise BadConfig(
            f"The job has {len(names)} outputs and its config lists {', '.join(config.outputs) or 'none'}: list "
            "blocks, transactions or logs for each output, each kind at most once, in the order of the outputs."
        )
    return dict(zip(names or config.outputs, config.outputs, strict=True))


def _check_links(read: DataFrame, source: Source, scope: Scope) -> None:
    """Checks that each batch continues the one before. The links within a batch were checked when it was read."""
    place = (F.col("block_number") - F.lit(scope.start)) % F.lit(source.batch)
    blocks = read.select(F.inline("blocks")).select("block_number", "block_hash", "parent_hash")
    ends = {row.block_number: row for row in blocks.where(place.isin(0, source.batch - 1)).collect()}
    for first in range(scope.start + source.batch, scope.end + 1, source.batch):
        if ends[first].parent_hash != ends[first - 1].block_hash:
            raise ChainMoved(
                f"Block {first} is not a child of the block {first - 1} that was read: the chain was reorganized "
                "during the read. The next attempt reads the range again."
            )
