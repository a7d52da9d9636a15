"""Generates the contents of a block from (seed, number, branch). The same input always produces the same bytes.

Traffic resembles a real chain: a few tokens and accounts have most of it, most calls are ERC-20 transfers, and there
are swaps, approvals, plain payments, failures and ERC-721 transfers (which share topic 0 with ERC-20).
The generator uses only integers and hashes, no floats, so every machine generates the same chain.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from interlock.dev.blocks import (
    EMPTY_BLOOM,
    EMPTY_TRIE,
    FULL_BLOOM,
    Block,
    Hex,
    Log,
    Receipt,
    Transaction,
    quantity,
    word,
)

TRANSFER: Final[Hex] = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
APPROVAL: Final[Hex] = "0x8c5be1e5ebec7d5bd14f71427d1e84f3dd0314c0f7b2291e5b200ac8c7c3b925"

GENESIS_TIME: Final = 1_704_067_200
"""2024-01-01T00:00:00Z. Fixed, because the machine's clock would make two runs differ."""
SECONDS_PER_BLOCK: Final = 12
"""Chain time, however fast blocks are mined: 300 blocks are one hour of history."""

_T = TypeVar("_T")
_GWEI: Final = 10**9
_GAS_LIMIT: Final = 30_000_000
_TOKENS, _COLLECTIONS, _ACCOUNTS, _MINERS = 64, 4, 4_096, 16
_ORDINALS: Final = tuple(map(quantity, range(8_192)))
"""Encoded indexes within a block, computed once: half of a block's fields are small numbers."""
_TABLE: Final = 65_536
"""Size of the popularity tables: 16 random bits select an entry."""


class _Stream(Protocol):
    """The type of `hashlib.shake_128(…)`, which has no public name."""

    def digest(self, length: int, /) -> bytes: ...

    def hexdigest(self, length: int, /) -> str: ...


class Header(NamedTuple):
    """A block's position. `branch` counts the reorgs before it, so (number, branch) identifies one block."""

    number: int
    branch: int
    hash: Hex
    parent: Hex


class _Outcome(msgspec.Struct, frozen=True, gc=False):
    gas: int
    status: Hex
    logs: int


class Contents(msgspec.Struct, frozen=True, gc=False):
    block: Block
    """Contains only the hashes of its transactions."""
    transactions: tuple[Transaction, ...]
    logs: tuple[Log, ...]
    outcomes: tuple[_Outcome, ...]
    """The parts of receipts that are not in transactions and logs."""

    def in_full(self) -> Block:
        return msgspec.structs.replace(self.block, transactions=self.transactions)

    def receipts(self) -> tuple[Receipt, ...]:
        """Builds receipts on demand: most readers need only logs."""
        gas = itertools.accumulate(outcome.gas for outcome in self.outcomes)
        logs = iter(self.logs)
        return tuple(
            _receipt(transaction, outcome, total, tuple(itertools.islice(logs, outcome.logs)))
            for transaction, outcome, total in zip(self.transactions, self.outcomes, gas, strict=True)
        )


def _receipt(transaction: Transaction, outcome: _Outcome, total_gas: int, logs: tuple[Log, ...]) -> Receipt:
    return Receipt(
        block_hash=transaction.block_hash,
        block_number=transaction.block_number,
        cumulative_gas_used=quantity(total_gas),
        effective_gas_price=transaction.gas_price,
        from_=transaction.from_,
        gas_used=quantity(outcome.gas),
        logs=logs,
        logs_bloom=FULL_BLOOM if logs else EMPTY_BLOOM,
        status=outcome.status,
        to=transaction.to,
        transaction_hash=transaction.hash,
        transaction_index=transaction.transaction_index,
    )


class _Account(msgspec.Struct, frozen=True, gc=False):
    address: Hex
    topic: Hex


class _Token(msgspec.Struct, frozen=True, gc=False):
    address: Hex
    units: tuple[int, ...]
    """Amounts are random multiples of one of these: from a thousandth of a token to a hundred."""


class _Draw(msgspec.Struct, frozen=True, gc=False):
    """The random bits of one transaction, as unpacked by `_DRAW`."""

    kind: int
    sender: int
    recipient: int
    token: int
    other_token: int
    amount: int
    other_amount: int
    unit: int
    dust: int
    tip: int
    gas: int


