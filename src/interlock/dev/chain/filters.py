"""Parameters of methods: quantities, hashes, addresses, block tags, and the filter of eth_getLogs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from interlock.dev.chain.blocks import Hex, Log
from interlock.dev.chain.rpc import Code, RpcError

_QUANTITY: Final = re.compile(r"0x(0|[1-9a-fA-F][0-9a-fA-F]{0,15})")
_HASH: Final = re.compile(r"0x[0-9a-fA-F]{64}")
_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]{40}")
_MAX_TOPICS: Final = 4
_MAX_ALTERNATIVES: Final = 1_000


def invalid(sentence: str) -> RpcError:
    return RpcError(Code.INVALID_PARAMS, f"invalid params: {sentence}")


def shown(value: Any) -> str:
    """Shortens a value for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def number_of(value: Any) -> int:
    if not isinstance(value, str) or not _QUANTITY.fullmatch(value):
        raise invalid(f"{shown(value)} is not a quantity; write hex without leading zeros, such as 0x1b4")
    return int(value, 16)


def hash_of(value: Any) -> Hex:
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise invalid(f"{shown(value)} is not a hash; write 0x and 64 hex digits")
    return value.lower()


def is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def address_of(value: Any) -> Hex:
    if not isinstance(value, str) or not _ADDRESS.fullmatch(value):
        raise invalid(f"{shown(value)} is not an address; write 0x and 40 hex digits")
    return value.lower()


@dataclass(frozen=True, slots=True)
class LogFilter:
    addresses: frozenset[Hex] = frozenset()
    """Addresses to match; empty matches all."""
    topics: tuple[frozenset[Hex], ...] = ()
    """Topics to match at each position; empty matches all. A log must have at least as many topics as the filter."""

    def matches(self, log: Log) -> bool:
        if self.addresses and log.address not in self.addresses:
            return False
        if len(self.topics) > len(log.topics):
            return False
        return all(not wanted or topic in wanted for wanted, topic in zip(self.topics, log.topics, strict=False))


def log_filter(fields: dict[str, Any]) -> LogFilter:
    return LogFilter(_addresses(fields.get("address")), _topics(fields.get("topics")))


def _addresses(value: Any) -> frozenset[Hex]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    _limit(values, "addresses")
    return frozenset(map(address_of, values))


def _topics(value: Any) -> tuple[frozenset[Hex], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid("topics must be an array")
    if len(value) > _MAX_TOPICS:
        raise invalid(f"a log has at most {_MAX_TOPICS} topics, got {len(value)}")
    return tuple(map(_alternatives, value))


def _alternatives(value: Any) -> frozenset[Hex]:
    """One topic or a list of topics; null, alone or in the list, matches any."""
    values = value if isinstance(value, list) else [value]
    _limit(values, "topics")
    return frozenset() if None in values else frozenset(map(hash_of, values))


def _limit(values: list[Any], what: str) -> None:
    if len(values) > _MAX_ALTERNATIVES:
        raise invalid(f"at most {_MAX_ALTERNATIVES} {what} are allowed, got {len(values)}")
