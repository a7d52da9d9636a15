"""Shards of tasks: a lease token contains the shard of its task, which is 0 or the shard of a large run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final, TypeVar
from uuid import UUID

T = TypeVar("T")

SMALL_SHARD: Final = 0
"""Tasks of DAGs and of small runs; a large run gets its own shard."""
_LAST_SHARD: Final = 2**31 - 1
# Uses bits, because the properties of UUID are Python code and this runs for every task of every batch.
_VERSION_AND_VARIANT: Final = 0xF << 76 | 0x3 << 62
_OF_A_SHARD: Final = 8 << 76 | 2 << 62


def shard_of(lease_token: UUID) -> int:
    """Returns the shard; same as interlock.shard_of in SQL. A forged token only names a shard without its task."""
    bits = lease_token.int
    if bits & _VERSION_AND_VARIANT != _OF_A_SHARD:
        return SMALL_SHARD
    shard = bits >> 96
    return shard if shard <= _LAST_SHARD else SMALL_SHARD


def by_shard(items: Iterable[T], lease: Callable[[T], UUID]) -> dict[int, list[T]]:
    """Groups a batch by shard; most batches have only one."""
    groups: defaultdict[int, list[T]] = defaultdict(list)
    for item in items:
        groups[shard_of(lease(item))].append(item)
    return groups