_DRAW: Final = struct.Struct(">88xBHHHHHHBIIH")
"""The first 88 bytes are read as hex: 24 complete the hash, 64 make the signature."""


class _Event(msgspec.Struct, frozen=True, gc=False):
    address: Hex
    topics: tuple[Hex, ...]
    data: Hex


class _Call(msgspec.Struct, frozen=True, gc=False):
    """The effects of one kind of transaction."""

    to: Hex
    input: Hex
    gas: int
    events: tuple[_Event, ...] = ()
    value: Hex = "0x0"
    status: Hex = "0x1"
    gas_limit: Hex = "0x30d40"


class Writer:
    def __init__(self, identity: bytes, *, chain_id: int, transactions: int) -> None:
        """`identity` is a digest of the seed and every setting that shapes the chain; `transactions` is the mean."""
        self._identity = identity
        self._chain_id = quantity(chain_id)
        self._mean = transactions
        self._accounts = _by_popularity([_account(address) for address in self._addresses("account", _ACCOUNTS)])
        self._tokens = _by_popularity(list(map(_token, self._addresses("token", _TOKENS), range(_TOKENS))))
        self._collections = self._addresses("collection", _COLLECTIONS)
        self._pools = [_account(address) for address in self._addresses("pool", _TOKENS)]
        self._miners = self._addresses("miner", _MINERS)
        (self._router,) = self._addresses("router", 1)
        self._kinds = self._frequencies()

    def tokens(self) -> tuple[Hex, ...]:
        """Returns the addresses of the ERC-20 contracts, the busiest first."""
        return tuple(dict.fromkeys(token.address for token in self._tokens))

    def write(self, header: Header) -> Contents:
        seed = self._stream(f"block:{header.number}:{header.branch}")
        count = self._count(header, seed.digest(4))
        draws = seed.digest(_HEAD + count * _DRAW.size)
        base_fee = 8 * _GWEI + int.from_bytes(draws[4:8]) % (8 * _GWEI)
        page = _Page(header, self._chain_id, base_fee, draws[_HEAD:].hex())
        for index, fields in enumerate(_DRAW.iter_unpack(memoryview(draws)[_HEAD:])):
            draw = _Draw(*fields)
            page.add(index, draw, self._accounts[draw.sender].address, self._kinds[draw.kind](draw))
        return page.contents(self._miners[draws[8] % _MINERS], self._timestamp(header, draws[9]), draws[_ROOTS:_HEAD])

    def _count(self, header: Header, drawn: bytes) -> int:
        """Half to one and a half times the mean; occasionally zero, and always zero for the genesis block."""
        if header.number == 0 or drawn[0] < 3:
            return 0
        return self._mean // 2 + int.from_bytes(drawn[1:4]) % (self._mean + 1)

    @staticmethod
    def _timestamp(header: Header, drawn: int) -> int:
        """Increases with every block on every branch. A replacement block may fall into another hour."""
        jitter = drawn % SECONDS_PER_BLOCK if header.number else 0
        return GENESIS_TIME + header.number * SECONDS_PER_BLOCK + jitter

    def _stream(self, purpose: str) -> _Stream:
        """A pseudorandom byte stream of any length, different for each purpose."""
        return hashlib.shake_128(self._identity + purpose.encode())

    def _addresses(self, role: str, count: int) -> list[Hex]:
        drawn = self._stream(role).hexdigest(20 * count)
        return [f"0x{drawn[at : at + 40]}" for at in range(0, len(drawn), 40)]

    # Kinds of transactions

    def _frequencies(self) -> list[Callable[[_Draw], _Call]]:
        """Returns 256 entries: one random byte selects a kind."""
        shares: list[tuple[Callable[[_Draw], _Call], int]] = [
            (self._transfer, 180),
            (self._swap, 26),
            (self._payment, 22),
            (self._approval, 14),
            (self._failure, 8),
            (self._collectible, 6),
        ]
        return [kind for kind, share in shares for _ in range(share)]

    def _transfer(self, draw: _Draw) -> _Call:
        token, recipient = self._tokens[draw.token], self._accounts[draw.recipient]
        amount = _amount(token, draw.amount, draw).to_bytes(32).hex()
        event = _Event(token.address, (TRANSFER, self._accounts[draw.sender].topic, recipient.topic), "0x" + amount)
        return _Call(token.address, f"0xa9059cbb{recipient.topic[2:]}{amount}", 46_000, (event,))

    def _swap(self, draw: _Draw) -> _Call:
        """Two transfers in one transaction: one token into a pool, another out of it."""
        given, taken = self._tokens[draw.token], self._tokens[draw.other_token]
        trader, pool = self._accounts[draw.sender].topic, self._pools[draw.token % _TOKENS].topic
        paid = word(_amount(given, draw.amount, draw))
        got = word(_amount(taken, draw.other_amount, draw))
        events = (
            _Event(given.address, (TRANSFER, trader, pool), paid),
            _Event(taken.address, (TRANSFER, pool, trader), got),
        )
        return _Call(self._router, f"0x38ed1739{paid[2:]}{got[2:]}", 120_000, events)

    def _payment(self, draw: _Draw) -> _Call:
        value = quantity((draw.amount + 1) * 10**14 + draw.dust)
        return _Call(self._accounts[draw.recipient].address, "0x", 21_000, value=value, gas_limit="0x5208")

    def _approval(self, draw: _Draw) -> _Call:
        token, router = self._tokens[draw.token], self._router[2:].zfill(64)
        allowance = "f" * 64
        event = _Event(token.address, (APPROVAL, self._accounts[draw.sender].topic, "0x" + router), "0x" + allowance)
        return _Call(token.address, f"0x095ea7b3{router}{allowance}", 44_000, (event,))

    def _failure(self, draw: _Draw) -> _Call:
        """A transfer that reverts: it costs gas and emits no log."""
        return msgspec.structs.replace(self._transfer(draw), gas=27_000, events=(), status="0x0")

    def _collectible(self, draw: _Draw) -> _Call:
        """ERC-721: topic 0 equals that of ERC-20's Transfer, but the token id is a fourth topic and data is empty."""
        collection = self._collections[draw.token % _COLLECTIONS]
        owner, recipient = self._accounts[draw.sender].topic, self._accounts[draw.recipient].topic
        token_id = word(draw.amount)
        event = _Event(collection, (TRANSFER, owner, recipient, token_id), "0x")
        return _Call(collection, f"0x23b872dd{owner[2:]}{recipient[2:]}{token_id[2:]}", 60_000, (event,))


