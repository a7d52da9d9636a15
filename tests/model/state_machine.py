"""The state machine with all rules, and its end: from any state, all started work ends."""

from __future__ import annotations

import sys

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.model.loop_rules import Loops
from tests.model.model_types import Definition
from tests.model.rule_base import dispatchers
from tests.model.submission_rules import definitions, items
from tests.model.user_rules import Users
from tests.model.worker_rules import COMPLETED

_ROUNDS = 10
"""More than any example needs: a task that a dispatcher runs may fail a few times."""


class KernelMachine(Loops, Users):
    @initialize(at=dispatchers, definition=definitions, listed=items, limit=st.integers(0, 4))
    def begin_with_work(
        self, at: int, definition: Definition, listed: list[tuple[str | None, str]], limit: int
    ) -> None:
        """Starts a first run, of which a worker holds a part."""
        self.begin(at, definition, listed)
        if limit:
            self.claim_range(at, self.model.runs[0], 0, len(listed), limit)

    def teardown(self) -> None:
        # Not after a failure, so that its state stays visible.
        if sys.exc_info()[0] is None:
            self.drive_to_the_end()

    def drive_to_the_end(self) -> None:
        kinds = {(task.status, task.parked, task.dead): task for task in self.model.tasks if task.status != "Running"}
        for task in kinds.values():
            self.explain(0, task)
        for _ in range(_ROUNDS):
            if all(task.over for task in self.model.tasks):
                break
            self._round()
        self._nothing_is_left()

    def _round(self) -> None:
        """Simulates two minutes of work: runs the loops, claims every task and reports it."""
        self.clock.advance(100)
        self.revive_dead_messages(0)
        for name in ("reaper", "retries", "reconciler", "relay"):
            self.run_loop(1, name)
        while self._serve():
            self.clock.advance(1)

    def _serve(self) -> bool:
        """Simulates one worker: claims all messages, and reports all its claims."""
        letters = self.receive_all(0, 30.0)
        self.hurry = True
        for letter in letters:
            self.claim_letter(0, letter, limit=100)
        self.hurry = False
        if holds := self.live_holds():
            self.complete(0, [COMPLETED.of(hold) for hold in holds])
        return bool(letters)

    def _nothing_is_left(self) -> None:
        stuck = [task for task in self.model.tasks if not task.over]
        assert not stuck, f"not brought to an end: {[(task, task.status, task.parked) for task in stuck]}"
        self.run_loop(0, "run-counters")
        unended = [run for run in self.model.runs if run.ended_at is None]
        assert not unended, f"all tasks ended, but not {unended}"
        (left,) = self.world.select(
            "select (select count(*) from interlock.slots) + (select count(*) from interlock.run_deltas) as n"
        )
        assert left["n"] == 0
