"""The canonical chain. Its history is determined by the settings and by the calls of `mine` and `reorg`.

A reorg removes the last blocks and appends the same number of blocks of another branch. The seed chooses heights at
which a reorg happens just before the next block is mined; callers may request more. Mining only links hashes and a
block's contents are generated when they are read, so a chain of any length is available immediately.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Final

from interlock.dev.blocks import ZERO_HASH, Hex
from interlock.dev.contents import Contents, Header, Writer, transaction_place
from interlock.errors import ConfigurationError

KEPT_BLOCKS: Final = 1_024
"""Generated blocks kept in memory. One with 40 transactions takes about 100 kB."""

MAX_TRANSACTIONS: Final = 2_000
MAX_BLOCKS: Final = 10_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters that determine a chain: two chains of equal shape are identical, byte for byte."""

    seed: int = 7
    chain_id: int = 31_337
    transactions: int = 40
    """Mean number per block, up to 2,000."""
    reorg_every: int = 50
    """Mean number of blocks between two reorgs; 0 for only those that are requested."""
    max_depth: int = 6
    """Maximum depth of a reorg that the seed causes."""
    finality: int = 32
    """Number of blocks after which a block is final. No reorg replaces a final block."""

    def __post_init__(self) -> None:
        for name, value, least, limit in (
            ("chain_id", self.chain_id, 1, 2**53 - 1),
            ("transactions", self.transactions, 0, MAX_TRANSACTIONS),
            ("reorg_every", self.reorg_every, 0, 2**32),
            ("finality", self.finality, 1, 2**32),
            ("max_depth", self.max_depth, 1, self.finality),
        ):
            if not least <= value <= limit:
                raise ConfigurationError(f"{name} is {value}; write a number from {least} to {limit}.")

    def identity(self) -> bytes:
        return hashlib.blake2b(repr(astuple(self)).encode(), digest_size=32).digest()


class Chain:
    def __init__(self, shape: Shape, *, blocks: int = 0) -> None:
        """Mines `blocks` blocks on top of the genesis block."""
        self.shape = shape
        self._identity = shape.identity()
        self._writer = Writer(self._identity, chain_id=shape.chain_id, transactions=shape.transactions)
        self._written: OrderedDict[Hex, Contents] = OrderedDict()
        self._branch = 0
        self._canonical: list[Header] = []
        self._by_hash: dict[Hex, Header] = {}
        self._append()
        self.mine(blocks)

    @property
    def head(self) -> Header:
        return self._canonical[-1]

    @property
    def safe(self) -> Header:
        """The newest block that no reorg of the seed can replace."""
        return self._canonical[max(0, self.head.number - self.shape.max_depth)]

    @property
    def finalized(self) -> Header:
        return self._canonical[max(0, self.head.number - self.shape.finality)]

    @property
    def deepest_reorg(self) -> int:
        """The number of blocks that may be replaced now. The genesis block is never replaced."""
        return min(self.shape.finality, self.head.number)

    def tokens(self) -> tuple[Hex, ...]:
        return self._writer.tokens()

    # Changes

    def mine(self, count: int = 1) -> Header:
        """Mines blocks, each after a reorg if the seed schedules one. The height grows by one per block."""
        for _ in range(count):
            depth = self._scheduled_depth(self.head.number + 1)
            if depth:
                self.reorg(min(depth, self.deepest_reorg))
            self._append()
        return self.head

    def reorg(self, depth: int) -> Header:
        """Replaces the last `depth` blocks with as many blocks of a new branch."""
        if not 0 <= depth <= self.deepest_reorg:
            raise ValueError(
                f"A reorg of {depth} blocks would replace a final one; at most {self.deepest_reorg} can be replaced."
            )
        del self._canonical[len(self._canonical) - depth :]
        self._branch += 1
        for _ in range(depth):
            self._append()
        return self.head

    def _append(self) -> None:
        number = len(self._canonical)
        parent = self._canonical[-1].hash if number else ZERO_HASH
        words = f"{parent}:{number}:{self._branch}".encode()
        digest = hashlib.blake2b(words, key=self._identity, digest_size=32).hexdigest()
        header = Header(number, self._branch, f"0x{digest}", parent)
        self._canonical.append(header)
        self._by_hash[header.hash] = header

    def _scheduled_depth(self, number: int) -> int:
        """Returns the depth of the reorg that is scheduled before this height; 0 for none."""
        if not self.shape.reorg_every:
            return 0
        digest = hashlib.blake2b(f"reorg:{number}".encode(), key=self._identity, digest_size=16).digest()
        if int.from_bytes(digest[:8]) % self.shape.reorg_every:
            return 0
        return 1 + int.from_bytes(digest[8:]) % self.shape.max_depth

    # Reads

    def at(self, number: int) -> Header | None:
        return self._canonical[number] if 0 <= number < len(self._canonical) else None

    def between(self, first: int, last: int) -> Iterator[Header]:
        """Canonical blocks of an inclusive range; numbers beyond the head are ignored."""
        return iter(self._canonical[max(0, first) : last + 1])

    def by_hash(self, hash_: Hex) -> Header | None:
        """Finds any block that was ever mined, on abandoned branches, too."""
        return self._by_hash.get(hash_)

    def is_canonical(self, header: Header) -> bool:
        return self.at(header.number) is header

    def contents(self, header: Header) -> Contents:
        written = self._written.get(header.hash)
        if written is None:
            written = self._written[header.hash] = self._writer.write(header)
            if len(self._written) > KEPT_BLOCKS:
                self._written.popitem(last=False)
        else:
            self._written.move_to_end(header.hash)
        return written

    def find_transaction(self, hash_: Hex) -> tuple[Contents, int] | None:
        """Returns the canonical block with the transaction, and its index in the block."""
        number, branch, index = transaction_place(hash_)
        header = self.at(number)
        if header is None or header.branch != branch:
            return None
        contents = self.contents(header)
        found = index < len(contents.transactions) and contents.transactions[index].hash == hash_
        return (contents, index) if found else None
