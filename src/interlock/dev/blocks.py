"""Ethereum's JSON objects. A quantity is hex without leading zeros; data is hex of whole bytes."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

Hex: TypeAlias = str

ZERO_HASH: Final[Hex] = "0x" + "0" * 64
EMPTY_BLOOM: Final[Hex] = "0x" + "0" * 512
FULL_BLOOM: Final[Hex] = "0x" + "f" * 512
"""Matches every log: a client that trusts blooms misses nothing, and the server needs no keccak."""

EMPTY_UNCLES: Final[Hex] = "0x1dcc4de8dec75d7aab85b567b6ccd41ad312451b948a7413f0a142fd40d49347"
EMPTY_TRIE: Final[Hex] = "0x56e81f171bcc55a6ff8345e692c0f86e5b48e01b996cadc001622fb5e363b421"


quantity = hex
"""Encodes an integer of 0 or more. `hex` produces Ethereum's format and is much faster than a format string."""


def word(value: int) -> Hex:
    """Encodes 32 bytes of data."""
    return "0x" + value.to_bytes(32).hex()


# Thousands of blocks are created and none has reference cycles: `gc=False` exempts them from garbage collection.


class Log(msgspec.Struct, rename="camel", frozen=True, gc=False):
    address: Hex
    topics: tuple[Hex, ...]
    data: Hex
    block_number: Hex
    transaction_hash: Hex
    transaction_index: Hex
    block_hash: Hex
    log_index: Hex
    removed: bool = False


class Transaction(msgspec.Struct, rename="camel", frozen=True, gc=False):
    block_hash: Hex
    block_number: Hex
    from_: Hex = msgspec.field(name="from")
    gas: Hex
    gas_price: Hex
    max_fee_per_gas: Hex
    max_priority_fee_per_gas: Hex
    hash: Hex
    input: Hex
    nonce: Hex
    to: Hex
    transaction_index: Hex
    value: Hex
    chain_id: Hex
    v: Hex
    r: Hex
    s: Hex
    y_parity: Hex
    type: Hex = "0x2"
    access_list: tuple[Hex, ...] = ()


class Receipt(msgspec.Struct, rename="camel", frozen=True, gc=False):
    block_hash: Hex
    block_number: Hex
    cumulative_gas_used: Hex
    effective_gas_price: Hex
    from_: Hex = msgspec.field(name="from")
    gas_used: Hex
    logs: tuple[Log, ...]
    logs_bloom: Hex
    status: Hex
    to: Hex
    transaction_hash: Hex
    transaction_index: Hex
    contract_address: Hex | None = None
    type: Hex = "0x2"


class Block(msgspec.Struct, rename="camel", frozen=True, gc=False):
    number: Hex
    hash: Hex
    parent_hash: Hex
    timestamp: Hex
    miner: Hex
    base_fee_per_gas: Hex
    gas_limit: Hex
    gas_used: Hex
    size: Hex
    logs_bloom: Hex
    transactions_root: Hex
    receipts_root: Hex
    state_root: Hex
    mix_hash: Hex
    extra_data: Hex
    transactions: tuple[Transaction, ...] | tuple[Hex, ...]
    difficulty: Hex = "0x0"
    nonce: Hex = "0x0000000000000000"
    sha3_uncles: Hex = msgspec.field(name="sha3Uncles", default=EMPTY_UNCLES)
    uncles: tuple[Hex, ...] = ()
