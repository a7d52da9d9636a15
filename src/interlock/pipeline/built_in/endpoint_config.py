"""How built-in operators are told of an RPC endpoint: in the words of block_follower's config."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from interlock.outbound.sending import Request
from interlock.pipeline.built_in.chain_rows import Source
from interlock.pipeline.context import TaskContext
from interlock.pipeline.follower.config import Seconds
from interlock.pipeline.follower.config import read_config as read_follower_config
from interlock.pipeline.placeholders import Placeholders


class EndpointConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rpc_url: str | None = None
    headers: dict[str, str] = {}
    batch_size: Annotated[int, Meta(ge=1, le=2_000)] = 50
    """Blocks that are asked for at once."""
    requests: Annotated[int, Meta(ge=1, le=256)] = 4
    """Batches that are asked for at the same time, if there are as many cores."""
    rpc_timeout_seconds: Seconds = 30.0
    rpc_patience_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 120.0


def source_of(config: EndpointConfig, rpc_url: str, ctx: TaskContext) -> Source:
    """With its keys filled in, as for the follower. Raises BadConfig."""
    keys = Placeholders.of(ctx)
    filled = read_follower_config({"rpc_url": rpc_url, "headers": config.headers, "outputs": ["blocks"]}, 1, keys)
    return Source(
        asked=Request(filled.rpc_url, headers=filled.headers, bindings=keys.bindings("rpc_url", "headers")),
        outbound=ctx.outbound,
        timeout=config.rpc_timeout_seconds,
        patience=config.rpc_patience_seconds,
        batch=config.batch_size,
        parallel=config.requests,
    )
