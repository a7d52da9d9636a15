"""Types of the model: definitions, jobs, runs, tasks, and the claims that workers hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Self
from uuid import UUID

DATASET = UUID(int=1)
VERSION = UUID(int=2)
UNKNOWN = UUID(int=3)
"""An id that no task has."""

STATUSES = ("Queued", "Running", "Completed", "Failed", "Canceled")

DICE = 0.25
"""The random number that every backoff uses."""


@dataclass(frozen=True)
class Definition:
    """A job's definition of its tasks; durations are in seconds."""

    operator: str = "echo"
    runtime: str = "platform"
    bulk: bool = False
    max_attempts: int = 3
    backoff: int = 10
    factor: int = 2
    backoff_cap: int = 25
    jitter: float = 0.0
    fatal: tuple[str, ...] = ()
    lease: int = 20
    timeout: int = 50
    max_concurrency: int | None = None
    per_key: int | None = None
    outputs: bool = False

    @property
    def capped(self) -> bool:
        return self.max_concurrency is not None or self.per_key is not None

    @property
    def lease_for(self) -> timedelta:
        """The lease, which the hard timeout limits."""
        return timedelta(seconds=min(self.lease, self.timeout))

    @property
    def queue(self) -> str | None:
        return None if self.runtime == "dispatcher" else self.runtime

    def wait_after(self, attempt: int) -> timedelta:
        wait = min(self.backoff_cap, self.backoff * self.factor ** (attempt - 1))
        return timedelta(seconds=wait * (1 - self.jitter + 2 * self.jitter * DICE))

    def body(self) -> dict[str, Any]:
        """Returns the part of `POST /v1/jobs` that defines the job."""
        return {
            "operator": self.operator,
            "runtime": self.runtime,
            "priority": "bulk" if self.bulk else "normal",
            "policy": {
                "max_attempts": self.max_attempts,
                "backoff_seconds": self.backoff,
                "backoff_factor": self.factor,
                "backoff_cap_seconds": self.backoff_cap,
                "jitter": self.jitter,
                "non_retryable": list(self.fatal),
                "lease_seconds": self.lease,
                "timeout_seconds": self.timeout,
            },
            "scaling": {
                "max_concurrency": self.max_concurrency,
                "max_concurrency_per_key": self.per_key,
                "key": "/host" if self.per_key is not None else None,
            },
            "outputs": [{"dataset_uuid": str(DATASET), "dataset_version": str(VERSION)}] if self.outputs else [],
        }


@dataclass(eq=False)
class Job:
    job_id: UUID
    name: str | None
    definition: Definition
    replaced: bool = False
    """True if its definition was replaced: more tasks may run than the current cap allows."""

    @property
    def capped(self) -> bool:
        return self.definition.capped

    def __repr__(self) -> str:
        return f"job {self.name or str(self.job_id)[-4:]}"


@dataclass(eq=False)
class Run:
    run_id: UUID
    job: Job
    total: int
    last_index: int
    state: str = "Running"
    ended_at: datetime | None = None
    cancel_requested: bool = False
    cancel_walked: bool = False
    """True once the cancel has reached all tasks. Tasks retried after that continue."""
    changed: bool = False
    """True if tasks changed since the counters were last folded."""

    def tasks_in(self, tasks: Iterable[Task]) -> list[Task]:
        return [task for task in tasks if task.run is self]

    def counters(self, tasks: Iterable[Task]) -> dict[str, int]:
        count = Counter(task.status for task in self.tasks_in(tasks))
        dead = sum(task.dead for task in self.tasks_in(tasks))
        return {name: count[name] for name in STATUSES} | {"dead": dead}

    def settle(self, tasks: Iterable[Task], now: datetime) -> None:
        mine = self.tasks_in(tasks)
        over = all(task.over for task in mine)
        self.state, self.ended_at = (self._outcome(mine), now) if over else ("Running", None)

    def _outcome(self, tasks: list[Task]) -> str:
        count = Counter(task.status for task in tasks)
        if self.cancel_requested and count["Canceled"]:
            return "Canceled"
        if count["Completed"] == len(tasks):
            return "Completed"
        if count["Failed"] == len(tasks):
            return "Failed"
        return "Canceled" if count["Canceled"] == len(tasks) else "CompletedWithFailures"


