"""`block_ingest`: a range of a chain, read over JSON-RPC by Spark's executors.

The rows are those that `block_follower` writes. All outputs come from one reading, so that they are of one branch.
"""

from __future__ import annotations

from typing import cast

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from interlock.pipeline.built_in.chain_rows import ChainMoved, Source, answered, whole_blocks
from interlock.pipeline.built_in.configuring import read_config
from interlock.pipeline.built_in.endpoint_config import EndpointConfig, source_of
from interlock.pipeline.context import Scope, TaskContext
from interlock.pipeline.failures import BadConfig, NoScope
from interlock.pipeline.follower.config import KINDS, Kind
from interlock.pipeline.operators import operator


class IngestConfig(EndpointConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    outputs: list[Kind] | None = None
    """What each output of the job holds, in their order; unset: what their names say."""


@operator(inputs={})
def block_ingest(ctx: TaskContext) -> dict[str, DataFrame]:
    """Blocks, transactions and logs of the task's range: that of its input, or of its payload."""
    config = read_config(ctx, IngestConfig)
    kinds = _kinds(config, [output.name for output in ctx.data.outputs])
    if config.rpc_url is None:
        raise BadConfig("block_ingest needs rpc_url, such as http://127.0.0.1:8545.")
    if ctx.scope is None:
        raise NoScope(
            "Nothing says which blocks are wanted: give the job an input of ranges, or trigger it with a payload like "
            '{"start": 0, "end": 99}.'
        )
    source = source_of(config, config.rpc_url, ctx)
    read = answered(ctx.spark, source, ctx.scope, whole_blocks(list(kinds.values())))
    _check_links(read, source, ctx.scope)
    return {name: read.select(F.inline(kind)) for name, kind in kinds.items()}


def _kinds(config: IngestConfig, names: list[str]) -> dict[str, Kind]:
    """What each output holds."""
    if config.outputs is None:
        kinds = {name: cast("Kind", name) for name in names or KINDS}
        if unknown := [name for name in kinds if name not in KINDS]:
            raise BadConfig(
                f"Output {unknown[0]!r} is neither blocks, transactions nor logs: call it so, or say in the config "
                "what each output holds, such as `outputs: [blocks, logs]`."
            )
        return kinds
    if len(set(config.outputs)) != len(config.outputs) or len(config.outputs) != len(names or config.outputs):
        raise BadConfig(
            f"The job has {len(names)} outputs and its config tells of {', '.join(config.outputs) or 'none'}: name "
            "blocks, transactions or logs for each, once and in their order."
        )
    return dict(zip(names or config.outputs, config.outputs, strict=True))


def _check_links(read: DataFrame, source: Source, scope: Scope) -> None:
    """Within a batch, blocks were checked when they came. Here the ends of batches are held against each other."""
    place = (F.col("block_number") - F.lit(scope.start)) % F.lit(source.batch)
    blocks = read.select(F.inline("blocks")).select("block_number", "block_hash", "parent_hash")
    ends = {row.block_number: row for row in blocks.where(place.isin(0, source.batch - 1)).collect()}
    for first in range(scope.start + source.batch, scope.end + 1, source.batch):
        if ends[first].parent_hash != ends[first - 1].block_hash:
            raise ChainMoved(
                f"Block {first} is no child of block {first - 1} as it was read a moment before: the chain changed "
                "meanwhile. Another attempt reads it again."
            )
