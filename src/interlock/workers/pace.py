"""How long tasks take here, learned while they run, and how many to claim because of it.

Slow tasks are taken one per free child, so that other workers get the rest. Fast ones are taken by the hundreds, so
that the round trips are paid once per batch. What decides is the mean duration per operator and config.
"""

from __future__ import annotations

from collections import OrderedDict
from uuid import UUID

Kind = tuple[str, bytes]
"""An operator with its config: tasks of one kind take about the same time."""

WEIGHT = 0.1
"""How much the newest duration moves the mean."""
LEAST_SECONDS = 20e-6
"""What a task costs even if it does nothing."""
REMEMBERED = 1000
MOST_TASKS = 1000
"""What one claim asks for at most."""
MOST_BYTES = 4 << 20
"""Payloads that one claim should bring at most."""


class Pace:
    def __init__(self, tasks_per_message: float) -> None:
        self._means: OrderedDict[Kind, float] = OrderedDict()
        self._kinds: OrderedDict[UUID, Kind] = OrderedDict()
        self._bytes: OrderedDict[Kind, float] = OrderedDict()
        self.tasks_per_message = tasks_per_message
        self.latest: Kind | None = None
        """The kind last claimed: the best guess at what the queue holds next."""

    def seconds(self, kind: Kind | None) -> float | None:
        """The mean duration; None for a kind that was never seen to finish."""
        return None if kind is None else self._means.get(kind)

    def learn(self, kind: Kind, seconds: float) -> None:
        seconds = max(seconds, LEAST_SECONDS)
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
        """How many tasks of a kind one reply may carry, by the payloads seen last."""
        known = None if kind is None else self._bytes.get(kind)
        return MOST_TASKS if known is None else min(max(int(MOST_BYTES / max(known, 1)), 1), MOST_TASKS)

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