@dataclass(frozen=True)
class Past:
    """An attempt that did not complete."""

    outcome: str
    error_class: str | None
    ended_at: datetime


@dataclass(frozen=True)
class Hold:
    """A worker's claim. The worker keeps it, and may use it long after it is stale."""

    task_id: UUID
    attempt: int
    lease_token: UUID
    token: str | None = None


@dataclass(frozen=True)
class Report:
    hold: Hold
    status: str
    error_class: str | None = None
    result: str | None = None
    events: tuple[str, ...] = ()
    outputs: int = 0

    @property
    def effects(self) -> bool:
        return bool(self.events or self.outputs)


@dataclass(eq=False)
class Task:
    task_id: UUID
    job: Job
    number: int
    """The position of the task in the example, for messages."""
    index: int | None
    payload: str
    slot_key: str | None
    dedupe_key: str | None
    bulk: bool
    max_attempts: int
    queued_at: datetime
    run: Run | None = None
    status: str = "Queued"
    attempt: int = 1
    parked: bool = False
    late_reply: bool = False
    dead: bool = False
    cancel_requested: bool = False
    slot: bool = False
    inline: bool = False
    """True while a dispatcher runs the task itself."""
    lease_token: UUID | None = None
    lease_expires_at: datetime | None = None
    timeout_at: datetime | None = None
    retry_at: datetime | None = None
    ended_at: datetime | None = None
    worker: str | None = None
    progress: float | None = None
    result: str | None = None
    history: dict[tuple[int, UUID | None], Past] = field(default_factory=dict)
    events: set[str] = field(default_factory=set)
    outputs: int = 0
    batches: set[tuple[int, str]] = field(default_factory=set)

    def __repr__(self) -> str:
        return f"task {self.number}"

    @property
    def over(self) -> bool:
        return self.status in ("Completed", "Canceled") or self.dead

    @property
    def final(self) -> bool:
        """True if the task has ended and no late report may change it."""
        return self.over and not (self.dead and self.late_reply)

    @property
    def cancelable(self) -> bool:
        return not self.over and not self.cancel_requested

    @property
    def deadline(self) -> datetime:
        assert self.timeout_at is not None
        return self.timeout_at

    @property
    def last_error(self) -> str | None:
        """The error of the newest recorded attempt."""
        newest = max(self.history.items(), key=lambda item: (item[0][0], item[1].ended_at), default=None)
        return newest[1].error_class if newest else None

    def changed(self) -> None:
        if self.run is not None:
            self.run.changed = True

    def place(self) -> tuple[bool, int, int]:
        """Returns the sort key within a run; tasks without a run come last."""
        return self.index is None, self.index or 0, self.task_id.int

    def rank(self) -> tuple[int, datetime]:
        """Returns the sort key for waking."""
        return int(self.bulk), self.queued_at

    def held_by(self, hold: Hold) -> bool:
        return self.status == "Running" and (self.attempt, self.lease_token) == (hold.attempt, hold.lease_token)

    def awaits_late_reply_of(self, hold: Hold) -> bool:
        """True if the reaper ended the attempt and no newer one has started.

        A cancel of the run makes a dead letter final.
        """
        if not self.late_reply or self.lease_token != hold.lease_token:
            return False
        if self.dead and self.run is not None and self.run.cancel_requested:
            return False
        return (self.status, self.attempt) in (("Failed", hold.attempt), ("Queued", hold.attempt + 1))

    def reason_not_to_claim(self) -> str:
        if self.status == "Failed":
            return "Failed" if self.dead else "NotDue"
        return {"Queued": "LimitReached", "Running": "AlreadyRunning"}.get(self.status, self.status)


@dataclass(frozen=True)
class Verdict:
    """The expected reply for one item of a request."""

    task: Task | None
    status: str | None = None
    repeated: bool = False
    refused: str | None = None
    """The code of the refusal."""
    stale: str | None = None

    @classmethod
    def fenced(cls, task: Task | None, hold: Hold) -> Self:
        return cls(task, refused="fenced", stale=_stale(task, hold))


def _stale(task: Task | None, hold: Hold) -> str:
    if task is None:
        return "task"
    if task.attempt != hold.attempt:
        return "attempt"
    if task.lease_token != hold.lease_token:
        return "lease_token"
    return "timeout" if task.status == "Running" else "status"
