"""What a receipt says of the tasks of a run, in 32 bytes each: which ones there are, and what each has ended as.

A chain over blocks of the run's tasks, in the order of their indexes:

    digest = sha256(digest so far ‖ sha256(record ‖ record ‖ …)), from 32 zero bytes on, a block being 10,000 indexes

A record of `ids` is a task's full id, the 32 bytes of sha256("{run_id}:{index}"); one of `outcomes` is that id and the
name of the status it has ended with. Who has an export of the run can compute both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final
from uuid import UUID

AUDIENCE: Final = "interlock.receipt"
"""What no other token of ours has: a receipt is never taken for one, nor one for a receipt."""
BLOCK: Final = 10_000
START: Final = bytes(32)


def chained(so_far: bytes, block: bytes) -> bytes:
    return hashlib.sha256(so_far + block).digest()


def full_id(run_id: UUID, index: int) -> bytes:
    return hashlib.sha256(f"{run_id}:{index}".encode()).digest()


def digests(run_id: UUID, indexes: int, tasks: Iterable[tuple[int, str]]) -> tuple[str, str]:
    """Of ids and of outcomes, from each task's index and status in the order of the indexes."""
    ids = outcomes = START
    for block in _blocks(indexes, tasks):
        known = [(full_id(run_id, index), status.encode()) for index, status in block]
        ids = chained(ids, hashlib.sha256(b"".join(one for one, _ in known)).digest())
        outcomes = chained(outcomes, hashlib.sha256(b"".join(one + status for one, status in known)).digest())
    return ids.hex(), outcomes.hex()


def _blocks(indexes: int, tasks: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Every block of the run, also those that no task is in."""
    number = 0
    for block, members in groupby(tasks, key=lambda task: task[0] // BLOCK):
        while number < block:
            yield []
            number += 1
        yield list(members)
        number += 1
    while number * BLOCK < indexes:
        yield []
        number += 1
