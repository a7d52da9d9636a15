"""What a lease token says about where its task is: in shard 0, or in its run's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final, TypeVar
from uuid import UUID

T = TypeVar("T")

SMALL_SHARD: Final = 0
"""Tasks of DAGs and of small runs; a large run gets a shard of its own."""
_LAST_SHARD: Final = 2**31 - 1
# By their bits: the properties of a UUID are Python code, and this is done for every task of every batch.
_VERSION_AND_VARIANT: Final = 0xF << 76 | 0x3 << 62
_OF_A_SHARD: Final = 8 << 76 | 2 << 62


def shard_of(lease_token: UUID) -> int:
    """The same function as interlock.shard_of in SQL. A forged token names a shard where its task is not."""
    bits = lease_token.int
    if bits & _VERSION_AND_VARIANT != _OF_A_SHARD:
        return SMALL_SHARD
    shard = bits >> 96
    return shard if shard <= _LAST_SHARD else SMALL_SHARD


def by_shard(items: Iterable[T], lease: Callable[[T], UUID]) -> dict[int, list[T]]:
    """A batch, mostly of one shard."""
    groups: defaultdict[int, list[T]] = defaultdict(list)
    for item in items:
        groups[shard_of(lease(item))].append(item)
    return groups
