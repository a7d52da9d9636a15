"""Whose message is next: of those that wait in one lane, by turns.

A share is a run, or a job whose tasks are of no run. The next place goes to the org that has the least running, and in
it to the share that has; among equals, to whoever was served longest ago. So a run of ten million tasks gets no more of
the workers than one of ten, an org with fifty runs no more than an org with one, and tasks that take long no more than
those that do not.

What a share has running is asked for now and then; in between, what it was given counts as running.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

_TOGETHER = 8
"""Shares that one batch is made of, at most: each one more is one more table to claim from."""

Key = tuple[UUID, UUID]
"""Org and share."""


@dataclass(frozen=True)
class Waiting:
    """A share as it was found."""

    org_id: UUID
    share_id: UUID
    since: datetime
    """When its oldest message came."""
    size: int
    """Tasks behind a message."""
    running: int

    @property
    def key(self) -> Key:
        return self.org_id, self.share_id


@dataclass(order=True)
class _Place:
    """In a heap: who has least comes first, and of those, who has waited longest."""

    load: int
    served: int
    id: UUID


class Shares:
    """Those of one lane of a queue. When each was served last is remembered over `found`."""

    def __init__(self) -> None:
        self._waiting: dict[Key, Waiting] = {}
        self._orgs: list[_Place] = []
        self._of_org: dict[UUID, list[_Place]] = {}
        self._served: dict[Key | UUID, int] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def found(self, waiting: Iterable[Waiting]) -> None:
        self._waiting = {share.key: share for share in waiting}
        known = self._waiting.keys() | {share.org_id for share in self._waiting.values()}
        self._served = {key: served for key, served in self._served.items() if key in known}
        places: defaultdict[UUID, list[_Place]] = defaultdict(list)
        for share in self._waiting.values():
            places[share.org_id].append(_Place(share.running, self._served.get(share.key, 0), share.share_id))
        self._of_org = dict(places)
        self._orgs = [
            _Place(sum(place.load for place in of_org), self._served.get(org_id, 0), org_id)
            for org_id, of_org in places.items()
        ]
        heapq.heapify(self._orgs)
        for of_org in places.values():
            heapq.heapify(of_org)

    def next(self, most: int) -> list[tuple[Waiting, int]]:
        """Who gets how many messages of a batch."""
        picked: dict[Key, int] = {}
        step = -(-most // _TOGETHER)
        while most > 0 and self._orgs:
            count = min(step, most)
            key = self._advance(count)
            picked[key] = picked.get(key, 0) + count
            most -= count
        return [(self._waiting[key], count) for key, count in picked.items()]

    def exhausted(self, keys: Sequence[Key]) -> None:
        """They have no more messages for now. Rarely many: those that go are looked for, not pointed at."""
        for org_id, share_id in keys:
            if self._waiting.pop((org_id, share_id), None) is None:
                continue
            left = [place for place in self._of_org[org_id] if place.id != share_id]
            heapq.heapify(left)
            self._of_org[org_id] = left
            if not left:
                self._orgs = [place for place in self._orgs if place.id != org_id]
                heapq.heapify(self._orgs)

    def _advance(self, count: int) -> Key:
        org = self._orgs[0]
        share = self._of_org[org.id][0]
        key = (org.id, share.id)
        self._clock += 1
        self._served[key] = self._served[org.id] = self._clock
        given = count * self._waiting[key].size
        heapq.heapreplace(self._of_org[org.id], _Place(share.load + given, self._clock, share.id))
        heapq.heapreplace(self._orgs, _Place(org.load + given, self._clock, org.id))
        return key