_ROOTS: Final = 10
"""Offset of the bytes for the roots in a block's draws, after count, base fee, miner and jitter."""
_HEAD: Final = _ROOTS + 4 * 32


class _Page:
    """One block while it is being generated."""

    def __init__(self, header: Header, chain_id: Hex, base_fee: int, drawn: str) -> None:
        self._header = header
        self._drawn = drawn
        self._number = quantity(header.number)
        self._chain_id = chain_id
        self._base_fee = base_fee
        self._max_fee = quantity(2 * base_fee + 2 * _GWEI)
        self._gas_used = 0
        self._size = 600
        self._transactions: list[Transaction] = []
        self._outcomes: list[_Outcome] = []
        self._logs: list[Log] = []

    def add(self, index: int, draw: _Draw, sender: Hex, call: _Call) -> None:
        header, at = self._header, _ORDINALS[index]
        drawn, start = self._drawn, 2 * _DRAW.size * index
        hash_ = transaction_hash(header.number, header.branch, index, drawn[start : start + 48])
        gas = call.gas + (draw.gas % 4_096 if call.events else 0)
        tip = draw.tip % (2 * _GWEI)
        price = quantity(self._base_fee + tip)
        parity = _ORDINALS[draw.gas & 1]
        self._gas_used += gas
        self._size += 120 + len(call.input) // 2
        for event in call.events:
            self._log(event, hash_, at)
        self._transactions.append(
            Transaction(
                block_hash=header.hash,
                block_number=self._number,
                from_=sender,
                gas=call.gas_limit,
                gas_price=price,
                max_fee_per_gas=self._max_fee,
                max_priority_fee_per_gas=quantity(tip),
                hash=hash_,
                input=call.input,
                # Increases with the block and is unique in it, so an account's nonces are increasing.
                nonce=quantity(header.number << 16 | index),
                to=call.to,
                transaction_index=at,
                value=call.value,
                chain_id=self._chain_id,
                v=parity,
                # Quantities must not start with a zero digit; and both are small enough for either half of a signature.
                r="0x5" + drawn[start + 48 : start + 111],
                s="0x3" + drawn[start + 112 : start + 175],
                y_parity=parity,
            )
        )
        self._outcomes.append(_Outcome(gas, call.status, len(call.events)))

    def _log(self, event: _Event, transaction: Hex, at: Hex) -> None:
        self._logs.append(
            Log(
                address=event.address,
                topics=event.topics,
                data=event.data,
                block_number=self._number,
                transaction_hash=transaction,
                transaction_index=at,
                block_hash=self._header.hash,
                log_index=_ORDINALS[len(self._logs)],
            )
        )

    def contents(self, miner: Hex, timestamp: int, roots: bytes) -> Contents:
        drawn: Iterator[Hex] = (f"0x{roots[at : at + 32].hex()}" for at in range(0, len(roots), 32))
        transactions_root, receipts_root = next(drawn), next(drawn)
        transactions = tuple(self._transactions)
        block = Block(
            number=self._number,
            hash=self._header.hash,
            parent_hash=self._header.parent,
            timestamp=quantity(timestamp),
            miner=miner,
            base_fee_per_gas=quantity(self._base_fee),
            gas_limit=quantity(max(_GAS_LIMIT, self._gas_used)),
            gas_used=quantity(self._gas_used),
            size=quantity(self._size),
            logs_bloom=FULL_BLOOM if self._logs else EMPTY_BLOOM,
            transactions_root=transactions_root if transactions else EMPTY_TRIE,
            receipts_root=receipts_root if transactions else EMPTY_TRIE,
            state_root=next(drawn),
            mix_hash=next(drawn),
            extra_data="0x" + b"interlock devchain".hex(),
            transactions=tuple([transaction.hash for transaction in transactions]),
        )
        return Contents(block, transactions, tuple(self._logs), tuple(self._outcomes))


