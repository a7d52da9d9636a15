"""What the job's config says, checked before anything is asked of anybody."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from interlock.pipeline.failures import BadConfig
from interlock.pipeline.placeholders import Placeholders

Kind = Literal["blocks", "transactions", "logs"]
KINDS: Final[tuple[Kind, ...]] = ("blocks", "transactions", "logs")

_OF_THE_EXCHANGE: Final = frozenset(
    {"accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "proxy-authorization"}
    | {"proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers that say how the exchange goes, which is not the job's to say."""

Seconds = Annotated[float, Meta(gt=0, le=3600)]
BlockNumber = Annotated[int, Meta(ge=0, le=2**53)]


class FollowerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rpc_url: str
    """http:// or https://, with `${secret:NAME}` for a secret of the org."""
    headers: dict[str, str] = {}
    """Sent with every request; with `${secret:NAME}` as above."""
    outputs: list[Kind] | None = None
    """What each output of the job holds, in their order; unset: blocks, transactions, logs."""
    start_block: BlockNumber = 0
    end_block: BlockNumber | None = None
    """The last one to take: the follower then returns. Unset: it follows for ever."""
    batch_size: Annotated[int, Meta(ge=1, le=2_000)] = 50
    """Blocks that are asked for, and written, at once."""
    requests: Annotated[int, Meta(ge=1, le=32)] = 3
    """Batches that are asked for at the same time."""
    confirmations: Annotated[int, Meta(ge=0, le=100_000)] = 0
    """Blocks younger than this many are left for later."""
    poll_seconds: Seconds = 1.0
    """Between two looks at a chain that has nothing new."""
    keep_hashes: Annotated[int, Meta(ge=1, le=20_000)] = 256
    """How many blocks deep a reorg may be."""
    rpc_timeout_seconds: Seconds = 30.0
    """For one request."""
    rpc_patience_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 120.0
    """How long an endpoint that does not answer is asked again before the attempt fails."""


def read_config(given: Mapping[str, Any], outputs: int, keys: Placeholders) -> FollowerConfig:
    """The config with its keys filled in, and with the kind of each of the job's outputs."""
    try:
        config = msgspec.convert(dict(given), FollowerConfig)
    except msgspec.ValidationError as error:
        raise BadConfig(f"The config of block_follower is wrong: {error}. See docs/block-follower.md.") from None
    if config.end_block is not None and config.end_block < config.start_block:
        raise BadConfig(f"end_block {config.end_block} is before start_block {config.start_block}.")
    kinds = _kinds(config, outputs)
    url = keys.fill(config.rpc_url, "rpc_url")
    if not re.match(r"https?://[^/?#@\s]+([/?][^\s#]*)?$", url):
        raise BadConfig("rpc_url must look like http://host:port/path or https://host/path; credentials go to headers.")
    headers = {name: keys.fill(value, f"headers.{name}") for name, value in config.headers.items()}
    for name, value in headers.items():
        check_header(name, value)
    return msgspec.structs.replace(config, rpc_url=url, headers=headers, outputs=kinds)


def check_header(name: str, value: str) -> None:
    """Raises BadConfig."""
    if not re.fullmatch(r"[A-Za-z0-9-]+", name) or not value.isascii() or not value.isprintable():
        raise BadConfig(f"Header {name!r} cannot be sent: a name has letters, digits and -, a value plain text.")
    if name.lower() in _OF_THE_EXCHANGE:
        raise BadConfig(f"Header {name!r} is not for a job to set: leave it out.")


def _kinds(config: FollowerConfig, outputs: int) -> list[Kind]:
    kinds = list(KINDS) if config.outputs is None else config.outputs
    if len(kinds) != outputs or len(set(kinds)) != len(kinds) or not kinds:
        raise BadConfig(
            f"The job has {outputs} outputs and its config tells of {', '.join(kinds) or 'none'}: say what they hold, "
            "each once and in their order, such as `outputs: [blocks, logs]` in the config."
        )
    return kinds
