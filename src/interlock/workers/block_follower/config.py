"""The config of a job that runs `block_follower`, checked before any request is sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from interlock.workers.failures import BadConfig
from interlock.workers.operator_requests import Placeholders

Kind = Literal["blocks", "transactions", "logs"]
KINDS: Final[tuple[Kind, ...]] = ("blocks", "transactions", "logs")

_OF_THE_EXCHANGE: Final = frozenset(
    {"accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "proxy-authorization"}
    | {"proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers that control the connection. The HTTP client sets them, so a job must not."""

Seconds = Annotated[float, Meta(gt=0, le=3600)]
BlockNumber = Annotated[int, Meta(ge=0, le=2**53)]


class FollowerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rpc_url: str
    """http:// or https:// URL. May contain `${secret:NAME}` for a secret of the org."""
    headers: dict[str, str] = {}
    """Sent with every request. May contain `${secret:NAME}`."""
    outputs: list[Kind] | None = None
    """Kind of rows of each output of the job, in order. Unset: blocks, transactions, logs."""
    start_block: BlockNumber = 0
    end_block: BlockNumber | None = None
    """Last block to read. The follower then returns. Unset: it follows the chain forever."""
    batch_size: Annotated[int, Meta(ge=1, le=2_000)] = 50
    """Blocks per request and per write."""
    requests: Annotated[int, Meta(ge=1, le=32)] = 3
    """Concurrent requests."""
    confirmations: Annotated[int, Meta(ge=0, le=100_000)] = 0
    """Blocks that must follow a block before it is read."""
    poll_seconds: Seconds = 1.0
    """Pause between two polls of a chain without new blocks."""
    keep_hashes: Annotated[int, Meta(ge=1, le=20_000)] = 256
    """Depth in blocks of the deepest reorg that can be handled."""
    rpc_timeout_seconds: Seconds = 30.0
    """Timeout of one request."""
    rpc_patience_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 120.0
    """Time for which requests to an endpoint that does not answer are retried before the attempt fails."""


def read_config(given: Mapping[str, Any], outputs: int, keys: Placeholders) -> FollowerConfig:
    """Returns the checked config, with its secrets filled in and a kind for each output of the job."""
    try:
        config = msgspec.convert(dict(given), FollowerConfig)
    except msgspec.ValidationError as error:
        raise BadConfig(f"The config of block_follower is invalid: {error}. See docs/block-follower.md.") from None
    if config.end_block is not None and config.end_block < config.start_block:
        raise BadConfig(f"end_block must be at least start_block ({config.start_block}), got {config.end_block}.")
    kinds = _kinds(config, outputs)
    url = keys.fill(config.rpc_url, "rpc_url")
    if not re.match(r"https?://[^/?#@\s]+([/?][^\s#]*)?$", url):
        raise BadConfig(
            "rpc_url must look like http://host:port/path or https://host/path, without user and password: put "
            "credentials into headers."
        )
    headers = {name: keys.fill(value, f"headers.{name}") for name, value in config.headers.items()}
    for name, value in headers.items():
        check_header(name, value)
    return msgspec.structs.replace(config, rpc_url=url, headers=headers, outputs=kinds)


def check_header(name: str, value: str) -> None:
    """Raises BadConfig if a job must not set the header or it cannot be sent."""
    if not re.fullmatch(r"[A-Za-z0-9-]+", name) or not value.isascii() or not value.isprintable():
        raise BadConfig(
            f"Header {name!r} cannot be sent: its name must consist of letters, digits and -, and its value of "
            "printable ASCII characters."
        )
    if name.lower() in _OF_THE_EXCHANGE:
        raise BadConfig(f"Header {name!r} is set by the HTTP client: remove it from the config.")


def _kinds(config: FollowerConfig, outputs: int) -> list[Kind]:
    kinds = list(KINDS) if config.outputs is None else config.outputs
    if len(kinds) != outputs or len(set(kinds)) != len(kinds) or not kinds:
        raise BadConfig(
            f"The job has {outputs} outputs and its config lists {', '.join(kinds) or 'none'}: list one kind per "
            "output, each at most once, in the order of the outputs, such as `outputs: [blocks, logs]` in the config."
        )
    return kinds
