"""Shared parts of all rules: the world, the model, the claims that workers hold, and a check after each call."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from interlock.apps.app import App
from interlock.errors import InterlockError
from interlock.wire.attempts import Receipt
from tests.model.dispatchers import World, crashing
from tests.model.model import Model
from tests.model.model_types import Hold, Job, Run, Task
from tests.model.table_checks import Watch

T = TypeVar("T")

dispatchers = st.integers(0, 1)
"""The dispatcher that takes the call."""
picks = st.integers(0, 999)
"""Selects an existing object by number, so that a shortened example remains valid."""
several = st.lists(picks, min_size=1, max_size=4)
seldom = st.sampled_from([False, False, False, False, False, True])
often = st.sampled_from([True, True, True, False])
ages = st.sampled_from(["live", "live", "live", "late", "late", "any"])
"""The age of a claim: valid, just reaped, or any that was ever held."""


class Wakeup(msgspec.Struct):
    """The body of a message."""

    task_id: UUID | None = None
    run_id: UUID | None = None
    start: int = 0
    end: int = -1


@dataclass(frozen=True)
class Letter:
    """A message as delivered once."""

    queue: str
    message_id: str
    receipt: str
    wakeup: Wakeup

    def as_receipt(self) -> Receipt:
        return Receipt(self.queue, self.message_id, self.receipt)


@dataclass(frozen=True)
class Refused:
    code: str
    stale: str | None = None


class Driven(RuleBasedStateMachine):
    def __init__(self, world: World) -> None:
        super().__init__()
        world.empty()
        self.world = world
        self.clock = world.clock
        self.model = Model(world.clock)
        self.watch = Watch(world, self.model, {})
        self.holds: list[Hold] = []
        """Every claim ever returned: most become stale, and are used anyway."""
        self.letters: list[Letter] = []
        self.lost: set[UUID] = set()
        self.hurry = False
        """Skips the check after each of many similar calls, if they leave nothing to adopt."""
        self.made = 0
        """Number of tasks created so far."""

    # Calls

    def call(self, at: int, work: Callable[[App], Coroutine[Any, Any, T]], *, crash: str | None = None) -> T:
        with crashing(crash):
            return self.world.do(work(self.world.dispatchers[at]))

    def ask(self, at: int, work: Callable[[App], Coroutine[Any, Any, T]], *, crash: str | None = None) -> T | Refused:
        """Returns the reply or the refusal, as an HTTP client would see it."""
        try:
            return self.call(at, work, crash=crash)
        except InterlockError as error:
            return Refused(error.code, error.extra.get("stale"))

    def look(self, text: str) -> None:
        note(f"  {text}")
        if self.hurry:
            return
        self.watch.look(lost=self.lost)
        self.lost = {task.task_id for task in self.model.tasks if self._still_lost(task)}

    def _still_lost(self, task: Task) -> bool:
        return task.task_id in self.lost and task.status == "Queued" and not task.parked

    # Choices

    def replenish(self) -> None:
        """Creates more work when retention has deleted everything."""
        raise NotImplementedError

    def some_task(self, pick: int, *, status: str | None = None) -> Task:
        """Prefers a task with this status."""
        if not self.model.tasks:
            self.replenish()
        return chosen([task for task in self.model.tasks if task.status == status] or self.model.tasks, pick)

    def some_run(self, pick: int) -> Run:
        if not self.model.runs:
            self.replenish()
        return chosen(self.model.runs, pick)

    def some_job(self, pick: int) -> Job:
        if not self.model.jobs:
            self.replenish()
        return chosen(self.model.jobs, pick)

    def live_holds(self) -> list[Hold]:
        return [hold for hold in self.holds if (task := self.model.find(hold.task_id)) and task.held_by(hold)]

    def late_holds(self) -> list[Hold]:
        """Returns claims that the reaper has ended without the worker's knowledge."""
        return [
            hold
            for hold in self.holds
            if (task := self.model.find(hold.task_id)) and task.late_reply and task.lease_token == hold.lease_token
        ]

    def named(self, holds: Sequence[Hold]) -> str:
        return ", ".join(self.name_of(hold) for hold in holds)

    def name_of(self, hold: Hold) -> str:
        task = next(t for t in (*self.model.tasks, *self.model.gone) if t.task_id == hold.task_id)
        return f"{task} attempt {hold.attempt}" + ("" if task.held_by(hold) else " (stale)")


def chosen(pool: Sequence[T], pick: int) -> T:
    return pool[pick % len(pool)]
