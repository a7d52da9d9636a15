"""Measures how long tasks take, which decides how many of them to claim.

Slow tasks are claimed one per free child, so that other workers get the rest. Fast ones are claimed by the hundreds, so
that one round trip serves a whole batch. The mean duration per operator and config decides.
"""

from __future__ import annotations

from collections import OrderedDict
from uuid import UUID

Kind = tuple[str, bytes]
"""An operator with its config: tasks of one kind take about the same time."""

WEIGHT = 0.1
"""Weight of the newest duration in the mean."""
MIN_SECONDS = 20e-6
"""Cost of a task that does nothing."""
REMEMBERED = 1000
MAX_TASKS = 1000
"""Most tasks of one claim."""
MAX_BYTES = 4 << 20
"""Most payload bytes that one claim should return."""


class Pace:
    def __init__(self, tasks_per_message: float) -> None:
        self._means: OrderedDict[Kind, float] = OrderedDict()
        self._kinds: OrderedDict[UUID, Kind] = OrderedDict()
        self._bytes: OrderedDict[Kind, float] = OrderedDict()
        self.tasks_per_message = tasks_per_message
        self.latest: Kind | None = None
        """The kind last claimed: the best guess for the next message."""

    def seconds(self, kind: Kind | None) -> float | None:
        """Returns the mean duration; None for a kind of which no task has finished."""
        return None if kind is None else self._means.get(kind)

    def learn(self, kind: Kind, seconds: float) -> None:
        seconds = max(seconds, MIN_SECONDS)
        mean = self._means.get(kind)
        if mean is None:
            self._means[kind] = seconds
            _forget_oldest(self._means)
        else:
            self._means[kind] = mean + WEIGHT * (seconds - mean)

    def weigh(self, kind: Kind, payload_bytes: float) -> None:
        self._bytes[kind] = payload_bytes
        _forget_oldest(self._bytes)

    def most_by_size(self, kind: Kind | None) -> int:
        """Returns how many tasks of a kind fit into one reply, by the size of the latest payloads."""
        known = None if kind is None else self._bytes.get(kind)
        return MAX_TASKS if known is None else min(max(int(MAX_BYTES / max(known, 1)), 1), MAX_TASKS)

    def kind_of_job(self, job_id: UUID | None) -> Kind | None:
        return None if job_id is None else self._kinds.get(job_id)

    def claimed(self, job_id: UUID, kind: Kind) -> None:
        self.latest = kind
        if self._kinds.get(job_id) != kind:
            self._kinds[job_id] = kind
            _forget_oldest(self._kinds)

    def message_held(self, tasks: int) -> None:
        self.tasks_per_message += WEIGHT * (max(tasks, 1) - self.tasks_per_message)


def _forget_oldest(known: OrderedDict[Kind, float] | OrderedDict[UUID, Kind]) -> None:
    if len(known) > REMEMBERED:
        known.popitem(last=False)