def _account(address: Hex) -> _Account:
    return _Account(address, "0x" + address[2:].zfill(64))


def _token(address: Hex, number: int) -> _Token:
    """Most tokens have 18 decimals; some, like the large stablecoins, have 6 or 8."""
    decimals = (6, 18, 18, 8, 18, 18)[number % 6]
    return _Token(address, tuple(10 ** (decimals + power) for power in range(-3, 3)))


def _amount(token: _Token, drawn: int, draw: _Draw) -> int:
    return (drawn + 1) * token.units[draw.unit % 6] + draw.dust


def _by_popularity(items: list[_T]) -> list[_T]:
    """Builds a table of 65,536 entries in which the n-th item has a share proportional to 1/n (Zipf's law)."""
    weights = [2**20 // rank for rank in range(1, len(items) + 1)]
    total, table = sum(weights), list[_T]()
    for item, reached in zip(items, itertools.accumulate(weights), strict=True):
        table.extend([item] * (reached * _TABLE // total - len(table)))
    return table


# A transaction's hash encodes its position: 8 bytes of (number, branch, index), scrambled with the first of the 24
# random bytes after them. So a transaction is found without an index, even if its block was not generated yet.

_INDEX_BITS, _BRANCH_BITS = 12, 28
_PLACE: Final = 1 << 64
_SCRAMBLE: Final = 0x9E3779B97F4A7C15
_UNSCRAMBLE: Final = pow(_SCRAMBLE, -1, _PLACE)


def transaction_hash(number: int, branch: int, index: int, drawn: str) -> Hex:
    """`drawn` is a string of 48 random hex digits."""
    place = (number << _BRANCH_BITS | branch) << _INDEX_BITS | index
    return f"0x{(place * _SCRAMBLE + int(drawn[:16], 16)) % _PLACE:016x}{drawn}"


def transaction_place(hash_: Hex) -> tuple[int, int, int]:
    """Returns (number, branch, index) of the only transaction that can have this hash."""
    place = (int(hash_[2:18], 16) - int(hash_[18:34], 16)) * _UNSCRAMBLE % _PLACE
    branch = place >> _INDEX_BITS & ((1 << _BRANCH_BITS) - 1)
    return place >> (_BRANCH_BITS + _INDEX_BITS), branch, place & ((1 << _INDEX_BITS) - 1)
